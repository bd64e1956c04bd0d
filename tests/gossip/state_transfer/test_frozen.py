"""A newcomer whose frozen weights have the hash that all its donors state fetches none of them."""

from dataclasses import replace

import pytest

from gossip.effects import Adopt, HashFrozen, Send
from gossip.exchange.session import Local
from gossip.state_transfer.donating import Donor
from gossip.wire.messages import Fetch, Serving
from tests.gossip.state_transfer.taker import CHUNK, CONFIG, DONORS, RUN_ID, A, B, C, D, Taker
from tests.harness.host import Host
from tests.harness.sessions import hash_of
from tests.harness.world import World

ELEMENTS, FROZEN, TRAINED = 4 * CHUNK, 90 * CHUNK, 500
OURS, OTHER = b"o" * 32, b"x" * 32


def newcomer(ours, **theirs):
    """Return a newcomer with this hash, whose donors A to D state ours, or those given by name."""
    taker = Taker(ELEMENTS, TRAINED, frozen=FROZEN)
    taker.local.frozen_hash = ours
    taker.hashes = dict.fromkeys(DONORS, OURS) | {globals()[name]: stated for name, stated in theirs.items()}
    return taker


def frozen_of(taker):
    """Return the fetched frozen elements."""
    return sum(stop - start for start, stop, _ in taker.fetched if start in taker.joining.check.frozen_range)


@pytest.mark.parametrize("donors", [[A], [A, B], [A, B, C, D]])
def test_a_newcomer_with_the_same_base_fetches_no_frozen_element(donors):
    taker = newcomer(OURS)
    taker.survey(donors, keys=("m",), scalars=(("step", 1.0),))
    taker.receive_all()
    assert frozen_of(taker) == 0
    assert sum(stop - start for start, stop, _ in taker.fetched) == ELEMENTS + TRAINED
    assert not [one for one in taker.joining.check.results if one.start in taker.joining.check.frozen_range]
    assert taker.adopt == Adopt(("m",), (("step", 1.0),), trial=False, frozen=False)


@pytest.mark.parametrize("ours", [OTHER, b"", None], ids=["another base", "none", "not known"])
@pytest.mark.parametrize("stated", [OTHER, b"", OURS[:8]], ids=["another", "none, as an older node", "a short one"])
@pytest.mark.parametrize("odd", ["A", "B", "C", "D"])
def test_one_donor_that_states_another_hash_or_none_makes_it_fetch_and_compare_everything_at_once(odd, stated, ours):
    for mine in {ours, OURS}:
        taker = newcomer(mine, **{odd: stated})
        taker.survey()
        taker.receive_all()
        assert taker.covered_once()
        assert [one for one in taker.joining.check.results if one.start in taker.joining.check.frozen_range]
        assert taker.adopt == Adopt((), (), trial=False, frozen=True)


@pytest.mark.parametrize("silent", [1, 2, 3])
def test_of_four_donors_three_must_have_answered(silent):
    """If two answers sufficed, two liars could have a newcomer keep another base than the run's."""
    taker = newcomer(OURS)
    for session in taker.ask(A, B, C, D)[silent:]:
        taker.answer(session)
    taker.fetches.clear()
    taker.wait()
    taker.receive_all()
    assert frozen_of(taker) == (0 if silent == 1 else FROZEN)
    assert taker.adopt.frozen is (silent > 1)


def test_donors_without_a_hash_are_no_agreement_with_a_newcomer_without_one():
    taker = newcomer(b"", A=b"", B=b"", C=b"", D=b"")
    taker.survey()
    taker.receive_all()
    assert taker.covered_once()
    assert taker.adopt.frozen


@pytest.mark.parametrize("early", [True, False], ids=["while pieces come", "when all others are here"])
@pytest.mark.parametrize(
    ("found", "fetches"), [(OURS, False), (OTHER, True), (b"", True)], ids=["same", "another", "failed"]
)
def test_frozen_weights_wait_for_our_own_hash_and_nothing_else_does(found, fetches, early):
    taker = newcomer(None)
    taker.survey(keys=("m",))
    assert taker.fetches
    assert not [fetch for _, fetch in taker.fetches.values() if fetch.start in taker.joining.check.frozen_range]
    if early:
        taker.receive(next(iter(taker.fetches)))
    else:
        taker.receive_all()
        assert sum(stop - start for start, stop, _ in taker.fetched) == ELEMENTS + TRAINED
        assert not taker.joining.is_starved
        assert taker.joining.next_deadline == float("inf"), "it waits for itself alone"
    assert taker.adopt is None
    taker.local.frozen_hash = found
    taker.do(taker.joining.on_frozen_hashed(taker.now))
    taker.receive_all()
    assert frozen_of(taker) == (FROZEN if fetches else 0)
    assert taker.adopt == Adopt(("m",), (), trial=False, frozen=fetches)
    assert taker.do(taker.joining.on_frozen_hashed(taker.now)) == []


def test_a_hash_that_comes_when_all_donors_are_gone_finds_others():
    taker = newcomer(None)
    taker.survey([A, B])
    taker.receive_all()
    for donor in (A, B):
        taker.do(taker.joining.on_unlinked(donor, taker.now))
        taker.joining.candidates.remove(donor)
    taker.local.frozen_hash = OTHER
    taker.do(taker.joining.on_frozen_hashed(taker.now))
    assert taker.joining.is_starved
    taker.do(taker.joining.on_starved([C], taker.now))
    taker.receive_all()
    assert taker.covered_once()


def test_a_hash_that_comes_after_the_end_of_a_transfer_changes_nothing():
    taker = newcomer(None)
    taker.survey()
    taker.do(taker.joining.stop())
    taker.local.frozen_hash = OTHER
    assert taker.joining.on_frozen_hashed(taker.now) == []


@pytest.mark.parametrize(("held", "stated"), [(OURS, OURS), (None, b""), (b"", b"")], ids=["known", "not yet", "none"])
def test_a_donor_states_its_hash_once_it_knows_it(held, stated):
    local = Local("f", ELEMENTS, TRAINED, FROZEN, run_id=RUN_ID, ready=True, frozen_hash=held)
    (send,) = Donor(local, CONFIG).on_fetch(A, Fetch(1, (), 0, 0), 0.0)
    assert send.message == Serving(1, 0.0, RUN_ID, (), (), frozen_hash=stated)


# -- with real peers -------------------------------------------------------------------------------------------------
class Liar(Host):
    """A host that states the hash of another base, 9, than its own."""

    def send(self, to, message):
        if isinstance(message, Serving):
            message = replace(message, frozen_hash=hash_of(9))
        super().send(to, message)


BASED = {"elements": 40_000, "frozen": 200_000}


def swarm_of(count, liars=0, seed=0):
    world = World(seed, config=CONFIG)
    for number in range(count):
        kind = Liar if number >= count - liars else Host
        world.start(*([0] if number else []), kind=kind, base=7, **BASED)
    world.until(world.agreed, 120.0)
    return world


def join(world, base, hash_s=0.0):
    """Start a newcomer with this base; return it and the number of frozen elements that it asked for."""
    newcomer = world.start(*range(min(4, len(world.hosts))), base=base, hash_s=hash_s, **BASED)
    world.until(lambda: newcomer.peer.view.ready and newcomer.peer.local.frozen_hash is not None, 120.0)
    elements = newcomer.peer.local.elements
    fetches = [
        effect.message for _, effect in newcomer.log if isinstance(effect, Send) and isinstance(effect.message, Fetch)
    ]
    return newcomer, sum(fetch.stop - fetch.start for fetch in fetches if fetch.start >= elements)


@pytest.mark.parametrize("hash_s", [0.0, 5.0])
@pytest.mark.parametrize("seed", range(4))
def test_a_newcomer_ends_with_the_swarms_base_and_fetches_it_only_if_it_differs(seed, hash_s):
    world = swarm_of(5, seed=seed)
    same, nothing = join(world, 7, hash_s)
    other, everything = join(world, 8, hash_s)
    assert nothing == 0
    assert everything >= BASED["frozen"]
    assert same.base == other.base == 7
    assert other.peer.local.frozen_hash == hash_of(7), "it gives what it took, and says so"
    assert same.peer.local.frozen_hash == hash_of(7)
    (notice,) = [effect for _, effect in same.log if getattr(effect, "kind", "") == "joined"]
    assert "frozen weights are the same" in notice.sentence


@pytest.mark.parametrize("base", [7, 8, 9])
@pytest.mark.parametrize("seed", range(4))
def test_a_lying_donor_costs_a_transfer_at_most_and_no_newcomer_its_base(seed, base):
    """The newcomers include one whose base is the one that the liar states: 9."""
    world = swarm_of(4, liars=1, seed=seed)
    newcomer, fetched = join(world, base)
    assert newcomer.base == 7
    assert fetched >= BASED["frozen"]


def test_three_colluding_donors_of_four_keep_no_wrong_base_alive():
    world = swarm_of(4, liars=3)
    newcomer, _ = join(world, 9)
    assert newcomer.base == 7, "the fourth states another hash, and what the donors give is compared"


def test_a_swarm_that_merges_into_another_with_the_same_base_transfers_only_what_is_trained():
    world = World(1, config=CONFIG)
    first, second = world.start(base=7, **BASED), world.start(base=7, value=5, **BASED)
    world.run(5.0)
    world.network.dial(first, second.peer.membership.me.address, None)
    world.until(lambda: world.agreed() and not any(host.peer.view.is_joining for host in world.hosts), 300.0)
    taker = next(host for host in world.hosts if "merged" in host.kinds)
    sent = [effect.message for _, effect in taker.log if isinstance(effect, Send)]
    assert not [one for one in sent if isinstance(one, Fetch) and one.start >= taker.peer.local.elements]
    assert len([effect for _, effect in taker.log if isinstance(effect, HashFrozen)]) == 1


def test_a_loaded_checkpoint_is_hashed_anew():
    world = swarm_of(2)
    host = world.hosts[0]
    host.base = 8
    host.call("resume", b"r" * 16, 10, 1.0)
    assert host.peer.local.frozen_hash is None
    world.run(1.0)
    assert host.peer.local.frozen_hash == hash_of(8)


def test_a_node_whose_weights_are_spoiled_keeps_no_base_that_changed_with_them():
    world = swarm_of(3)
    host = world.hosts[1]
    host.base = 8
    host.call("on_spoiled", None)
    assert host.peer.local.frozen_hash is None
    world.until(lambda: host.peer.view.ready, 60.0)
    assert host.base == 7
