"""Indices of this node's share, for a DataLoader of the user's own: with its workers, collating and pinning."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, Self, cast

import numpy as np
import torch
from torch.utils.data import BatchSampler, Sampler

from gossip.errors import ConfigError, DataError
from gossip.ids import PeerId, quantity
from node.data.division import Part, Pass, of_rank, share_size
from node.data.sharding import length_of_items

__all__ = ["Samplers", "ShareBatchSampler", "ShareSampler", "Sharers"]

MAX_IDS = 128  # members named in a state, 4 KB: in a larger swarm a resumed pass begins anew, a hundredth of the data
MAX_LENGTHS = 16  # of datasets in one loop: more than any needs, and a bound for who makes samplers without end


@dataclass(frozen=True, slots=True)
class Sharers:
    """Those who share the data, as this node sees them at the moment, and how far they are."""

    me: Callable[[], PeerId]
    members: Callable[[], Sequence[PeerId]]
    changes: Callable[[], int]  # counts changes of members
    swarm_samples: Callable[[], int]
    own_samples: Callable[[], int]  # that this loop says it has trained on
    rank: int = 0  # of those that are one node, and divide its share
    ranks: int = 1

    @classmethod
    def of(cls, side: Sharing) -> Self:
        """As this side of a training loop sees them, whenever it is asked."""
        return cls(
            lambda: side.me, lambda: side.view.owners, lambda: side.view.changes, lambda: side.swarm_samples,
            lambda: side.trained_on, side.rank, side.size,
        )  # fmt: skip


class Owners(Protocol):
    """Of the members that share the data."""

    @property
    def owners(self) -> Sequence[PeerId]: ...

    @property
    def changes(self) -> int: ...


class Sharing(Protocol):
    """A training loop's, of a node that is here."""

    rank: int
    size: int

    @property
    def me(self) -> PeerId: ...

    @property
    def view(self) -> Owners: ...

    @property
    def swarm_samples(self) -> int: ...

    @property
    def trained_on(self) -> int: ...


class ShareSampler(Sampler[int]):
    """This node's share of ``length`` samples, index by index; each ``iter`` is one pass (:class:`Pass`).

    The number of the pass follows the swarm's count of samples, so that members agree on how it is divided. ``seed``
    has a part in the order alone. ``len`` is the share of the next pass, or of the one under way, as the members are
    now: exact up to 65,536 samples, the mean of a share beyond; it moves as members come and go.
    """

    def __init__(self, length: int, shuffle: bool, seed: int, sharers: Sharers) -> None:
        self.length, self.sharers = length, sharers
        self.seed = seed if shuffle else None
        self.next_number = 0  # of the pass to come
        self.before: list[Part] = []  # what an earlier life was given of that one, where none has begun in this life
        self.begun: list[tuple[Pass, int]] = []  # the last two, and the loop's own samples before the first of each
        self.size = (-1, -1, 0)  # of which pass, at which change of members, how many

    def __iter__(self) -> Iterator[int]:
        one, sharers = self.begin(), self.sharers
        while len(taken := one.take(sharers.ranks)):
            yield int(of_rank(taken, sharers.rank, sharers.ranks)[0])

    def __len__(self) -> int:
        return -(-self.share // self.sharers.ranks)

    @property
    def share(self) -> int:
        """How many samples are this node's, over all its ranks."""
        sharers, number = self.sharers, self.number
        changes = sharers.changes()
        if self.size[:2] != (number, changes):
            self.size = number, changes, share_size(self.length, sharers.me(), sharers.members(), number)
        return self.size[2]

    @property
    def number(self) -> int:
        """Of the last pass that began, or where none has of the next."""
        return self.begun[-1][0].number if self.begun else self.next_number

    def begin(self) -> Pass:
        """The next pass; or the rest of one that an earlier life had begun, where the swarm is not ahead of it."""
        sharers = self.sharers
        number = max(self.next_number, sharers.swarm_samples() // self.length)
        before = self.before if number == self.next_number else []
        one = Pass(self.length, number, self.seed, sharers.me(), sharers.members, sharers.changes, before)
        if before and one.over:
            one = Pass(self.length, number + 1, self.seed, sharers.me(), sharers.members, sharers.changes)
        trained = sharers.own_samples()
        if self.begun and self.begun[-1][0].exhausted:  # a loader ahead of its loop has the rest, if it is no other's
            last, since = self.begun[-1]
            trained = max(trained, since + last.total)
        self.next_number, self.before = one.number + 1, []
        self.begun = [*self.begun[-1:], (one, trained)]
        return one

    def set_epoch(self, epoch: int) -> None:
        """Nothing: frameworks call it so that each epoch has another order, and here the swarm counts the passes."""

    def state_dict(self) -> dict[str, Any]:
        """The pass, and what of it this loop has trained on, as it told the node: what a loader's workers have fetched
        ahead is given again. Numbers and texts alone, at most some 5 KB."""
        trained, number, parts = self.sharers.own_samples(), self.next_number, self.before
        for one, since in self.begun:
            if trained >= since or one is self.begun[0][0]:  # else the loop has not come to this pass
                number, parts = one.number, one.given_parts(trained - since)
        kept: list[dict[str, Any]] = []
        ids = 0
        for part in sorted(parts, key=lambda part: len(part.given), reverse=True):
            if ids + len(part.rivals) < MAX_IDS and len(part.given):
                ids += 1 + len(part.rivals)
                kept.append({
                    "node": part.me.hex(), "beside": [rival.hex() for rival in part.rivals], "seed": part.seed,
                    "last": int(part.given[-1]),
                })  # fmt: skip
        return {"samples": self.length, "pass": number, "given": kept}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The next ``iter`` goes on with that pass, unless the swarm is ahead of it by then. What was given in it is
        left out, under whatever identity, and among whatever members; where a state could not name them all, some of
        it comes again. Raises DataError for what is no such state, and for that of another length."""
        number, parts = parsed(state, self.length)
        self.next_number, self.before, self.begun = number, parts, []


class ShareBatchSampler(BatchSampler):
    """The same in batches: divided anew between two of them. Without ``drop_last`` the last one may be short."""

    sampler: ShareSampler

    def __init__(self, sampler: ShareSampler, batch_size: int, drop_last: bool) -> None:
        super().__init__(sampler, batch_size, drop_last)

    def __iter__(self) -> Iterator[list[int]]:
        one, sharers = self.sampler.begin(), self.sampler.sharers
        while len(batch := one.take(self.batch_size * sharers.ranks, self.drop_last, sharers.ranks)):
            yield of_rank(batch, sharers.rank, sharers.ranks).tolist()

    def __len__(self) -> int:
        share, batch = self.sampler.share, self.batch_size * self.sampler.sharers.ranks
        return share // batch if self.drop_last else -(-share // batch)

    def set_epoch(self, epoch: int) -> None:
        """As :meth:`ShareSampler.set_epoch`."""

    def state_dict(self) -> dict[str, Any]:
        """As :meth:`ShareSampler.state_dict`."""
        return self.sampler.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """As :meth:`ShareSampler.load_state_dict`."""
        self.sampler.load_state_dict(state)


class Samplers:
    """Those of one node. A loop that makes one for each epoch goes on counting, and a checkpoint of the node has the
    state of the last one that was made for each length."""

    def __init__(self, sharers: Sharers) -> None:
        self.sharers = sharers
        self.last: dict[int, ShareSampler] = {}  # by length
        self.states: dict[int, Mapping[str, Any]] = {}  # loaded before their samplers were made

    def make(
        self, dataset: Any, batch_size: int | None = None, shuffle: bool = True, drop_last: bool = False, seed: int = 0,
        by_rank: bool = True,
    ) -> ShareSampler | ShareBatchSampler:  # fmt: skip
        """A sampler of indices, or with ``batch_size`` one of batches. Not ``by_rank``: every rank of the node gets the
        whole share, in the same order, for loaders that divide it themselves. Raises DataError where the dataset cannot
        be divided, ConfigError for impossible numbers."""
        if not isinstance(seed, int):
            raise ConfigError(f"seed is {seed!r}; give a whole number.")
        if batch_size is None and drop_last:
            raise ConfigError("drop_last is of batches; give batch_size too, or drop the last one in the DataLoader.")
        if batch_size is not None and (not isinstance(batch_size, int) or batch_size < 1):
            raise ConfigError(f"batch_size is {batch_size!r}; give a whole number of at least 1, or None for indices.")
        sharers = self.sharers if by_rank else replace(self.sharers, rank=0, ranks=1)
        indices = ShareSampler(length_of(dataset), shuffle, seed, sharers)
        self.remember(indices)
        return indices if batch_size is None else ShareBatchSampler(indices, batch_size, drop_last)

    def remember(self, sampler: ShareSampler) -> None:
        length = sampler.length
        before, state = self.last.pop(length, None), self.states.pop(length, None)
        if state is not None:
            sampler.load_state_dict(state)
        elif before is not None:
            sampler.next_number = before.next_number
        self.last[length] = sampler
        if len(self.last) > MAX_LENGTHS:
            del self.last[next(iter(self.last))]

    def state(self) -> list[dict[str, Any]]:
        """Of each length's last."""
        return [sampler.state_dict() for sampler in self.last.values()]

    def load(self, states: Any) -> None:
        """Go on from these: now, or when a sampler of that length is made. What is no list of states is none."""
        for state in states if isinstance(states, list) else ():
            length = state.get("samples") if isinstance(state, Mapping) else None
            if type(length) is int and length in self.last:
                self.last[length].load_state_dict(state)
            elif type(length) is int and len(self.states) < MAX_LENGTHS:
                self.states[length] = state


def length_of(dataset: Any) -> int:
    """Of what a DataLoader would index, or a number of samples."""
    if isinstance(dataset, int | np.integer) and not isinstance(dataset, bool):
        if dataset < 1:
            size = quantity(int(dataset), "sample")
            raise DataError(f"A dataset of {size} cannot be divided; give at least one sample.")
        return int(dataset)
    if isinstance(dataset, tuple) and any(isinstance(item, torch.Tensor | np.ndarray) for item in dataset):
        raise DataError("A tuple of tensors may be columns or samples; give TensorDataset(*tensors), or their number.")
    return length_of_items(dataset)


def parsed(state: Any, length: int) -> tuple[int, list[Part]]:
    """The pass of a state, and what was given of it."""
    try:
        samples, number, given = state["samples"], state["pass"], state["given"]
        rows = [
            (PeerId(bytes.fromhex(row["node"])), tuple(PeerId(bytes.fromhex(one)) for one in row["beside"]),
             row["seed"], row["last"])
            for row in given
        ]  # fmt: skip
        seeds = [seed for _, _, seed, _ in rows if seed is not None]
        numbers = [samples, number, *seeds, *[last for _, _, _, last in rows]]
        sound = all(type(one) is int for one in numbers) and min(samples, number + 1) > 0
    except (TypeError, KeyError, ValueError, AttributeError):
        sound = False
    if not sound:
        raise DataError("This is no state of a sampler: give what its state_dict() returned.")
    if samples != length:
        raise DataError(f"The sampler's state is of {samples:,} samples, this dataset has {length:,}: leave it out.")
    parts = [Part.again(length, number, me, rivals, seed, last) for me, rivals, seed, last in rows]
    return cast(int, number), parts
