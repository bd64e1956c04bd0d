"""Events that a node reports to its program, and their cost to the node."""

import dataclasses
import json
import logging
import threading
import time
from collections import Counter

import pytest
from torch import nn

from gossip.config import Config
from gossip.errors import ConfigError
from gossip.exchange.session_table import REASONS
from node import Node
from node.network.transfers.log import OFFER_FAILURES
from node.observe.events import ExchangeEvent, MemberEvent, NoticeEvent, RunEvent
from node.observe.listeners import MAX_HISTORY, MAX_QUEUED_EVENTS, Listeners
from node.observe.notices import LEVELS
from tests.agreement.memory_network import Trainer
from tests.agreement.scenario import Scenario, identity, run_nodes
from tests.harness.configs import tuned
from tests.node.trainees import linear


def notice(kind="alone", number=0):
    return NoticeEvent(kind, 0.0, str(number))


@pytest.fixture
def listeners():
    made = Listeners(lambda: "ab" * 16)
    yield made
    made.close(5.0)
    assert made.thread is None or not made.thread.is_alive()


# Callbacks -----------------------------------------------------------------------------------------------------------
def test_a_callback_hears_its_kind_those_below_it_or_all(listeners, until):
    heard = {kind: [] for kind in ("*", "exchange", "exchange.done", "alone")}
    for kind, events in heard.items():
        listeners.on(kind, events.append)
    begun, done = (ExchangeEvent(f"exchange.{end}", 0.0, 7, ("ab" * 16,), "fp32") for end in ("begun", "done"))
    for event in (begun, notice(), done):
        listeners.post(event)
    until(lambda: len(heard["*"]) == 3)
    assert heard == {
        "*": [begun, notice(), done],
        "exchange": [begun, done],
        "exchange.done": [done],
        "alone": [notice()],
    }


def test_a_callback_is_taken_back_alone_and_more_than_once_does_no_harm(listeners, until):
    heard = []
    first, second = listeners.on("*", heard.append), listeners.on("*", heard.append)
    first(), first()
    listeners.post(notice())
    until(lambda: heard)
    second()
    listeners.post(notice())
    listeners.close(5.0)
    assert len(heard) == 1


@pytest.mark.parametrize("is_taken_back", [False, True])
def test_a_callback_is_added_and_taken_back_under_the_lock(listeners, is_taken_back):
    """Two threads that replace the tuple at once would otherwise lose one of their callbacks."""
    take_back = listeners.on("*", print)
    change = take_back if is_taken_back else lambda: listeners.on("alone", print)
    thread = threading.Thread(target=change)
    with listeners.lock:
        thread.start()
        thread.join(0.1)
        assert thread.is_alive()
        assert len(listeners.listeners) == 1
    thread.join(10.0)
    assert len(listeners.listeners) == (0 if is_taken_back else 2)


def test_one_that_was_taken_back_hears_nothing_of_what_was_waiting(listeners, until):
    heard, hold, standing = [], threading.Event(), threading.Event()
    listeners.on("alone", lambda event: (standing.set(), hold.wait(10)))
    second = listeners.on("*", heard.append)
    listeners.post(notice())
    assert standing.wait(10)
    second()
    hold.set()
    listeners.close(5.0)
    assert heard == []


def test_callbacks_run_in_one_thread_of_their_own_which_nobody_pays_for_who_has_none(listeners, until):
    listeners.post(notice())
    assert listeners.thread is None
    threads = []
    for _ in range(2):
        listeners.on("*", lambda event: threads.append(threading.current_thread()))
    listeners.post(notice()), listeners.post(notice())
    until(lambda: len(threads) == 4)
    assert set(threads) == {listeners.thread} != {threading.current_thread()}


@pytest.mark.parametrize("error", [ValueError("its own"), SystemExit(1), KeyboardInterrupt()])
def test_one_that_raises_is_named_once_and_is_called_again_as_others_are(listeners, until, caplog, error):
    calls, heard = [], []

    def broken(event):
        calls.append(event)
        raise error

    listeners.on("alone", broken)
    listeners.on("*", heard.append)
    for _ in range(3):
        listeners.post(notice())
    until(lambda: len(heard) == 3)
    assert len(calls) == 3
    (record,) = [record for record in caplog.records if record.exc_info]
    assert record.name == "gossip"
    assert record.exc_info[1] is error
    assert record.message == "Node abababab: The callback of node.on for 'alone' raised, and is called again."
    assert (record.node, record.kind) == ("ab" * 16, "callback")


def test_a_slow_one_holds_up_nobody_and_what_is_too_much_is_dropped_and_counted(listeners, until, caplog):
    heard, hold, standing = [], threading.Event(), threading.Event()

    def slow(event):
        standing.set()
        hold.wait(30)
        heard.append(event)

    listeners.on("*", slow)
    listeners.post(notice(number=-1))
    assert standing.wait(10)
    for number in range(MAX_QUEUED_EVENTS + 50):
        listeners.post(notice(number=number))  # It would block here for ever.
    assert listeners.dropped == 50
    assert len(listeners.history()) == MAX_HISTORY
    assert listeners.history()[-1] == notice(number=MAX_QUEUED_EVENTS + 49)
    assert [record.message for record in caplog.records if "too slow" in record.message] != []
    assert len(caplog.records) == 1, "said once"
    hold.set()
    until(lambda: len(heard) == MAX_QUEUED_EVENTS + 1)
    assert [event.sentence for event in heard] == [str(number) for number in range(-1, MAX_QUEUED_EVENTS)], (
        "in their order"
    )


def test_closing_waits_for_what_is_waiting_and_not_for_one_that_stands(until):
    heard, hold = [], threading.Event()
    quick, stuck = Listeners(lambda: "ab" * 16), Listeners(lambda: "ab" * 16)
    quick.on("*", lambda event: (time.sleep(0.01), heard.append(event)))
    for _ in range(5):
        quick.post(notice())
    quick.close(10.0)
    assert len(heard) == 5
    stuck.on("*", lambda event: hold.wait(60))
    stuck.post(notice())
    began = time.monotonic()
    stuck.close(0.05)
    assert time.monotonic() - began < 5.0
    hold.set()
    until(lambda: not stuck.thread.is_alive())


def test_a_callback_may_close(until):
    made, closed = Listeners(lambda: "ab" * 16), threading.Event()
    made.on("*", lambda event: (made.close(10.0), closed.set()))
    made.post(notice())
    assert closed.wait(5), "it would wait for itself"
    until(lambda: not made.thread.is_alive())


@pytest.mark.parametrize(
    ("kind", "callback", "said"),
    [("exchanges", print, r"There is no event 'exchanges' \(did you mean 'exchange'\?\); there are .*, exchange, "),
     ("alone", None, "which cannot be called"), (["*"], print, "There is no event")],
)  # fmt: skip
def test_what_can_be_no_callback_is_refused_in_a_sentence(listeners, kind, callback, said):
    with pytest.raises(ConfigError, match=said):
        listeners.on(kind, callback)


# The events of a node ------------------------------------------------------------------------------------------------
def of(node, kind):
    return [event for event in node.history() if event.kind == kind]


def test_an_exchange_is_told_with_whom_how_long_how_much_and_how_far(train, until):
    a, b = linear(1), linear(2)
    first = train(a)
    heard = []
    first.node.on("exchange.done", heard.append)
    second = train(b, seeds=[first.node.address])
    until(lambda: len(heard) >= 3)
    for event in heard[:3]:
        assert (event.partner, event.codec) == (second.node.id, "fp32")
        assert (event.bytes_sent, event.bytes_received) == (40, 40), "ten parameters of 4 bytes"
        assert 0 < event.seconds < 20
        assert event.distance >= 0
        assert event.reason == ""
    first.stop(), second.stop()
    begun, done = of(first.node, "exchange.begun"), of(first.node, "exchange.done")
    assert {event.session for event in done} <= {event.session for event in begun}
    assert {event.partners for event in begun} == {(second.node.id,)}
    over = [event for event in first.node.history() if event.kind in ("exchange.done", "exchange.failed")]
    distances = [event.distance for event in over if event.distance is not None][-8:]
    apart = (0.5 * sum(one**2 for one in distances) / len(distances)) ** 0.5
    assert first.node.metrics().consensus_distance == pytest.approx(apart)
    assert first.node.metrics().exchanges_done >= len(done) > 0


def test_the_distance_of_a_part_is_as_if_all_were_exchanged(train, until, quick):
    config = dataclasses.replace(quick, part="fragments 2")
    first = train(linear(1), config=config)
    second = train(linear(1), seeds=[first.node.address], config=config)
    until(lambda: of(first.node, "exchange.done"))
    second.do(lambda node: [parameter.data.add_(1.0) for parameter in second.model.parameters()])
    until(lambda: max(event.distance for event in of(first.node, "exchange.done")) == pytest.approx(10**0.5, rel=0.2))
    assert {event.bytes_sent for event in of(first.node, "exchange.done")} == {20}


def test_a_group_is_told_with_all_its_members(train, until, quick):
    config = dataclasses.replace(quick, mixing="group", group_size=0)
    nodes = [train(nn.Linear(64, 48), config=config)]
    nodes += [train(nn.Linear(64, 48), config=config, seeds=[nodes[0].node.address]) for _ in range(2)]
    ids = {one.node.id for one in nodes}
    until(lambda: any(len(event.partners) == 2 for event in of(nodes[0].node, "exchange.done")))
    event = next(event for event in of(nodes[0].node, "exchange.done") if len(event.partners) == 2)
    assert {*event.partners, nodes[0].node.id} == ids
    # Each of the two others gets its slice and the mean of ours, and gives ours and the mean of its own. Of 3,120
    # elements, in slices of whole blocks, this is about two thirds twice.
    assert 2 * 4 * 3_120 / 2 < event.bytes_sent < 2 * 4 * 3_120
    assert 2 * 4 * 3_120 / 2 < event.bytes_received < 2 * 4 * 3_120
    assert event.distance is not None


def test_the_life_of_a_node_is_told_from_joining_to_the_end(train, until, quick):
    first = train(linear(1))
    heard = []
    node = Node(linear(2), seeds=[first.node.address], config=quick)
    node.on("*", heard.append)
    with node:
        (joined,) = [event for event in node.history() if event.kind == "joined"]
        assert isinstance(joined, RunEvent)
        assert joined.run == node.state_dict()["run_id"]
        met = of(node, "member")[0]
        assert (met.id, met.before, met.after) == (first.node.id, None, "alive")
        assert str(met) == f"Member {first.node.id[:8]} is alive."
        first.stop()
        until(lambda: of(node, "alone"))
        left = of(node, "member")[-1]
        assert isinstance(left, MemberEvent)
        assert (left.id, left.after) == (first.node.id, "left")
        assert left.before in ("alive", "suspect")
        node.finish(0.05)
        (finished,) = of(node, "finished")
        assert finished.run == joined.run
    kinds = [event.kind for event in heard]
    order = [kinds.index(kind) for kind in ("listening", "joined", "alone", "finished")]
    assert order == sorted(order)
    assert tuple(heard) == node.history(), "nothing is lost at the end"
    assert [event.at_s for event in heard] == sorted(event.at_s for event in heard)
    assert all(event.kind in LEVELS for event in heard)
    assert json.loads(json.dumps([dataclasses.asdict(event) for event in heard], allow_nan=False))


def test_a_failure_is_told_with_the_partner_and_the_reason_that_was_counted(monkeypatch):
    """Real runtimes in virtual time, in which one is killed, and two are cut off from each other for six seconds."""
    told, announce = {}, Trainer.announce

    def heard(self, event):
        told.setdefault(self.index, []).append(event)
        announce(self, event)

    monkeypatch.setattr(Trainer, "announce", heard)
    script = [
        *[(0.0, lambda swarm, index=index: swarm.add(index, *([0] if index else []))) for index in range(3)],
        (4.0548, lambda swarm: swarm.kill(1)),
        (7.0, lambda swarm: swarm.partition([0], [2])),
        (13.0, lambda swarm: swarm.heal()),
    ]
    run_nodes(Scenario(script, 20.0, tuned(chunk_elements=1024, mix_every_steps=2, doubt_s=4.0)))
    ids = [identity(index).id.hex() for index in range(3)]
    for index in (0, 2):
        events = [event for event in told[index] if isinstance(event, ExchangeEvent)]
        begun, over = set(), set()
        for event in events:
            assert set(event.partners) <= {*ids} - {ids[index]}
            if event.kind == "exchange.begun":
                assert event.session not in begun
                begun.add(event.session)
            else:
                assert event.session not in over
                over.add(event.session)
                assert (event.reason == "") == (event.kind == "exchange.done")
                assert event.reason in {"", *REASONS}
                assert (event.session in begun) == (event.reason not in OFFER_FAILURES)
                assert event.seconds > 0
        assert len(begun - over) <= 2, "but for what is under way"
    failed = [event for index in (0, 2) for event in told[index] if event.kind == "exchange.failed"]
    assert {event.partner for event in failed} >= {ids[0], ids[2]}, "each with the other, while they are cut off"
    assert any(event.session not in {one.session for one in told[0] + told[2] if one.kind == "exchange.begun"}
               for event in failed), "an offer that nobody answered"  # fmt: skip
    assert "failed after" in str(failed[0])
    assert failed[0].reason in str(failed[0])


def test_logging_hears_of_exchanges_at_debug_and_a_log_has_none(train, until, caplog, monkeypatch, tmp_path):
    log = tmp_path / "log"
    monkeypatch.setenv("GOSSIP_LOG", str(log))
    caplog.set_level(logging.DEBUG, "gossip")
    first = train(linear(1))
    second = train(linear(2), seeds=[first.node.address])
    until(lambda: of(second.node, "exchange.done"))
    first.stop(), second.stop()
    told = [record for record in caplog.records if record.kind.startswith("exchange.")]
    assert {record.levelno for record in told} == {logging.DEBUG}
    assert {record.node for record in told} == {first.node.id, second.node.id}
    done = of(second.node, "exchange.done")[0]
    assert f"Node {second.node.id[:8]}: {done}" in [record.getMessage() for record in told]
    assert f"Exchange with {first.node.id[:8]} done in {done.seconds:.3f} s, 4e-05 MB out, 4e-05 MB in" in str(done)
    assert '"event":"exchange' not in log.read_text()
    assert '"event":"member"' in log.read_text()


def test_an_exchange_that_nobody_listens_to_costs_a_few_calls_more(quick):
    """Count the calls of two nodes' network threads that report exchanges, with all calls within these."""
    inside, calls = threading.local(), Counter()

    def profiled(frame, event, argument):
        name, depth = frame.f_code.co_name, getattr(inside, "depth", 0)
        entered = frame.f_code.co_filename.endswith("log.py") and name in ("on_begun", "on_ended")
        if event == "call" and (depth or entered or name == "exchange_over"):
            inside.depth = depth + 1
            calls[name] += 1
        elif event == "return" and depth:
            inside.depth = depth - 1

    threading.setprofile(profiled)
    try:
        config = Config(mix_every_steps=1, filter="none", join_timeout_s=3.0)
        with Node(linear(1), config=config) as first, Node(linear(2), seeds=[first.address], config=config) as second:
            while second.metrics().exchanges_done < 3:
                first.step(), second.step()
                time.sleep(0.001)
            calls.clear()
            until = time.monotonic() + 60
            while calls["on_ended"] < 40 and time.monotonic() < until:
                first.step(), second.step()
                time.sleep(0.001)
            counted = dict(calls)
    finally:
        threading.setprofile(None)
    assert counted["on_ended"] >= 40
    assert abs(counted["on_begun"] - counted["on_ended"]) <= 2
    assert sum(counted.values()) / counted["on_ended"] < 16, counted
