"""Which part of a dataset is this node's: decided by hashing over the members alive, with nobody's permission.

Rendezvous (highest random weight) hashing, Thaler and Ravishankar 1998: every member has a pseudo-random weight for
every bucket and the highest owns it. When a member goes, only its buckets move; when one comes, it takes only its own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from gossip.ids import PeerId

__all__ = ["I64", "MAX_BUCKETS", "Part", "Pass", "of_rank", "owned", "share_size"]

U64 = npt.NDArray[np.uint64]
I64 = npt.NDArray[np.int64]

MAX_BUCKETS: Final = 65_536
"""Up to here every sample is a bucket of its own. Beyond, more buckets would only cost: among 1,000 members a share is
65 buckets +- 12 %, which is less than the spread of their speeds."""

_BLOCK: Final = 1 << 20  # indices hashed at once: 8 MiB a temporary, whatever the dataset's length


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """What was given of a pass while the members stayed the same: of the share that ``me`` had beside ``rivals``, all
    up to the last of ``given``. So the three and that last index say it again, however much it is."""

    me: PeerId
    rivals: tuple[PeerId, ...]
    seed: int | None  # of the order; None: by index
    given: I64

    @classmethod
    def again(
        cls, length: int, number: int, me: PeerId, rivals: tuple[PeerId, ...], seed: int | None, last: int
    ) -> Part:
        """The same from what a file keeps of it. What was given before the members changed comes in a second time,
        which is nothing to a set."""
        share = ordered(share_of(length, me, rivals, number), number, me, seed)
        found = np.flatnonzero(share == last)
        return cls(me, rivals, seed, share[: found[0] + 1] if len(found) else share[:0])


class Pass:
    """One pass over this node's share of ``length`` samples: no index twice. A dead member's part comes in, and what a
    newcomer owns goes away, with what is taken after the change. It is over when nothing owned is left.

    ``members()`` gives the ids of everybody alive; ``changes()`` is a counter that moves whenever that set does.
    ``number`` is the pass's: nodes that agree on it divide the dataset without overlap, and another number divides it
    in another way. ``seed`` draws the order in which this node goes through its share, None leaves it ascending;
    it has no part in the division, so that nodes with seeds of their own still cover everything. ``before``: what an
    earlier life of this loop was given of the same pass.
    """

    def __init__(
        self, length: int, number: int, seed: int | None, me: PeerId, members: Callable[[], Sequence[PeerId]],
        changes: Callable[[], int], before: Iterable[Part] = (),
    ) -> None:  # fmt: skip
        self.length, self.number, self.seed, self.me = length, number, seed, me
        self.members, self.changes = members, changes
        self.seen: int | None = None
        self.parts: list[Part] = []  # given in this life, among the members of before
        self.given = np.zeros(length, dtype=np.bool_)  # (samples,), up to the last change of members
        self.rivals: tuple[PeerId, ...] | None = None
        self.pending: I64 = np.empty(0, dtype=np.int64)  # (owned and not given before that change,), in order of giving
        self.position = 0  # how many of these are given
        self.before = list(before)
        for part in self.before:
            self.given[part.given] = True

    def take(self, count: int, whole: bool = False, ranks: int = 1) -> I64:
        """The next ``count`` indices, or what is left of them; ``whole``: none, where fewer are left. (count,)

        A share's length is nobody's choice, and a batch of one sample would fail in BatchNorm: rather than leave one to
        each of the ``ranks``, the batch before the last gives some of its own.
        """
        self.look()
        left = len(self.pending) - self.position - count
        if 0 < left <= ranks and count > 2 * ranks and not whole:
            count -= ranks
        taken = self.pending[self.position : self.position + count]
        if whole and len(taken) < count:
            return taken[:0]
        self.position += len(taken)
        return taken

    @property
    def over(self) -> bool:
        """Whether nothing is left, as the members are now."""
        self.look()
        return self.exhausted

    def look(self) -> None:
        """Divide anew where members came or went."""
        # The counter is read before the members: a change between the two is then seen at the next batch.
        now = self.changes()
        if now != self.seen:
            self.seen = now
            self.divide()

    def divide(self) -> None:
        rivals = tuple(sorted({*self.members()} - {self.me}))
        if rivals == self.rivals:
            return
        if self.position and self.rivals is not None:
            part = self.part(self.position)
            self.parts.append(part)
            self.given[part.given] = True
        self.rivals, self.position = rivals, 0
        share = share_of(self.length, self.me, rivals, self.number)
        self.pending = ordered(share[~self.given[share]], self.number, self.me, self.seed)

    def part(self, count: int) -> Part:
        """The first so many of what is pending since the members last changed."""
        assert self.rivals is not None
        return Part(self.me, self.rivals, self.seed, self.pending[:count].copy())

    @property
    def exhausted(self) -> bool:
        """Whether all was given that there was to give when something was last taken."""
        return self.position == len(self.pending)

    @property
    def total(self) -> int:
        """How many were given in this life."""
        return sum(len(part.given) for part in self.parts) + self.position

    def given_parts(self, count: int) -> list[Part]:
        """What was given in all lives, in parts; of this one the first ``count``: the rest are not trained on yet."""
        parts = [*self.parts, self.part(self.position)] if self.position else self.parts
        found = list(self.before)
        for part in parts:
            if count > 0:
                found.append(Part(part.me, part.rivals, part.seed, part.given[:count]))
            count -= len(part.given)
        return found


def of_rank(taken: I64, rank: int, ranks: int) -> I64:
    """What one of the ranks of a node gets of what the node takes. All get as many, since they wait for each other's
    gradients at each step: where it does not divide, some come twice."""
    if ranks == 1 or not len(taken):
        return taken
    return np.resize(taken, -(-len(taken) // ranks) * ranks)[rank::ranks]


def owned(buckets: int, me: PeerId, members: Sequence[PeerId], salt: bytes) -> npt.NDArray[np.bool_]:
    """Which of the buckets ``me`` owns: those where nobody weighs more, or as much with a smaller id.

    Rivals come in blocks, and only the buckets still held go on to the next: after k rivals 1 / (k + 1) of them are
    left, so blocks grow as what is held shrinks, and a round costs at most ``buckets`` hashes. 65,536 buckets among
    10,000 members take about a million hashes instead of 655 million, which a training loop would feel.

    Returns (buckets,) bool.
    """
    rivals = sorted(set(members) - {me})
    theirs = np.array([_hash64(salt + rival) for rival in rivals], dtype=np.uint64)  # (rivals,)
    lower = np.array([rival < me for rival in rivals], dtype=np.bool_)  # (rivals,), who wins a tie
    hashes = _bucket_hashes(buckets, salt)  # (held,)
    held = np.arange(buckets)  # (held,)
    start = 0
    while start < len(rivals) and len(held):
        stop = start + max(1, buckets // len(held))
        mine = _mix(hashes ^ _hash64(salt + me))[:, None]  # (held, 1)
        weight = _mix(hashes[:, None] ^ theirs[None, start:stop])  # (held, block), at most `buckets` elements
        keep = ~((weight > mine) | ((weight == mine) & lower[start:stop])).any(axis=1)
        held, hashes = held[keep], hashes[keep]
        start = stop
    result = np.zeros(buckets, dtype=np.bool_)
    result[held] = True
    return result


def buckets_of(length: int, me: PeerId, members: Sequence[PeerId], number: int) -> npt.NDArray[np.bool_]:
    return owned(min(length, MAX_BUCKETS), me, members, b"share %d %d " % (length, number))


def share_size(length: int, me: PeerId, members: Sequence[PeerId], number: int) -> int:
    """How many samples ``me`` owns in pass ``number``; of buckets of several, as many as they hold on average."""
    return round(length * float(buckets_of(length, me, members, number).mean()))


def share_of(length: int, me: PeerId, members: Sequence[PeerId], number: int) -> I64:
    """The indices that ``me`` owns in pass ``number``, ascending."""
    mine = buckets_of(length, me, members, number)
    if length <= MAX_BUCKETS:
        return np.flatnonzero(mine)
    parts = []
    for start in range(0, length, _BLOCK):
        indices = np.arange(start, min(start + _BLOCK, length), dtype=np.uint64)
        # The top 16 bits of a hash, not index // size: neighbours are often alike (sorted by label, one speaker).
        bucket = (_mix(indices) >> np.uint64(48)).astype(np.int64)
        parts.append(start + np.flatnonzero(mine[bucket]))
    return np.concatenate(parts)


def ordered(indices: I64, number: int, me: PeerId, seed: int | None) -> I64:
    """Ascending ``indices`` in the order in which they are given. A hash instead of a permutation: the order of what
    stays is the same after members change, and the memory is that of the share, not of the dataset."""
    if seed is None:
        return indices
    salt = _hash64(b"order %d %d " % (seed, number) + me)
    return indices[np.argsort(_mix(_mix(indices.astype(np.uint64)) ^ salt), kind="stable")]


def _bucket_hashes(buckets: int, salt: bytes) -> U64:
    return _mix(np.arange(buckets, dtype=np.uint64) + _hash64(b"bucket " + salt))


def _hash64(data: bytes) -> np.uint64:
    return np.uint64(int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little"))


def _mix(x: U64) -> U64:
    """splitmix64's step (Steele, Lea and Flood 2014), element by element; sums and products wrap, as they must."""
    z = x + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
