"""Jobs launched together start at different times: a node waits for others, serves them, and starts in time."""

import logging
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
import torch

from gossip.effects import MemberState
from gossip.errors import ConfigError
from gossip.ids import Address, MemberRecord
from gossip.wire.messages import Gossip
from gossip.wire.records import signed
from node import Node
from node.identity.keys import Identity
from node.loop.startup import Startup
from node.observe.reduced import STARTED, Figures
from node.options import NodeOptions
from node.settings import Settings
from tests.node.conftest import QUICK
from tests.node.trainees import heard_of, linear


def waited(caplog):
    return heard_of(caplog, "waited")


def test_who_waits_gives_newcomers_its_weights_and_trains_when_they_are_here(launch, until, caplog, tmp_path):
    file = tmp_path / "seeds"
    first = launch(linear(), wait_for=3, wait_s=60.0)
    file.write_text(first.made.address)
    second = launch(linear(1), seeds=[f"@{file}"])
    assert second.running.wait(30)  # It has the weights of a node that takes no step yet.
    assert not first.running.is_set()
    assert all(torch.equal(value, first.model.state_dict()[name]) for name, value in second.at_entry.items())
    third = launch(linear(2), seeds=[f"@{file}"])
    until(lambda: all(one.running.is_set() for one in (first, second, third)))
    assert waited(caplog) == []


def test_who_waited_long_enough_goes_on_and_says_how_many_came(launch, until, caplog):
    began = time.monotonic()
    first = launch(linear(), wait_for=2, wait_s=0.6)
    assert first.running.wait(30)
    assert time.monotonic() - began >= 0.6
    until(lambda: waited(caplog))
    assert len(waited(caplog)) == 1
    assert "Waited 0.6 s for 2 members, of whom 1 is here with the weights, this one included" in waited(caplog)[0]
    second = launch(linear(1), seeds=[first.made.address], wait_for=3, wait_s=0.6)
    assert second.running.wait(30)
    until(lambda: len(waited(caplog)) == 2)
    assert "for 3 members, of whom 2 are here with the weights, this one included" in waited(caplog)[1]


def test_who_waits_for_others_begins_no_run_of_its_own_meanwhile(launch, until, caplog, tmp_path):
    caplog.set_level(logging.INFO, "gossip")
    file = tmp_path / "seeds"
    config = replace(QUICK, join_timeout_s=0.1)
    nodes = [launch(linear(n), seeds=[f"@{file}"], wait_for=2, wait_s=60.0, config=config) for n in range(2)]
    time.sleep(0.5)
    assert not any(node.side.network.peer.view.ready for node in nodes), "they would be two runs that meet"
    file.write_text("\n".join(node.made.address for node in nodes))
    until(lambda: all(node.running.is_set() for node in nodes))
    assert len(heard_of(caplog, "started")) == 1


def test_a_node_that_leaves_as_soon_as_it_counted_all_ends_the_wait_of_the_others(launch, until, monkeypatch):
    """A short script may train and end before another node counts it."""
    first_left, counts = threading.Event(), Startup.count_members

    def count(startup):
        if startup.network.service.settings.seeds:  # The others count only after the first has left.
            assert first_left.wait(30)
        return counts(startup)

    monkeypatch.setattr(Startup, "count_members", count)
    first = launch(linear(), wait_for=3, wait_s=600.0)
    others = [launch(linear(n), seeds=[first.made.address], wait_for=3, wait_s=600.0) for n in (1, 2)]
    assert first.running.wait(30)
    first.stop()
    for other in others:
        until(lambda other=other: other.side.network.peer.membership.state(first.side.me) is MemberState.LEFT)
    first_left.set()
    until(lambda: all(other.running.is_set() for other in others))


def test_a_wait_for_more_members_than_the_others_waited_for_goes_on(launch, until):
    first = launch(linear(), wait_for=2, wait_s=600.0)
    second = launch(linear(1), seeds=[first.made.address], wait_for=2, wait_s=600.0)
    until(lambda: first.running.is_set() and second.running.is_set())
    third = launch(linear(2), seeds=[first.made.address], wait_for=4, wait_s=600.0)
    until(lambda: third.side.startup.count_members()[::2] == (3, 2))
    assert not third.running.is_set()
    launch(linear(3), seeds=[first.made.address])
    assert third.running.wait(30)


def test_right_after_entering_samplers_and_members_know_all_that_were_waited_for(launch, until, monkeypatch):
    """This holds even if the network thread looks for news of the members only later."""
    monkeypatch.setattr("node.network.service.POLL_S", 600.0)
    seen = {}

    def look():  # The loops call it before their first step.
        node = threading.current_thread().node
        if node not in seen:
            seen[node] = len(node.sampler(3_000, 10)), len(node.members)

    waits = {"wait_for": 3, "wait_s": 600.0}
    first = launch(linear(), None, look, **waits)
    for number in (1, 2):
        launch(linear(number), None, look, seeds=[first.made.address], **waits)
    until(lambda: len(seen) == 3)
    assert [count for _, count in seen.values()] == [3, 3, 3]
    batches = sum(length for length, _ in seen.values())
    assert 300 <= batches <= 303, "the shares of 3,000 samples, of which the last batch may be short"


def test_members_that_somebody_made_up_end_no_wait(train, launch, until):
    liar = train(linear())
    first = launch(linear(1), seeds=[liar.node.address], wait_for=3, wait_s=600.0)
    side = first.side
    until(lambda: side.network.peer.view.alive_count == 2)
    run_id, sender = liar.side.network.peer.view.run_id, liar.side.network.peer.id
    made_up = []  # Use another host: per introducer, a node dials only four unanswered ports of a host.
    for port in range(1, 9):
        someone = Identity.load(None)
        record = MemberRecord(
            someone.id, someone.public_key, 1, address=Address("127.0.0.2", port), run_id=run_id, ready=True,
            extra=(Figures().pack_mark(STARTED, (3.0, 0), run_id, 0),),
        )  # fmt: skip
        made_up.append(signed(record, someone.sign))
    runtime = side.network.runtime
    side.network.call(lambda: runtime.perform(runtime.peer.receive(sender, Gossip(tuple(made_up)), runtime.now)))
    until(lambda: len(side.network.peer.membership.members()) == 9)
    assert side.network.peer.view.alive_count == 2
    assert not first.running.is_set()
    launch(linear(2), seeds=[liar.node.address])
    assert first.running.wait(30)
    assert side.network.peer.view.alive_count == 3


def test_a_late_comer_to_a_run_that_is_finished_waits_for_nobody(train, launch):
    first = train(linear())
    first.do(lambda node: node.finish(0.1))
    late = launch(linear(1), seeds=[first.node.address], wait_for=9, wait_s=600.0)
    assert late.running.wait(30)
    assert late.node.finished


def test_a_state_that_others_keep_is_gone_on_with_before_anybody_is_waited_for(train, monkeypatch):
    first = train(linear())
    first.do(lambda node: node.step(samples=1_000))
    state = first.do(lambda node: node.state_dict())
    node, seen = Node(linear(), config=QUICK, wait_for=2), []
    node.load_state_dict(state)
    side = node._training
    monkeypatch.setattr(side.startup, "wait_for_others", lambda began: seen.append(side.network.peer.view.run_id.hex()))
    with node:
        assert seen == [state["run_id"]], "those who come meanwhile take the weights of that run"


# -- settings ----------------------------------------------------------------------------------------------------------
def gathered(environment, **given):
    return Settings.gather(NodeOptions(**given), environment)


def test_arguments_win_over_the_environment_and_one_waits_for_nobody():
    def waits(environment, **given):
        settings = gathered(environment, **given)
        return settings.wait_for, settings.wait_s, settings.join_or_fail_s

    named = {"GOSSIP_WAIT_FOR": "4", "GOSSIP_WAIT_S": "2.5", "GOSSIP_MUST_JOIN": "1.5"}
    assert waits({}) == (1, 60.0, None)
    assert waits(named) == (4, 2.5, 1.5)
    assert waits(named, wait_for=1, wait_s=0.0, join_or_fail_s=3.0) == (1, 0.0, 3.0)
    assert waits({}, wait_for=np.int64(3), wait_s=np.float32(2.5), join_or_fail_s=np.int64(4)) == (3, 2.5, 4.0)


@pytest.mark.parametrize("count", [0, -1, 2.5, "many", True])
def test_a_count_that_is_none_is_refused(count):
    with pytest.raises(ConfigError, match=r"wait_for is .*: give how many members"):
        Node(linear(), wait_for=count)
    with pytest.raises(ConfigError, match="wait_for"):
        gathered({"GOSSIP_WAIT_FOR": str(count)})


@pytest.mark.parametrize("seconds", [-1.0, -1, float("nan"), float("inf"), "soon", True])
def test_a_time_that_is_none_is_refused(seconds):
    for name, variable in (("wait_s", "GOSSIP_WAIT_S"), ("join_or_fail_s", "GOSSIP_MUST_JOIN")):
        with pytest.raises(ConfigError, match=rf"^{name} is .*: give a number of seconds, as 30\.$"):
            Node(linear(), **{name: seconds})
        with pytest.raises(ConfigError, match=rf"^{variable} is .*: give a number of seconds, as 30\.$"):
            gathered({variable: str(seconds)})
    node = Node(linear())
    for call in (node.settle, node.finish):
        with pytest.raises(ConfigError, match="seconds is"):
            call(seconds)
    with pytest.raises(ConfigError, match="wait_s is"):
        node.settle(wait_s=seconds)


def test_to_join_in_no_time_is_impossible():
    with pytest.raises(ConfigError, match="join_or_fail_s is 0"):
        gathered({}, join_or_fail_s=0)
    with pytest.raises(ConfigError, match="GOSSIP_MUST_JOIN is 0"):
        gathered({"GOSSIP_MUST_JOIN": "0"})
