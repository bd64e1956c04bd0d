"""This node's part of a dataset, decided by hashing over the live members, without coordination.

Rendezvous (highest random weight) hashing, Thaler and Ravishankar 1998: every member has a pseudo-random weight for
every bucket, and the highest weight owns it. When a member leaves, only its buckets move; a newcomer takes only its
own. A *bucket* is one sample, or in a large dataset a set of samples. The *rivals* of a node are the other members.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from gossip.ids import PeerId

U64 = npt.NDArray[np.uint64]
I64 = npt.NDArray[np.int64]

MAX_BUCKETS: Final = 65_536
"""Up to this number of samples each sample is a bucket.

More buckets would only cost time: among 1,000 members a share is 65 buckets +- 12 %, which is less than the spread of
their speeds.
"""

SPREAD_BATCHES: Final = 8  # The last batches of a pass, which share its rest: none is smaller by more than an eighth.

_BLOCK: Final = 1 << 20  # Indices hashed at once: 8 MiB per temporary array, whatever the dataset's length.


@dataclass(frozen=True, slots=True)
class Sharers:
    """The members that share the data and the progress, as this node sees them at the moment."""

    me: Callable[[], PeerId]
    members: Callable[[], Sequence[PeerId]]
    changes: Callable[[], int]  # A count of changes of members, by which another division is seen to be due.
    swarm_samples: Callable[[], int]
    own_samples: Callable[[], int]  # The samples that this loop reports as trained.
    rank: int = 0  # The rank among the processes that form one node and divide its share.
    ranks: int = 1
    finished: Callable[[], bool] = bool  # Whether the run has finished; by default it never has.


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """The indices that a pass gave while the members stayed the same.

    They are the start of the share that ``me`` had among ``rivals``. So the ids, the seed and the last index suffice to
    compute them again.
    """

    me: PeerId
    rivals: tuple[PeerId, ...]
    seed: int | None  # The seed of the order; None: by index.
    indices: I64  # In the order in which they were given.

    @classmethod
    def recomputed(
        cls, length: int, number: int, me: PeerId, rivals: tuple[PeerId, ...], seed: int | None, last: int
    ) -> Part:
        """Recompute a part from its saved form.

        Indices given before the members changed are included again, which does not matter in a set.
        """
        share = ordered(share_of(length, me, rivals, number), number, me, seed)
        places = np.flatnonzero(share == last)  # Empty if the saved form was altered.
        return cls(me, rivals, seed, share[: places[0] + 1] if len(places) else share[:0])


class Pass:
    """One pass over this node's share of ``length`` samples, without repeating an index.

    When the members change, the next batch includes a dead member's part and leaves out what a newcomer owns. The pass
    ends when nothing owned is left. If a change leaves less than half a batch, samples of the share that were given
    before fill that batch up, because tiny batches ruin the statistics of BatchNorm.

    Args:
        length: The number of samples in the dataset.
        number: The number of the pass. Nodes that agree on it divide the dataset without overlap; each number divides
            it differently.
        seed: Orders this node's share; None leaves it ascending. It does not affect the division, so nodes with
            different seeds still cover everything.
        sharers: The members that share the data.
        before: The indices that an earlier life of this loop was given in the same pass.
    """

    block = 1  # The indices that one member owns together; above 1 each batch is such a block.

    def __init__(
        self, length: int, number: int, seed: int | None, sharers: Sharers, before: Iterable[Part] = ()
    ) -> None:
        self.length, self.number, self.seed, self.me, self.sharers = length, number, seed, sharers.me(), sharers
        self.seen_changes: int | None = None  # The count of changes when members were last read; None before the first.
        self.parts: list[Part] = []  # Given in this life, before the last change of members.
        self.was_given = np.zeros(length, dtype=np.bool_)  # (samples,), before the last change of members.
        self.rivals: tuple[PeerId, ...] | None = None  # Those of the last division; None before the first.
        # The owned indices that were not given before that change, in the order of giving.
        self.pending: I64 = np.empty(0, dtype=np.int64)
        self.share = self.pending  # The owned indices, given or not.
        self.position = 0  # The number of pending indices that were given.
        self.is_evaluation = False
        self.is_ended = False  # The last call of :meth:`take` had nothing to give.
        self.earlier_parts = list(before)
        for part in self.earlier_parts:
            self.was_given[part.indices] = True

    def take(self, count: int, whole: bool = False, ranks: int = 1) -> I64:
        """Return the indices of the next batch, empty at the end of the pass. (count,), or fewer in the last batches.

        Args:
            count: The indices of a batch, over all ranks.
            whole: True to leave out a rest that is no whole batch; otherwise the last batches share it.
            ranks: The number of ranks that divide the batch.
        """
        left, size = self.left, count // ranks
        per_rank = -(-left // ranks)  # The last index may come twice, so that all ranks get equally many.
        batches = -(-per_rank // size)
        if whole:
            count = count if left >= count else 0
        elif 0 < batches <= SPREAD_BATCHES and self.block == 1:
            count = ranks * -(-per_rank // batches)
        taken = self.pending[self.position : self.position + count]
        self.position, self.is_ended = self.position + len(taken), not len(taken)
        lacking = -(-size // 2) * ranks - len(taken)
        if len(taken) and size > 1 and lacking > 0:
            taken = np.concatenate([taken, self.share[~np.isin(self.share, taken)][:lacking]])
        return taken

    @property
    def left(self) -> int:
        """Return the number of indices that are left with the present members."""
        self.follow_changes()
        return len(self.pending) - self.position

    def follow_changes(self) -> None:
        """Divide the dataset again if members came or went."""
        # Read the counter before the members: a change between the two is then seen at the next batch.
        changes = self.sharers.changes()
        if changes != self.seen_changes:
            self.seen_changes = changes
            self.divide()

    def divide(self) -> None:
        """Compute the pending indices anew if the set of members has changed."""
        rivals = tuple(sorted({*self.sharers.members()} - {self.me}))
        if rivals == self.rivals:
            return
        if self.position and self.rivals is not None:
            part = self.part(self.position)
            self.parts.append(part)
            self.was_given[part.indices] = True
        self.rivals, self.position = rivals, 0
        self.share = ordered(self.owned(rivals), self.number, self.me, self.seed)
        self.pending = self.share[~self.was_given[self.share]]

    def owned(self, rivals: Sequence[PeerId]) -> I64:
        """Return the indices that this node owns among these rivals, ascending."""
        return share_of(self.length, self.me, rivals, self.number)

    def part(self, count: int) -> Part:
        """Return the first ``count`` of the indices pending since the last change of members."""
        assert self.rivals is not None
        return Part(self.me, self.rivals, self.seed, self.pending[:count].copy())

    @property
    def is_exhausted(self) -> bool:
        """Return True if nothing was left when indices were last taken."""
        return self.position == len(self.pending)

    @property
    def given_count(self) -> int:
        """Return the number of indices given in this life."""
        return sum(len(part.indices) for part in self.parts) + self.position

    def given_parts(self, count: int) -> list[Part]:
        """Return the parts of all lives; of this life the first ``count`` indices, which the loop has trained on."""
        parts_of_this_life = [*self.parts, self.part(self.position)] if self.position else self.parts
        parts = list(self.earlier_parts)
        for part in parts_of_this_life:
            if count > 0:
                parts.append(Part(part.me, part.rivals, part.seed, part.indices[:count]))
            count -= len(part.indices)
        return parts


class DrawnPass(Pass):
    """A pass over what another sampler has drawn, as with weights: a dataset's index may come often or never.

    Places in the draw take the part of indices. A node owns the places whose sample it owns, in the drawn order. So the
    weights go with the share. Where a draw arranges batches, a node owns whole blocks of places instead.

    Args:
        drawn: The drawn indices of the dataset, in order.
        samples: The dataset's length.
        number: As in :class:`Pass`.
        sharers: As in :class:`Pass`.
        block: The places of a block; 1: samples are owned singly.
    """

    def __init__(self, drawn: I64, samples: int, number: int, sharers: Sharers, block: int = 1) -> None:
        super().__init__(len(drawn), number, None, sharers)
        self.drawn, self.samples, self.block = drawn, samples, block

    def owned(self, rivals: Sequence[PeerId]) -> I64:
        owned = self.drawn if self.block == 1 else np.arange(len(self.drawn)) // self.block
        is_ours = np.zeros(self.samples if self.block == 1 else -(-len(owned) // self.block), dtype=np.bool_)
        is_ours[share_of(len(is_ours), self.me, rivals, self.number)] = True
        return np.flatnonzero(is_ours[owned])


def rank_share(taken: I64, rank: int, ranks: int) -> I64:
    """Return one rank's part of the indices that its node takes.

    All ranks get equally many, since they wait for each other's gradients at each step. If their number is no
    multiple of ``ranks``, some indices come twice.
    """
    if ranks == 1 or not len(taken):
        return taken
    return np.resize(taken, -(-len(taken) // ranks) * ranks)[rank::ranks]


def owned_buckets(buckets: int, me: PeerId, members: Sequence[PeerId], salt: bytes) -> npt.NDArray[np.bool_]:
    """Return the buckets that ``me`` owns, as (buckets,) bool.

    It owns a bucket if no rival has a higher weight, or an equal one and a smaller id.

    Rivals are compared in blocks, and only buckets still held go on to the next block. After k rivals 1 / (k + 1) of
    the buckets are left. So blocks grow as the held buckets shrink, and a round costs at most ``buckets`` hashes. For
    65,536 buckets among 10,000 members that is about a million hashes instead of 655 million, which would slow a
    training loop.
    """
    rivals = sorted(set(members) - {me})
    rival_hashes = np.array([_hash64(salt + rival) for rival in rivals], dtype=np.uint64)  # (rivals,)
    wins_ties = np.array([rival < me for rival in rivals], dtype=np.bool_)  # (rivals,)
    hashes = _bucket_hashes(buckets, salt)  # (held,)
    held = np.arange(buckets)  # (held,), the buckets that no rival so far has won.
    start = 0
    while start < len(rivals) and len(held):
        stop = start + max(1, buckets // len(held))
        our_weight = _mix(hashes ^ _hash64(salt + me))[:, None]  # (held, 1)
        weight = _mix(hashes[:, None] ^ rival_hashes[None, start:stop])  # (held, block), at most `buckets` elements
        is_lost = ((weight > our_weight) | ((weight == our_weight) & wins_ties[start:stop])).any(axis=1)
        held, hashes = held[~is_lost], hashes[~is_lost]
        start = stop
    result = np.zeros(buckets, dtype=np.bool_)
    result[held] = True
    return result


def buckets_of(length: int, me: PeerId, members: Sequence[PeerId], number: int) -> npt.NDArray[np.bool_]:
    """Return the buckets of ``length`` samples that ``me`` owns in pass ``number``, as (buckets,) bool.

    The owner of a sample does not depend on the length: members whose copies of the data lack samples at the end agree
    on all others.
    """
    return owned_buckets(min(length, MAX_BUCKETS), me, members, b"share %d " % number)


def share_size(length: int, me: PeerId, members: Sequence[PeerId], number: int) -> int:
    """Return how many samples ``me`` owns in pass ``number``; for buckets of several samples the expected number."""
    return round(length * float(buckets_of(length, me, members, number).mean()))


def share_of(length: int, me: PeerId, members: Sequence[PeerId], number: int) -> I64:
    """Return the indices that ``me`` owns in pass ``number``, ascending."""
    is_ours = buckets_of(length, me, members, number)
    if length <= MAX_BUCKETS:
        return np.flatnonzero(is_ours)
    parts = []
    for start in range(0, length, _BLOCK):
        indices = np.arange(start, min(start + _BLOCK, length), dtype=np.uint64)
        # Use the top 16 bits of a hash, not index // size: neighbours are often alike (sorted by label, one speaker).
        bucket = (_mix(indices) >> np.uint64(48)).astype(np.int64)
        parts.append(start + np.flatnonzero(is_ours[bucket]))
    return np.concatenate(parts)


def ordered(indices: I64, number: int, me: PeerId, seed: int | None) -> I64:
    """Return ascending ``indices`` in the order in which they are given.

    A hash replaces a permutation: after a change of members the remaining indices keep their order, and the memory is
    that of the share, not of the dataset.
    """
    if seed is None:
        return indices
    salt = _hash64(b"order %d %d " % (seed, number) + me)
    return indices[np.argsort(_mix(_mix(indices.astype(np.uint64)) ^ salt), kind="stable")]


def _bucket_hashes(buckets: int, salt: bytes) -> U64:
    return _mix(np.arange(buckets, dtype=np.uint64) + _hash64(b"bucket " + salt))


def _hash64(data: bytes) -> np.uint64:
    return np.uint64(int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little"))


def _mix(x: U64) -> U64:
    """Apply splitmix64's step (Steele, Lea and Flood 2014) to each element; sums and products wrap on purpose."""
    z = x + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
