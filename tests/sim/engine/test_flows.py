"""Streams share their ends' bandwidth fairly, and take as long as a plain fluid simulation says."""

import math
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.engine.events import Events
from sim.engine.flows import Flow, Flows
from sim.world.network import NetworkModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates(NetworkModel):
    """Bytes a second of each peer."""

    up: list[float] = field(default_factory=list)
    down: list[float] = field(default_factory=list)

    def up_bytes_s(self, peer: int) -> float:
        return self.up[peer]

    def down_bytes_s(self, peer: int) -> float:
        return self.down[peer]


@dataclass(frozen=True, slots=True)
class Stream:
    sender: int
    receiver: int
    size: float  # bytes
    start_s: float
    stop_s: float = math.inf  # when it is stopped, unless it has ended before
    ceiling: float = math.inf  # bytes a second that its TCP allows


def ends_of(streams: list[Stream], network: NetworkModel) -> list[float]:
    """Return when the simulator's flows have sent the last byte of each stream; inf for a stopped one."""
    events = Events()
    flows = Flows(events, network)
    ends = [math.inf] * len(streams)
    under_way: dict[int, Flow] = {}

    def begin(number: int, stream: Stream) -> None:
        def done() -> None:
            assert ends[number] == math.inf, "done is said once"
            ends[number] = events.now
            under_way.pop(number, None)

        flow = flows.start(stream.sender, stream.receiver, stream.size, done, stream.ceiling)
        if flow is not None:
            under_way[number] = flow

    def stop(number: int) -> None:
        flow = under_way.pop(number, None)
        if flow is not None:
            flows.stop(flow)

    for number, stream in enumerate(streams):
        events.push(stream.start_s, begin, number, stream)
        if stream.stop_s < math.inf:
            events.push(stream.stop_s, stop, number)
    events.run_until(1e12)
    return ends


def level(rate: float, ceilings: list[float]) -> float:
    """Return the share at which the streams of one end, each limited to its ceiling, together use its rate."""
    if sum(ceilings) <= rate:
        return math.inf
    low, high = 0.0, rate
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(min(ceiling, middle) for ceiling in ceilings) <= rate else (low, middle)
    return low


def plainly(streams: list[Stream], network: NetworkModel) -> list[float]:
    """Return the same from a slow version, which finds all rates anew whenever a stream begins or ends."""
    remaining = {number: float(stream.size) for number, stream in enumerate(streams)}
    ends = [math.inf] * len(streams)
    now, going = 0.0, set[int]()
    while True:
        rates = {}
        for number in going:
            one = streams[number]
            sending = [streams[other].ceiling for other in going if streams[other].sender == one.sender]
            receiving = [streams[other].ceiling for other in going if streams[other].receiver == one.receiver]
            up, down = network.up_bytes_s(one.sender), network.down_bytes_s(one.receiver)
            rates[number] = min(level(up, sending), level(down, receiving), one.ceiling)
        times = [now + remaining[number] / rates[number] for number in going]
        times += [streams[number].start_s for number in remaining if number not in going]
        times += [streams[number].stop_s for number in going]
        until = min(times, default=math.inf)
        if until == math.inf:
            return ends
        for number in [*going]:
            due = now + remaining[number] / rates[number]
            remaining[number] -= rates[number] * (until - now) if rates[number] < math.inf else remaining[number]
            if due <= until:
                ends[number] = until
                going.discard(number)
                del remaining[number]
            elif streams[number].stop_s <= until:
                going.discard(number)
                del remaining[number]
        going |= {number for number in remaining if streams[number].start_s <= until}
        now = until


def test_between_unlimited_ends_a_stream_takes_no_time_and_is_counted_at_once():
    events, ended = Events(), []
    flows = Flows(events, NetworkModel(rate_bytes_s=math.inf))
    assert flows.start(0, 1, 600, lambda: ended.append(events.now), payload_bytes=400) is None
    flows.start(0, 1, 600, lambda: None)
    assert ended == [0.0]
    assert flows.sent_bytes == 1000


def test_a_stopped_stream_counts_what_it_has_sent_and_is_never_done_however_often_it_is_stopped():
    """Count the payload, of which the wire carries half as much again. The other stream then has the whole rate."""
    events = Events()
    flows = Flows(events, Rates(up=[100.0] * 3, down=[1000.0] * 3))
    ended = []
    first = flows.start(0, 1, 600, lambda: ended.append(("first", events.now)), payload_bytes=400)
    second = flows.start(0, 2, 600, lambda: ended.append(("second", events.now)), payload_bytes=400)
    seen = [flows.sent_bytes]
    events.run_until(3.0)  # 150 of each
    seen.append(flows.sent_bytes)
    for _ in range(2):
        flows.stop(first)
        seen.append(flows.sent_bytes)
    events.run_until(6.0)  # 300 more of the second
    seen.append(flows.sent_bytes)
    events.run_until(100.0)
    flows.stop(second)
    assert [*seen, flows.sent_bytes] == [0, 200, 200, 200, 400, 500]
    assert ended == [("second", pytest.approx(7.5))]


# -- against the plain one -------------------------------------------------------------------------------------------
PEERS = 4
rates = st.lists(st.sampled_from([1.0, 3.0, 10.0, 64.0, 1000.0, math.inf]), min_size=PEERS, max_size=PEERS)


@st.composite
def worlds(draw):
    network = Rates(up=draw(rates), down=draw(rates))
    streams = []
    for _ in range(draw(st.integers(1, 10))):
        sender, receiver = draw(st.permutations(range(PEERS)))[:2]
        start_s = draw(st.floats(0, 20))
        stop_s = draw(st.just(math.inf) | st.floats(0, 30).map(lambda after_s, start_s=start_s: start_s + after_s))
        ceiling = draw(st.sampled_from([math.inf, math.inf, 0.5, 2.0, 5.0, 30.0]))
        streams.append(Stream(sender, receiver, draw(st.integers(1, 1000)), start_s, stop_s, ceiling))
    return network, streams


@given(worlds())
@settings(max_examples=3 * settings.default.max_examples)
def test_any_streams_end_when_a_plain_fluid_simulation_says(world):
    network, streams = world
    ours, plain = ends_of(streams, network), plainly(streams, network)
    for one, other, stream in zip(ours, plain, streams, strict=True):
        if math.isfinite(stream.stop_s) and min(abs(one - stream.stop_s), abs(other - stream.stop_s)) < 1e-6:
            continue  # at the very instant of its end rounding decides
        assert one == pytest.approx(other, rel=1e-6, abs=1e-6)
