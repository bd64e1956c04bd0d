"""Whom to average with next: uniformly among those alive, except partners benched for failing."""

from __future__ import annotations

import random
from collections.abc import Callable, Container, Sequence

from gossip.ids import PeerId

__all__ = ["Bench", "uniform"]

BENCH_DOUBLINGS = 4  # 30 s, 60 s ... 8 min: long enough to cost nothing, short enough to notice a repaired link


class Bench:
    """Partners that failed an exchange sit out, for twice as long each time in a row. A local matter: a bench says
    nothing to others about whether the partner is alive."""

    def __init__(self, first_s: float) -> None:
        self.first_s = first_s
        self.benched: dict[PeerId, tuple[float, int]] = {}  # until when, failures in a row

    def failed(self, peer: PeerId, now: float) -> None:
        _, failures = self.benched.get(peer, (0.0, 0))
        self.benched[peer] = (now + self.first_s * 2 ** min(failures, BENCH_DOUBLINGS), failures + 1)

    def succeeded(self, peer: PeerId) -> None:
        self.benched.pop(peer, None)

    def sits_out(self, peer: PeerId, now: float) -> bool:
        entry = self.benched.get(peer)
        return entry is not None and now < entry[0]

    def forget(self, peer: PeerId) -> None:
        self.benched.pop(peer, None)


def uniform(
    members: Sequence[PeerId],
    rng: random.Random,
    fits: Callable[[PeerId], bool],
    excluded: Container[PeerId] = (),
) -> PeerId | None:
    """A uniformly random member that fits, or None.

    Rejection first, since nearly all fit in nearly every swarm and a scan of 10,000 members for each mix would be most
    of a mix's cost; a full scan only when 16 draws found nobody.
    """
    if not members:
        return None
    for _ in range(16):
        peer = members[int(rng.random() * len(members))]
        if peer not in excluded and fits(peer):
            return peer
    rest = [peer for peer in members if peer not in excluded and fits(peer)]
    return rng.choice(rest) if rest else None
