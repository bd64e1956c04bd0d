"""A finished run: who says so, which members believe it, and what a newcomer gets afterwards."""

import math
from dataclasses import replace

from gossip.effects import MemberState
from tests.harness.world import World, peer_id


def look(swarm, seconds):
    """Let time pass, in which every driver asks its peer once a second."""
    for _ in range(int(seconds)):
        swarm.run(1.0)
        for node in swarm.hosts:
            if not node.gone:
                node.perform(node.peer.ending.count_votes(swarm.now))


def finish(swarm, *nodes):
    for node in nodes:
        node.perform(node.peer.finish(swarm.now))


def trained(count):
    swarm = World(1)
    nodes = [swarm.start(*([0] if number else []), value=1000) for number in range(count)]
    swarm.until(swarm.agreed, 30.0)
    swarm.run(20.0)
    return swarm, nodes


def test_one_members_word_ends_nothing_for_those_who_train():
    swarm, nodes = trained(3)
    finish(swarm, nodes[2])
    look(swarm, 10)
    assert [node.peer.local.finished for node in nodes] == [False, False, True]
    pair, both = trained(2)
    finish(pair, both[1])
    look(pair, 10)
    assert not both[0].peer.local.finished


def test_when_most_members_have_finished_so_have_the_others():
    swarm, nodes = trained(4)
    finish(swarm, *nodes[:3])
    look(swarm, 5)
    assert nodes[3].peer.local.finished
    assert nodes[3].kinds[-1] == "finished"
    assert nodes[3].peer.membership.me.finished


def test_those_who_finished_and_left_have_said_so():
    swarm, nodes = trained(4)
    finish(swarm, nodes[0])
    look(swarm, 3)
    nodes[0].crash()
    swarm.run(60.0)
    finish(swarm, nodes[1], nodes[2])
    look(swarm, 5)
    assert nodes[3].peer.local.finished


def come(swarm, seconds, *, exchanging=True):
    """Start a member that takes the run's weights, says that the run is finished, and stays."""
    liar = swarm.start(0, value=1000)
    swarm.until(lambda: liar.peer.view.ready, 20.0)
    liar.stepping = exchanging  # without a step boundary it accepts no exchange
    finish(swarm, liar)
    if not exchanging:
        liar.peer.schedule.retry_at = math.inf
        liar.peer.exchanges.abandon()
    look(swarm, seconds)
    return liar


def test_identities_that_come_one_after_another_have_one_vote():
    swarm, nodes = trained(3)
    for _ in range(8):
        liar = come(swarm, 10)
        while not all(liar.id in node.peer.ending.partners for node in nodes):
            look(swarm, 1)
            assert swarm.now < 900.0
        liar.leave()
        look(swarm, 3)
    assert not any(node.peer.local.finished for node in nodes)


def test_members_without_a_finished_exchange_have_no_vote():
    swarm, nodes = trained(3)
    for node in nodes:
        node.peer.schedule.retry_at = math.inf
    for _ in range(5):
        come(swarm, 2, exchanging=False)
    assert all(len(node.peer.membership.run_members(node.run_id)) == 7 for node in nodes)
    assert not any(node.peer.local.finished for node in nodes)


def test_members_that_are_known_by_hearsay_count_as_training():
    """A handful of identities that meet a newcomer first cannot end its run."""
    swarm, nodes = trained(3)
    late = nodes[0].peer
    others = late.membership.run_members(nodes[0].run_id)
    late.ending.note_partners([record.id for record in others])
    finish(swarm, *nodes[1:])
    swarm.run(5.0)
    heard = replace(others[0], id=peer_id(20), finished=False)
    members = [(record, MemberState.ALIVE) for record in [*late.membership.run_members(nodes[0].run_id), heard]]
    late.membership.members = lambda: members
    nodes[0].perform(late.ending.count_votes(swarm.now))
    assert not late.local.finished
    members.pop()
    nodes[0].perform(late.ending.count_votes(swarm.now))
    assert late.local.finished


def test_a_late_comer_gets_the_weights_and_learns_that_nothing_is_left_to_train():
    swarm, nodes = trained(3)
    finish(swarm, *nodes)
    late = swarm.start(0, value=5)
    swarm.until(lambda: late.peer.view.ready, 20.0)
    assert (late.run_id, late.value) == (nodes[0].run_id, nodes[0].value)
    assert late.peer.local.finished
    assert late.kinds[-1] == "finished"


def test_one_donor_of_three_cannot_tell_a_newcomer_that_all_is_over():
    swarm, nodes = trained(3)
    finish(swarm, nodes[0])
    late = swarm.start(0, value=5)  # it knows only that member
    swarm.until(lambda: late.peer.view.ready, 20.0)
    assert late.run_id == nodes[0].run_id
    assert not late.peer.local.finished


def donor_that_leaves(must_join):
    """Let the only donor crash during a transfer; return the world, the donor and its newcomer."""
    swarm = World(3)
    swarm.network.chunk_s = 2.0
    first = swarm.start(elements=400_000)
    swarm.run(30.0)
    newcomer = swarm.start(0, elements=400_000)
    newcomer.peer.run_choice.must_join = must_join
    swarm.run(3.0)
    assert newcomer.peer.joining.run_id == first.run_id
    first.crash()
    return swarm, first, newcomer


def test_a_newcomer_whose_donors_leave_begins_a_run_of_its_own_and_says_what_its_weights_are():
    swarm, first, newcomer = donor_that_leaves(must_join=False)
    swarm.until(lambda: newcomer.peer.view.ready, 60.0)
    assert newcomer.run_id != first.run_id
    assert newcomer.peer.local.progress.samples <= 1
    assert newcomer.kinds[:2] == ["started", "untaken"], "a warning, which one who has set up no logging sees as well"
    assert "its own, with nothing behind them" in next(text for _, kind, text in newcomer.notices if kind == "untaken")
    assert "untaken" not in first.kinds


def test_a_newcomer_that_must_join_begins_nothing_when_its_donors_leave():
    swarm, _, newcomer = donor_that_leaves(must_join=True)
    swarm.run(200.0)
    assert not newcomer.peer.view.ready
    assert newcomer.kinds == []


def test_a_checkpoint_of_a_finished_run_is_finished_and_another_is_not():
    swarm, [node] = trained(1)
    node.perform(node.peer.resume(b"g" * 16, 100, 1.0, swarm.now, True))
    assert node.peer.local.finished
    assert node.peer.membership.me.finished
    node.perform(node.peer.resume(b"h" * 16, 100, 1.0, swarm.now))
    assert not node.peer.local.finished
    assert not node.peer.membership.me.finished
