"""Streams share their ends' bandwidth fairly, and take as long as a plain fluid simulation says."""

from __future__ import annotations

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


# -- fairness --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("count", [1, 2, 7])
def test_equal_streams_from_one_sender_take_as_many_times_as_long(count):
    network = Rates(up=[100.0] + [math.inf] * count, down=[1000.0] * (count + 1))
    streams = [Stream(0, to, 500, 1.0) for to in range(1, count + 1)]
    assert ends_of(streams, network) == pytest.approx([1.0 + count * 5.0] * count, rel=1e-12)


@pytest.mark.parametrize("count", [1, 2, 7])
def test_equal_streams_to_one_receiver_take_as_many_times_as_long(count):
    network = Rates(up=[1000.0] * (count + 1), down=[100.0] + [math.inf] * count)
    streams = [Stream(sender, 0, 500, 0.0) for sender in range(1, count + 1)]
    assert ends_of(streams, network) == pytest.approx([count * 5.0] * count, rel=1e-12)


def test_a_stream_that_ends_speeds_up_the_others():
    network = Rates(up=[100.0] * 3, down=[1000.0] * 3)
    # Half each until the short one's 100 bytes are sent at 2 s; the other's 400 left then take 4 s.
    assert ends_of([Stream(0, 1, 100, 0.0), Stream(0, 2, 500, 0.0)], network) == pytest.approx([2.0, 6.0])


def test_a_stream_that_begins_slows_down_the_others():
    network = Rates(up=[100.0] * 3, down=[1000.0] * 3)
    # 300 bytes are left at 2 s, and half the rate for them: the newcomer's last 200 have the whole rate again.
    assert ends_of([Stream(0, 1, 500, 0.0), Stream(0, 2, 500, 2.0)], network) == pytest.approx([8.0, 10.0])


def test_what_tcp_keeps_a_stream_from_taking_the_others_have():
    """A lossy exchange uses a tenth of the rate, and the newcomers share all the rest."""
    network = Rates(up=[100.0] * 4, down=[1000.0] * 4)
    streams = [Stream(0, 1, 1000, 0.0, ceiling=10.0), Stream(0, 2, 450, 0.0), Stream(0, 3, 450, 0.0, ceiling=1e3)]
    assert ends_of(streams, network) == pytest.approx([100.0, 10.0, 10.0])


@pytest.mark.parametrize(("up", "down", "seconds"), [(100.0, 400.0, 5.0), (400.0, 100.0, 5.0), (math.inf, 50.0, 10.0)])
def test_the_slower_end_decides(up, down, seconds):
    network = Rates(up=[up, 1.0], down=[1.0, down])
    assert ends_of([Stream(0, 1, 500, 0.0)], network) == pytest.approx([seconds])


def test_up_and_down_do_not_share():
    network = Rates(up=[100.0, 100.0], down=[100.0, 100.0])
    assert ends_of([Stream(0, 1, 500, 0.0), Stream(1, 0, 500, 0.0)], network) == pytest.approx([5.0, 5.0])


def test_between_unlimited_ends_a_stream_takes_no_time():
    events = Events()
    ended = []
    flow = Flows(events, NetworkModel(rate_bytes_s=math.inf)).start(0, 1, 10**12, lambda: ended.append(events.now))
    assert flow is None
    assert ended == [0.0]


# -- stopping --------------------------------------------------------------------------------------------------------
def test_a_stream_stopped_in_the_middle_is_never_done_and_leaves_its_share():
    network = Rates(up=[100.0] * 3, down=[1000.0] * 3)
    streams = [Stream(0, 1, 500, 0.0, stop_s=4.0), Stream(0, 2, 500, 0.0)]
    assert ends_of(streams, network) == [math.inf, pytest.approx(7.0)]


def test_stopping_twice_and_after_the_end_does_nothing():
    events = Events()
    flows = Flows(events, Rates(up=[100.0] * 3, down=[1000.0] * 3))
    ended = []
    first = flows.start(0, 1, 500, lambda: ended.append(("first", events.now)))
    second = flows.start(0, 2, 500, lambda: ended.append(("second", events.now)))
    events.run_until(4.0)
    flows.stop(first)
    flows.stop(first)
    events.run_until(20.0)
    flows.stop(second)
    events.run_until(40.0)
    assert ended == [("second", pytest.approx(7.0))]


def test_of_a_stream_under_way_what_has_gone_is_counted_and_of_one_that_was_stopped_no_more():
    """Count the payload, of which the wire carries half as much again."""
    events = Events()
    flows = Flows(events, Rates(up=[100.0] * 3, down=[1000.0] * 3))
    first = flows.start(0, 1, 600, lambda: None, payload_bytes=400)
    flows.start(0, 2, 600, lambda: None, payload_bytes=400)
    seen = [flows.sent_bytes]
    events.run_until(3.0)  # 150 of each
    seen.append(flows.sent_bytes)
    flows.stop(first)
    flows.stop(first)
    seen.append(flows.sent_bytes)
    events.run_until(6.0)  # 300 more of the second
    seen.append(flows.sent_bytes)
    events.run_until(100.0)
    assert [*seen, flows.sent_bytes] == [0, 200, 200, 400, 500]


def test_what_takes_no_time_is_counted_at_once():
    flows = Flows(Events(), NetworkModel(rate_bytes_s=math.inf))
    flows.start(0, 1, 600, lambda: None, payload_bytes=400)
    flows.start(0, 1, 600, lambda: None)
    assert flows.sent_bytes == 1000


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


@given(st.lists(st.tuples(st.integers(1, PEERS - 1), st.integers(1, 1000)), min_size=1, max_size=12))
def test_no_byte_is_lost_or_sent_twice(wanted):
    """A sender that alone limits its streams is busy until the last one ends, when all bytes have been sent."""
    network = Rates(up=[7.0] * PEERS, down=[math.inf] * PEERS)
    streams = [Stream(0, to, size, 0.0) for to, size in wanted]
    ends = ends_of(streams, network)
    assert max(ends) == pytest.approx(sum(stream.size for stream in streams) / 7.0, rel=1e-9)
    # With equal shares at all times, a stream of some size ends when every other one has sent as much or all it has.
    for end, stream in zip(ends, streams, strict=True):
        sent = sum(min(stream.size, other.size) for other in streams)
        assert end == pytest.approx(sent / 7.0, rel=1e-9)
