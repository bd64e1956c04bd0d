"""A hostile member of the swarm against a group: nothing that rank 0 passes on harms the other ranks."""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path

import msgpack
import numpy as np
import pytest
import trio
from torch import nn

from gossip.ids import parse_address
from gossip.wire.messages import Gossip
from node.identity.keys import parse_secret
from tests.node.ranks.group_play import Pair, peak_mb

pytestmark = pytest.mark.slow

SIEGE = Path(__file__).parents[3] / "benchmarks" / "siege"
MOST = 2**53 - 1
GROWN_MB = 64.0


class Foe(threading.Thread):
    """A member in a thread of this process that carries out an attack until it is stopped."""

    def __init__(self, foe, target, attack):
        super().__init__(daemon=True)
        self.foe, self.target, self.attack = foe, target, attack
        self.token = self.error = self.came = None
        self.ready = threading.Event()

    async def play(self):
        self.token = trio.lowlevel.current_trio_token()
        with trio.CancelScope() as self.scope:
            async with trio.open_nursery() as nursery:
                member = await self.foe.Foe(self.target, nursery).member(listen=False, mixes=True)
                self.member = member
                self.came = self.attack(member)
                self.ready.set()
                while True:
                    await trio.sleep(0.2)
                    await member.tell(Gossip((member.update(),)))

    def run(self):
        try:
            trio.run(self.play)
        except BaseException as error:
            self.error = error
        finally:
            self.ready.set()

    def stop(self):
        if self.is_alive():
            self.token.run_sync_soon(self.scope.cancel)
        self.join(10)
        assert not self.is_alive()
        assert self.error is None, self.error


def figures(pair):
    """Return the swarm's figures as rank 1 saw them.

    Each name maps to mean, median, min, max, members and oldest samples.
    """
    return pair.read("seen", 1)["row"][4]


def tells(member, packed):
    member.update(extra=(packed,))


# Each attack returns a check that it has reached rank 1. tests/node/observe/test_reduced.py has more malformed figures.
def figures_of_any_name(member):
    named = {"\x1b[2J\n": 1e308, "accuracy": -1e308, "loss": 1e308, "": 1.0, "a" * 100: 5e-324}
    tells(member, msgpack.packb({name: [value, MOST] for name, value in named.items()}))
    return lambda pair: figures(pair).get("loss", [0] * 4)[3] == 1e308 and "\x1b[2J\n" in figures(pair)


def figures_that_are_none(member):
    tells(
        member, msgpack.packb({"loss": [float("nan"), MOST], "accuracy": [float("inf"), -1], "x": "y", "z": [2.0, 1]})
    )
    return lambda pair: "z" in figures(pair) and figures(pair)["loss"][4] == 1


def the_largest_numbers(member):
    member.version, member.claim = float(MOST), MOST
    member.update(samples=MOST, steps=MOST, loss=1.7e308)
    return lambda pair: any(row[3:] == [MOST, MOST, 1.7e308] for row in pair.read("seen", 1)["row"][2])


def vectors_of(value, member):
    """Answer each vector with one that holds ``value`` only."""
    given = []
    member.transform = lambda vector: (given.append(vector), np.full_like(vector, value))[1]
    return lambda pair: given  # After a few it receives no more vectors, since its own fail the checks.


ATTACKS = {
    "figures of any name": figures_of_any_name,
    "figures that are none": figures_that_are_none,
    "the largest numbers": the_largest_numbers,
    "vectors that are no numbers": partial(vectors_of, np.nan),
    "infinite vectors": partial(vectors_of, np.inf),
    "the largest vectors": partial(vectors_of, 3e38),
}


@pytest.fixture
def foe(monkeypatch):
    monkeypatch.syspath_prepend(str(SIEGE))
    import foe

    return foe


@pytest.mark.parametrize("attack", ATTACKS)
def test_all_ranks_train_on_and_hold_the_same_whatever_a_member_sends(tmp_path, train, secret, foe, attack):
    other = train(nn.Linear(6, 3), secret=secret)
    seeds = [other.node.address]
    pair = Pair(tmp_path / "pair", "group_loop.py", seeds=seeds, GOSSIP_SECRET_FILE=str(secret))
    besieger = None
    try:
        pair.go_on()
        before = [peak_mb(rank.pid) for rank in pair.ranks]
        address, fingerprint, run_id, elements = pair.read("joined")
        for name in ("identities", "seeds"):
            (tmp_path / name).touch()
        target = foe.Target(
            [parse_address(address)], parse_secret(secret.read_text()), fingerprint, bytes.fromhex(run_id), elements,
            tmp_path / "identities", tmp_path / "seeds", version=float(pair.read("seen")["steps"]),
        )  # fmt: skip
        besieger = Foe(foe, target, ATTACKS[attack])
        besieger.start()
        assert besieger.ready.wait(20)
        assert besieger.error is None, besieger.error
        known = besieger.member.identity.id.hex()
        pair.until(lambda: known in str(pair.read("seen", 1)["row"][2]))  # The other rank has heard of it as well.
        pair.go_on(400)
        pair.until(lambda: besieger.came(pair))
        pair.go_on(400)
        assert all(pair.read("seen", rank)["finite"] for rank in range(2))
        grown = [peak_mb(rank.pid) - mb for rank, mb in zip(pair.ranks, before, strict=True)]
        assert max(grown) < GROWN_MB
        assert pair.end() == [0, 0], pair.errors()
        one, two = (pair.read("ended", rank) for rank in range(2))
        assert len(one["digests"]) > 3
        assert one["digests"] == two["digests"], "after what the member said both ranks saw and held the same"
    finally:
        pair.kill()
        if besieger is not None:
            besieger.stop()
    assert other.error is None
