"""A newcomer gets all weights once, although donors die, refuse, stall or trickle."""

import random

import pytest

from gossip.effects import Release, Send
from gossip.state_transfer.donating import serving_time_s
from gossip.state_transfer.joining import RETRY_S, Phase
from gossip.wire.messages import Serving
from tests.gossip.state_transfer.taker import CHUNK, CONFIG, DONORS, RUN_ID, A, B, C, pieces, surveyed
from tests.harness.world import World


# -- donors that fail ------------------------------------------------------------------------------------------------
def test_each_chunk_of_a_piece_has_a_deadline_of_its_own():
    taker = surveyed([A])
    (session,) = taker.fetches
    chunk_s = CONFIG.reply_timeout_s + 4e-6 * CHUNK / CONFIG.slowest_rate_mb_s
    assert taker.joining.next_deadline == pytest.approx(chunk_s)
    taker.now = 0.1 * chunk_s
    taker.receive(session)
    assert taker.joining.next_deadline == pytest.approx(taker.now + chunk_s)
    whole_s = serving_time_s(CONFIG, taker.joining.size)
    taker.joining.on_collected(session, CHUNK + 1, whole_s - 0.1)
    assert taker.joining.next_deadline == whole_s, "however small the chunks"


def test_late_messages_about_a_piece_that_moved_to_another_donor_change_nothing():
    taker = surveyed([A, B])
    session = taker.session_of(A)
    stop = taker.fetches[session][1].stop
    taker.do(taker.joining.on_unlinked(A, 1.0))
    missing = list(taker.joining.missing)
    assert taker.joining.on_collected(session, stop, 1.1) == []
    assert taker.joining.on_refused(A, session, 1.1) == taker.joining.on_failed(session, 1.1) == []
    assert taker.joining.on_serving(A, Serving(session, 1.0, RUN_ID, (), ()), 1.1) == []
    assert taker.joining.missing == missing


def test_a_newcomer_that_all_donors_refuse_waits_for_others():
    taker = surveyed([A, B])
    for session, (donor, _) in list(taker.fetches.items()):
        taker.do(taker.joining.on_refused(donor, session, 1.0))
    assert taker.joining.is_starved
    assert taker.joining.next_deadline == 1.0 + RETRY_S
    assert taker.joining.on_starved([], 2.0) == []
    assert taker.joining.next_deadline == 2.0 + RETRY_S
    effects = taker.do(taker.joining.on_starved([C], 3.0))
    assert [donor for donor, *_ in pieces(effects)] == [C]
    taker.receive_all()
    assert taker.covered_once()
    assert {donor for *_, donor in taker.fetched} == {C}


@pytest.mark.parametrize("found", [[], [A]], ids=["no donor is left", "one always refuses"])
def test_a_run_whose_donors_give_nothing_is_given_up_in_time(found):
    """A regression test: each new piece once restarted the timeout, and the newcomer waited for ever."""
    taker = surveyed([A])
    while taker.joining.phase is not Phase.IDLE and taker.now < 4 * CONFIG.join_timeout_s:
        taker.now += 0.5
        for session, (donor, _) in list(taker.fetches.items()):
            taker.do(taker.joining.on_refused(donor, session, taker.now))
        if taker.joining.is_starved:
            taker.do(taker.joining.on_starved(found, taker.now))
    assert taker.joining.phase is Phase.IDLE
    assert CONFIG.join_timeout_s <= taker.now <= CONFIG.join_timeout_s + 2 * RETRY_S
    assert not taker.joining.may_ask(RUN_ID, taker.now)


def test_stopping_sends_abort_to_all_donors():
    taker = surveyed([A, B])
    sessions = list(taker.fetches)
    effects = taker.joining.stop()
    assert [e for e in effects if isinstance(e, Release)] == [Release(session) for session in sessions]
    assert {e.to for e in effects if isinstance(e, Send)} == {A, B}
    assert taker.joining.phase is Phase.IDLE


@pytest.mark.parametrize("seed", range(30))
def test_everything_arrives_once_whatever_fails(seed):
    rng = random.Random(seed)
    taker = surveyed(DONORS[: rng.randrange(1, 5)], elements=rng.randrange(1, 40_000))
    for _ in range(300):
        taker.now += 0.1
        if taker.joining.is_starved:
            taker.do(taker.joining.on_starved(rng.sample(DONORS, rng.randrange(1, 8)), taker.now))
        if not taker.fetches:
            break
        session = rng.choice(list(taker.fetches))
        donor = taker.fetches[session][0]
        match rng.randrange(8):
            case 0:
                taker.do(taker.joining.on_unlinked(donor, taker.now))
            case 1:
                taker.do(taker.joining.on_failed(session, taker.now))
            case 2:
                taker.do(taker.joining.on_refused(donor, session, taker.now))
            case _:
                taker.receive(session, rng.randrange(1, 5))
        sending = [piece.donor for piece in taker.joining.pieces.values()]
        assert len(sending) == len(set(sending)) <= CONFIG.internal.donors
    assert taker.adopt is not None
    assert taker.covered_once()


# -- with real peers -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("seed", range(6))
def test_a_newcomer_joins_although_its_donors_are_killed(seed):
    swarm = World(seed, config=CONFIG)
    swarm.network.chunk_s = 0.3
    nodes = swarm.swarm(5, elements=40_000)
    swarm.until(swarm.agreed, 120.0)
    newcomer = swarm.start(0, 1, 2, elements=40_000)
    rng = random.Random(seed)
    for victim in rng.sample(nodes, 4):
        swarm.run(0.3 + 2 * rng.random())
        victim.crash()
    swarm.until(lambda: newcomer.peer.view.ready, 120.0)
    assert newcomer.kinds == ["joined"]
    assert newcomer.run_id == nodes[0].run_id
    assert newcomer.value == nodes[0].value  # All were equal.
