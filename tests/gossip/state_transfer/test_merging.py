"""Two runs that meet: which one stays, how far a liar's run gets, and the trial of weights before they are adopted."""

import itertools
import math
from fractions import Fraction

import pytest

from gossip.config import Config
from gossip.effects import Dial
from gossip.exchange.session import State
from gossip.state_transfer.joining import Phase
from gossip.state_transfer.runs import STALEMATE_S
from gossip.state_transfer.trial import MIN_LOSSES, TRIAL_S, TrialEvaluator
from tests.harness.marks import slow
from tests.harness.world import World, address_of

LIAR = b"\xff" * 16


def off_by(node):
    """Return a loss that is 1 at the honest weights and grows with the distance from them."""
    return 1.0 + abs(float(node.value) - 1000.0) / 1000.0


def beside_a_liar(honest=4, value=10**6, config=None, loss=off_by, step_s=0.1):
    """Return honest nodes of one run with equal weights, and a liar with its own run.

    The liar joins them and states 2**52 samples behind its run.
    """
    swarm = World(1, config=config)
    nodes = [swarm.start(*([0] if number else []), value=1000, step_s=step_s) for number in range(honest)]
    swarm.until(swarm.agreed, 30.0)
    for node in nodes:
        node.loss = loss
    swarm.run(20.0)
    liar = swarm.start(run_id=LIAR, value=value, step_s=step_s)
    liar.perform(liar.peer.resume(LIAR, 2**52, 0.0, swarm.now))
    liar.peer.run_choice.config = Config(merge="never")
    liar.perform([Dial(address_of(0))])
    return swarm, nodes, liar


def test_one_record_does_not_take_the_run_where_no_losses_are_known():
    """One member is fewer than four, whatever it states. Before, all four dropped their weights for it within 3 s."""
    swarm, nodes, _ = beside_a_liar(loss=lambda node: None, step_s=1.0)
    swarm.run(4 * STALEMATE_S)
    assert {node.run_id for node in nodes} == {nodes[0].run_id}
    assert {node.value for node in nodes} == {Fraction(1000)}
    assert all("merging" not in node.kinds for node in nodes)


@pytest.mark.slow
def test_weights_that_prove_worse_are_put_back_and_their_run_is_left_alone_for_longer_each_time():
    swarm, nodes, _ = beside_a_liar(value=3_000)
    swarm.until(lambda: any("put back" in node.kinds for node in nodes), 120.0)
    swarm.run(900.0)
    assert {node.run_id for node in nodes} == {nodes[0].run_id}
    assert {node.value for node in nodes} == {Fraction(1000)}
    for node in nodes:
        times = [at for at, kind, _ in node.notices if kind == "put back"]
        assert 2 <= len(times) <= 5
        pauses = [after - before for before, after in itertools.pairwise(times)]
        assert all(pause >= 60.0 * 2**number for number, pause in enumerate(pauses))


def test_weights_that_are_too_far_off_are_put_back_without_a_loss():
    swarm, nodes, _ = beside_a_liar(honest=1, value=10**8, loss=lambda node: None)
    [node] = nodes
    swarm.until(lambda: "put back" in node.kinds, 700.0)
    swarm.run(1.0)
    assert node.run_id != LIAR
    assert node.value == Fraction(1000)


def test_nobody_mixes_with_a_node_that_has_weights_on_trial():
    swarm, nodes, liar = beside_a_liar(value=3_000)
    swarm.until(lambda: any(node.peer.own_run.trial.on_trial for node in nodes), 120.0)
    on_trial = next(node for node in nodes if node.peer.own_run.trial.on_trial)
    assert on_trial.peer.membership.me.run_id != LIAR
    mixes = len(on_trial.mixes)
    swarm.until(lambda: not on_trial.peer.own_run.trial.on_trial, 10.0)
    assert len(on_trial.mixes) == mixes
    assert liar.id not in [partner for _, _, partner in on_trial.mixes]


def test_what_was_under_way_before_a_trial_is_lost_or_doubled_for_nobody():
    """Exchanges are aborted for the trial, and none is applied to the weights that come back.

    A finished exchange that waited for the step boundary is part of them. After six trials no bit of the honest nodes'
    sum is missing. The exception is an exchange for which our COMMIT was sent and theirs had not arrived: if ours
    arrived, the partner has mixed alone.
    """
    swarm, nodes, liar = beside_a_liar(value=3_000, config=Config(mix_every_steps=2, filter="none"))
    swarm.network.stream_s = 0.4  # some exchange is always in progress
    states, alone = [], {}
    for node in nodes:
        exchanges, abandon = node.peer.exchanges, node.peer.exchanges.abandon

        def watched(node=node, exchanges=exchanges, abandon=abandon):
            for one in exchanges.table.values():
                states.append(one.state)
                if one.state in (State.VERIFIED, State.IN_DOUBT):
                    session = node.sessions[one.session]
                    alone[one.session] = one.partner, Fraction(one.weight) * (session.value - session.theirs)
            return abandon()

        exchanges.abandon = node.peer.joining.abandon_exchanges = watched
    while sum(node.kinds.count("put back") for node in nodes) < 6:
        assert swarm.now < 2_000.0
        swarm.run(0.3)
        calm = [node for node in nodes if node.peer.joining.phase is not Phase.ADOPTING]
        if len(calm) >= 2:  # they stay apart, so that an exchange that is lost, or lands twice, moves the sum
            calm[0].value += 64
            calm[1].value -= 64
    assert states.count(State.STREAMING) >= 2
    liar.crash()
    swarm.until(lambda: not any(node.kept is not None or node.adoption is not None for node in nodes), 60.0)
    mixed = {(node.id, session) for node in nodes for _, session, _ in node.mixes}
    one_sided = sum(shift for session, (partner, shift) in alone.items() if (partner, session) in mixed)
    # A message separates the two sides of an exchange, so the sum is right at most moments, or never again.
    swarm.until(lambda: sum(node.value + sum(node.model.pending) for node in nodes) == 4 * 1000 + one_sided, 30.0)
    assert {node.run_id for node in nodes} == {nodes[0].run_id}
    done = [node.peer.exchanges.done_count for node in nodes]
    swarm.until(lambda: all(node.peer.exchanges.done_count > was for node, was in zip(nodes, done, strict=True)), 60.0)


# -- honest runs -----------------------------------------------------------------------------------------------------
def apart(left, right, *, left_step_s=0.2, right_step_s=0.2, right_later_s=0.0, config=None, loss=None):
    """Return two runs of so many nodes that never met."""
    swarm = World(2, config=config)
    swarm.network.sides = lambda number: number < left
    lefts = [swarm.start(*([0] if number else []), step_s=left_step_s, value=900) for number in range(left)]
    swarm.run(right_later_s)
    rights = [
        swarm.start(*([left] if number > left else []), step_s=right_step_s, value=1100)
        for number in range(left, left + right)
    ]
    if loss is not None:
        for node in swarm.hosts:
            node.loss = loss
    swarm.run(40.0)
    assert len({node.run_id for node in swarm.hosts}) == 2
    return swarm, lefts, rights


def meet(swarm, limit_s):
    swarm.network.sides = None
    for node in swarm.hosts[1:]:
        node.perform([Dial(address_of(0))])
    return swarm.until(swarm.agreed, limit_s)


@pytest.mark.parametrize("loss", [None, off_by], ids=["without losses", "with losses"])
@pytest.mark.parametrize(
    ("left", "right", "more"),
    [
        (3, 3, {"right_later_s": 60.0}),
        (3, 3, {}),
        slow(1, 5, {}),
        slow(1, 3, {"left_step_s": 0.008}),  # a GPU alone, 25 times as fast, and three without
        (1, 1, {"right_later_s": 100.0}),
    ],
)
def test_two_honest_runs_become_one_in_bounded_time(left, right, more, loss):
    swarm, *_ = apart(left, right, loss=loss, **more)
    meet(swarm, STALEMATE_S + 60.0)
    run_id = swarm.hosts[0].run_id
    swarm.run(60.0)
    assert {node.run_id for node in swarm.hosts} == {run_id}


def test_one_alone_with_more_behind_it_than_five_is_taken_over_when_its_weights_prove_themselves():
    swarm, lefts, _ = apart(1, 5, right_later_s=600.0, loss=off_by)
    run_id = lefts[0].run_id
    assert meet(swarm, STALEMATE_S) < STALEMATE_S
    assert swarm.hosts[5].run_id == run_id


def test_after_long_the_run_with_fewer_members_gives_way():
    swarm, lefts, rights = apart(1, 5, left_step_s=0.5, right_step_s=0.5, right_later_s=600.0)
    run_id = rights[0].run_id
    assert meet(swarm, STALEMATE_S + 60.0) > STALEMATE_S / 2
    assert lefts[0].run_id == run_id


def test_a_run_that_has_not_met_all_members_of_the_other_gives_way_in_the_end():
    """Two members that cannot be dialled never meet: each counts one member on either side, the third two and one."""
    swarm = World(1)
    first = swarm.start(run_id=b"\x01" * 16, step_s=1.0)
    second = swarm.start(0, dialable=False, step_s=1.0)
    swarm.until(swarm.agreed, 30.0)
    fast = swarm.start(run_id=b"\xff" * 16, dialable=False, step_s=0.1)
    swarm.run(60.0)
    fast.perform([Dial(address_of(0))])
    swarm.run(STALEMATE_S + 30.0)
    assert fast.run_id == b"\xff" * 16, "it has more samples, as many members and the larger id"
    assert first.peer.run_choice.run(fast.run_id).members == 1
    assert fast.peer.run_choice.run(first.run_id).members == 1
    swarm.run(STALEMATE_S + 30.0)
    assert first.run_id == second.run_id == fast.run_id == b"\x01" * 16


def test_a_member_follows_when_all_others_of_its_run_have_moved_to_another():
    """Nobody comes or goes meanwhile, so its last look for other runs would have been its last for ever."""
    swarm = World(1)
    nodes = swarm.swarm(3)
    swarm.until(swarm.agreed, 30.0)
    swarm.run(10.0)
    for node in nodes[:2]:
        node.perform(node.peer.resume(b"\xff" * 16, 10**6, 0.0, swarm.now))
    swarm.until(swarm.agreed, 10.0)


@pytest.mark.parametrize("mode", ["ask", slow("never")])
def test_without_consent_runs_stay_apart_and_a_person_hears_of_it(mode):
    swarm, lefts, rights = apart(2, 2, left_step_s=1.0, right_step_s=1.0, right_later_s=60.0, config=Config(merge=mode))
    swarm.network.sides = None
    for node in swarm.hosts[1:]:
        node.perform([Dial(address_of(0))])
    swarm.run(4 * STALEMATE_S)
    assert len({node.run_id for node in swarm.hosts}) == 2
    for node in swarm.hosts:
        [text] = [text for _, kind, text in node.notices if kind == "divided"]
        other = lefts[0] if node in rights else rights[0]
        assert f'node.merge("{other.run_id.hex()}")' in text
    for node in rights:
        node.perform(node.peer.merge(lefts[0].run_id, swarm.now))
        node.arm()
    swarm.until(swarm.agreed, 30.0)
    assert rights[0].run_id == lefts[0].run_id


# -- the newcomer ----------------------------------------------------------------------------------------------------
def test_a_newcomer_goes_where_most_are_and_not_where_the_largest_number_is():
    swarm, nodes, liar = beside_a_liar(loss=lambda node: None)
    swarm.run(5.0)
    newcomer = swarm.start(0)
    swarm.until(lambda: newcomer.peer.view.ready, 30.0)
    assert newcomer.run_id == nodes[0].run_id != liar.run_id


# -- the judge -------------------------------------------------------------------------------------------------------
def judged(before, after):
    judge = TrialEvaluator()
    for step, loss in enumerate(before, 1):
        assert judge.on_loss(step, loss) is None
    judge.begin(len(before), 0.0)
    verdict = None
    for step, loss in enumerate([before[-1], *after], len(before) + 1):  # the first may be of a step before
        assert verdict is None
        verdict = judge.on_loss(step, loss)
    return verdict


@pytest.mark.parametrize(
    ("before", "after", "passed"),
    [
        ([1.0] * 16, [1.9] * 4, True),
        ([1.0] * 16, [2.1] * 4, False),
        ([1.0, 3.0] * 8, [4.9] * 4, True),  # three deviations of 1 above 2
        ([1.0, 3.0] * 8, [5.1] * 4, False),
        ([-2.0] * 16, [-0.1] * 4, True),  # a likelihood: its size and not its sign says what is far
        ([-2.0] * 16, [0.1] * 4, False),
        ([1.0] * 16, [0.5, 0.5, 0.5, math.nan], False),
        ([1.0] * 16, [0.5, 0.5, 0.5, None], False),
    ],
)
def test_weights_pass_unless_their_losses_are_clearly_worse(before, after, passed):
    assert judged(before, after) is passed


def test_a_trial_in_which_nothing_is_heard_ends_and_proves_nothing():
    judge = TrialEvaluator()
    for step in range(MIN_LOSSES):
        judge.on_loss(step, 1.0)
    assert judge.deadline == math.inf
    judge.begin(10, 5.0)
    assert judge.on_loss(10, 0.5) is None  # the same report again
    assert judge.deadline == 5.0 + TRIAL_S
    assert judge.verdict() is False


@pytest.mark.parametrize("seed", range(3))
def test_members_do_not_go_to_and_fro_between_two_runs(seed):
    """A member that takes a larger run keeps its own count, and the lower median of that run is small at once."""
    swarm = World(seed)
    small = [swarm.start(*([0] if number else []), value=1000) for number in range(3)]
    swarm.until(swarm.agreed, 30.0)
    large = swarm.start(value=1000)
    for node, samples in [*((node, 4_000) for node in small), (large, 48_000)]:
        node.loss = lambda node: 1.0
        node.perform(node.peer.resume(node.run_id, samples, 100.0, swarm.now))
    swarm.run(5.0)
    large.perform([Dial(address_of(0))])
    swarm.run(60.0)
    taken = [node.kinds.count("merged") for node in small]
    assert max(taken) == 1
