"""Samplers of this node's share, for the user's own DataLoader with its workers, collation and pinning.

A sampler *gives* indices to the loader, which may prefetch: the loop trains on them later. A :class:`Part` is a run of
given indices during which the members stayed the same; its *rivals* are the other members then. The state of a sampler
names the parts that were trained on, so that a resumed pass leaves them out.
"""

import math
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, Sampler

from gossip.errors import ConfigError, DataError, checked_whole
from gossip.ids import PeerId, quantity
from gossip.recent import Recent
from node.data.division import I64, DrawnPass, Part, Pass, Sharers, rank_share, share_size
from node.data.likeness import Likeness, likeness_of
from node.data.opened import length_of_items

MAX_IDS = 128  # Members named in a state, 4 KB. In a larger swarm a resumed pass starts again: a hundredth of the data.
MAX_LENGTHS = 16  # Dataset lengths in one loop: more than any needs, and a bound for loops that keep making samplers.


class ShareSampler(Sampler[int]):
    """A sampler of this node's share of ``length`` samples, by index; each ``iter`` is one pass (:class:`Pass`).

    The number of the pass follows the swarm's sample count, so that members agree on the division. ``seed`` affects
    only the order. ``len`` is the share of the last pass that began (or of the first) with the present members: exact
    up to 65,536 samples, the mean of a share beyond. It changes as members come and go, but not while a pass runs.

    Args:
        length: The samples of a pass, of all members together.
        shuffle: True to order the share by ``seed``; otherwise it is ascending.
        seed: The seed of the order.
        sharers: The members that share the data.
        places: The dataset's index of each sample, for a subset; None: the samples themselves.
    """

    block = 1  # The samples that one member owns together.

    def __init__(self, length: int, shuffle: bool, seed: int, sharers: Sharers, places: I64 | None = None) -> None:
        self.length, self.sharers, self.places = length, sharers, places
        self.seed = seed if shuffle else None
        self.on_pass: Callable[[bool], object] = bool  # Called at the begin of each pass, and with True at its end.
        self.next_number = 0  # The number of the next pass.
        self.earlier_parts: list[Part] = []  # Given in that pass in an earlier life; empty once a pass begins in this.
        # The last two passes of training that began, and the evaluation after them if that is the last pass, with the
        # samples that the loop had trained on before each.
        self.recent_passes: list[tuple[Pass, int]] = []
        self.given_before = 0  # Samples given in the passes of training before the last one.
        # The last computed size of the share, after the pass and the count of changes of members for which it holds;
        # both are -1 before the first.
        self.cached_size = (-1, -1, 0)

    def __iter__(self) -> Iterator[int]:
        current_pass, sharers = self.begin(), self.sharers
        while len(taken := current_pass.take(sharers.ranks)):
            yield int(self.indices(current_pass, taken)[0])
        self.on_pass(True)

    def indices(self, current_pass: Pass, taken: I64) -> I64:
        """Return this rank's part of what a pass gave, as indices of the dataset."""
        part = rank_share(taken, self.sharers.rank, self.sharers.ranks)
        return part if self.places is None else self.places[part]

    def __len__(self) -> int:
        return -(-self.share // self.sharers.ranks)

    @property
    def share(self) -> int:
        """Return the number of this node's samples, over all its ranks."""
        sharers, number = self.sharers, self.number
        changes = sharers.changes()
        is_running = bool(self.recent_passes) and not self.recent_passes[-1][0].is_ended
        if self.cached_size[:2] != (number, changes) and not (is_running and self.cached_size[0] == number):
            size = self.block * share_size(-(-self.length // self.block), sharers.me(), sharers.members(), number)
            self.cached_size = number, changes, size
        return self.cached_size[2]

    @property
    def number(self) -> int:
        """Return the number of the last pass that began, or of the next if none has."""
        return self.recent_passes[-1][0].number if self.recent_passes else self.next_number

    @property
    def given(self) -> int:
        """Return the samples that this rank was given so far, evaluations left out."""
        last = self.training_passes[-1][0].given_count if self.training_passes else 0
        return self.given_before + last // self.sharers.ranks

    def begin(self, least: int = 1) -> Pass:
        """Begin the next pass, or resume one of an earlier life if the swarm is not ahead of it.

        Args:
            least: The samples that a resumed pass must still have.
        """
        sharers = self.sharers
        # The pass that the swarm's sample count has reached, or the next of this loop if that is later.
        number = max(self.next_number, sharers.swarm_samples() // self.length)
        if not torch.is_grad_enabled():
            return self.begin_evaluation(number)
        earlier_parts = self.earlier_parts if number == self.next_number else []
        next_pass = Pass(self.length, number, self.seed, sharers, earlier_parts)
        if earlier_parts and next_pass.left < least:  # The earlier life has finished this pass.
            next_pass = Pass(self.length, number + 1, self.seed, sharers)
        trained_before = sharers.own_samples()
        # The loader has taken all of the last pass, but its loop may still train on it: the new pass begins after it.
        if self.training_passes and self.training_passes[-1][0].is_exhausted:
            last_pass, trained_before_last = self.training_passes[-1]
            trained_before = max(trained_before, trained_before_last + last_pass.given_count)
        self.next_number, self.earlier_parts, self.given_before = next_pass.number + 1, [], self.given
        self.recent_passes = [*self.training_passes[-1:], (next_pass, trained_before)]
        self.on_pass(False)
        return next_pass

    def begin_evaluation(self, number: int) -> Pass:
        """Begin a pass without gradients, which leaves nothing out and is none of the training.

        Members may not agree on the number of the pass. In the order of the data they need none to divide it alike.
        """
        evaluation = Pass(self.length, 0 if self.seed is None else number, self.seed, self.sharers)
        evaluation.is_evaluation = True
        self.recent_passes = [*self.training_passes, (evaluation, self.sharers.own_samples())]
        self.on_pass(False)
        return evaluation

    @property
    def training_passes(self) -> list[tuple[Pass, int]]:
        return [row for row in self.recent_passes if not row[0].is_evaluation]

    def set_epoch(self, epoch: int) -> None:
        """Do nothing. Frameworks call it to change the order of each epoch, but here the swarm counts the passes."""

    def state_dict(self) -> dict[str, Any]:
        """Return the pass and the part of it that this loop has trained on, in numbers and texts of at most some 5 KB.

        Indices that a loader's workers have only prefetched are given again after a resume.
        """
        trained_samples, number, parts = self.sharers.own_samples(), self.next_number, self.earlier_parts
        # Of the last two passes, the one on which the loop trains now: the later one may have only begun to prefetch.
        for place, (recent_pass, trained_before) in enumerate(self.training_passes):
            if place == 0 or trained_samples >= trained_before:
                number, parts = recent_pass.number, recent_pass.given_parts(trained_samples - trained_before)
        rows: list[dict[str, Any]] = []
        id_count = 0  # Of the members in the rows, at most MAX_IDS.
        for part in sorted(parts, key=lambda part: len(part.indices), reverse=True):
            if id_count + len(part.rivals) < MAX_IDS and len(part.indices):
                id_count += 1 + len(part.rivals)
                rows.append({
                    "node": part.me.hex(), "beside": [rival.hex() for rival in part.rivals], "seed": part.seed,
                    "last": int(part.indices[-1]),
                })  # fmt: skip
        return {"samples": self.length, "pass": number, "given": rows}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue the pass of a state at the next ``iter``, unless the swarm is ahead of it by then.

        Indices given in it are left out, even if the node id or the members have changed. If the state could not name
        all members, some indices are given again. Raises DataError for a malformed state, and for one of another
        length.
        """
        number, parts = parse_state(state, self.length)
        self.given_before = self.given
        self.next_number, self.earlier_parts, self.recent_passes = number, parts, []


class ShareBatchSampler(BatchSampler):
    """A sampler of batches that follows changes of members. Without ``drop_last`` the last ones may be smaller."""

    sampler: ShareSampler

    def __init__(self, sampler: ShareSampler, batch_size: int, drop_last: bool) -> None:
        super().__init__(sampler, batch_size, drop_last)

    def __iter__(self) -> Iterator[list[int]]:
        ranks = self.sampler.sharers.ranks
        count = self.batch_size * ranks
        current_pass = self.sampler.begin(count if self.drop_last else 1)
        while len(batch := current_pass.take(count, self.drop_last, ranks)):
            yield self.sampler.indices(current_pass, batch).tolist()
        self.sampler.on_pass(True)

    def __len__(self) -> int:
        share, batch = self.sampler.share, self.batch_size * self.sampler.sharers.ranks
        return share // batch if self.drop_last else -(-share // batch)

    def set_epoch(self, epoch: int) -> None:
        """Do nothing, like :meth:`ShareSampler.set_epoch`."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state, like :meth:`ShareSampler.state_dict`."""
        return self.sampler.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state, like :meth:`ShareSampler.load_state_dict`."""
        self.sampler.load_state_dict(state)


class DrawSampler(ShareSampler):
    """A sampler of the part of another sampler's draw that this node owns (:class:`DrawnPass`).

    Args:
        draw: Draws the indices of a pass over all data, as the other sampler does in one process.
        length: The number of indices that it draws.
        samples: The dataset's length.
        sharers: The members that share the data.
        block: The indices of a batch that stay together (:class:`DrawnPass`), or 1.
    """

    def __init__(self, draw: Callable[[], I64], length: int, samples: int, sharers: Sharers, block: int = 1) -> None:
        super().__init__(length, False, 0, sharers)
        self.draw, self.samples, self.block = draw, samples, block

    def begin(self, least: int = 1) -> Pass:
        """Begin the next pass, with a new draw."""
        number = max(self.next_number, self.sharers.swarm_samples() // self.length)
        self.next_number = number + 1
        next_pass = DrawnPass(self.drawn(number), self.samples, number, self.sharers, self.block)
        self.recent_passes = [(next_pass, self.sharers.own_samples())]
        self.on_pass(False)
        return next_pass

    def drawn(self, number: int) -> I64:
        """Return the draw of a pass, for which ranks of a node and members that divide blocks seed generators alike."""
        if self.sharers.ranks == self.block == 1:
            return self.draw()
        states = random.getstate(), np.random.get_state()
        try:
            with torch.random.fork_rng(devices=()):
                torch.default_generator.manual_seed(number)  # torch.manual_seed would seed the devices too.
                random.seed(number)
                np.random.seed(number % 2**32)
                return self.draw()
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])

    def indices(self, current_pass: Pass, taken: I64) -> I64:
        assert isinstance(current_pass, DrawnPass)
        drawn, rank, ranks = current_pass.drawn[taken], self.sharers.rank, self.sharers.ranks
        if self.block == 1:
            return rank_share(drawn, rank, ranks)
        size = -(-len(drawn) // ranks)
        return np.resize(drawn, size * ranks)[rank * size :][:size]


class Samplers:
    """The samplers of one node.

    A loop that makes a sampler for each epoch goes on counting. A checkpoint has the state of the last sampler of each
    length.
    """

    def __init__(self, sharers: Sharers) -> None:
        self.sharers = sharers
        self.last = Recent[int, ShareSampler](MAX_LENGTHS)  # By length.
        self.states: dict[int, Mapping[str, Any]] = {}  # Loaded before their samplers were made.
        self.has_ended = False  # The loop's last epochs are over.
        self.on_draw: Callable[[], object] = bool  # Called at each batch that the loop draws.
        self.notify: Callable[[str, str], object] = nowhere  # Tells the user of an event of a kind in a sentence.
        # Called at the begin and at the end (True) of each pass, with the likeness of its data.
        self.on_pass: Callable[[Likeness, bool], object] | None = None

    def make(
        self, dataset: Any, batch_size: int | None = None, shuffle: bool = True, drop_last: bool = False, seed: int = 0,
        by_rank: bool = True,
    ) -> ShareSampler | ShareBatchSampler:  # fmt: skip
        """Return a sampler of indices, or of batches if ``batch_size`` is given (:meth:`node.node.Node.sampler`).

        Without ``by_rank`` every rank gets the node's whole share in the same order, for loaders that divide it
        themselves.
        """
        seed = checked_whole("seed", seed, "give a whole number.", -math.inf)
        if batch_size is None and drop_last:
            raise ConfigError(
                "drop_last applies to batches; give batch_size too, or drop the last one in the DataLoader."
            )
        if batch_size is not None:
            batch_size = checked_whole(
                "batch_size", batch_size, "give a whole number of at least 1, or None for indices."
            )
        sharers = self.sharers if by_rank else replace(self.sharers, rank=0, ranks=1)
        length = length_of(dataset)
        indices = ShareSampler(length, shuffle, seed, sharers)
        self.remember(indices)
        self.compare(indices, dataset, length)
        return indices if batch_size is None else ShareBatchSampler(indices, batch_size, drop_last)

    def compare(self, sampler: ShareSampler, data: Any, length: int) -> None:
        """Let the passes of this sampler be compared with those of other members."""
        if self.on_pass is not None:
            sampler.on_pass = partial(self.on_pass, likeness_of(data, length))

    def remember(self, sampler: ShareSampler) -> None:
        length = sampler.length
        previous, state = self.last.pop(length, None), self.states.pop(length, None)
        if state is not None:
            sampler.load_state_dict(state)
        elif previous is not None:
            sampler.next_number, sampler.earlier_parts = previous.next_number, previous.earlier_parts
        self.last[length] = sampler

    def state(self) -> list[dict[str, Any]]:
        """Return the state of the last sampler of each length."""
        return [sampler.state_dict() for sampler in self.last.values()]

    def check(self, states: Any) -> None:
        """Raise DataError if a state is malformed; ignore values that are no state."""
        for state in states if isinstance(states, list) else ():
            length = state.get("samples") if isinstance(state, Mapping) else None
            if type(length) is int:
                rows_of(state, length)

    def load(self, states: Any) -> None:
        """Resume from these states, now or when a sampler of that length is made, if :meth:`check` accepts all."""
        self.check(states)
        for state in states if isinstance(states, list) else ():
            length = state.get("samples") if isinstance(state, Mapping) else None
            if type(length) is int and length in self.last:
                self.last[length].load_state_dict(state)
            elif type(length) is int and len(self.states) < MAX_LENGTHS:
                self.states[length] = state


def nowhere(kind: str, sentence: str) -> None:
    """Tell nothing: of the ranks of a node rank 0 speaks."""


def length_of(dataset: Any) -> int:
    """Return the length of a dataset that a DataLoader could index, or the given number of samples."""
    if isinstance(dataset, int | np.integer) and not isinstance(dataset, bool):
        if dataset < 1:
            size = quantity(int(dataset), "sample")
            raise DataError(f"A dataset of {size} cannot be divided; give at least one sample.")
        return int(dataset)
    if isinstance(dataset, tuple) and any(isinstance(item, torch.Tensor | np.ndarray) for item in dataset):
        raise DataError("A tuple of tensors may be columns or samples; give TensorDataset(*tensors), or their number.")
    return length_of_items(dataset)


def parse_state(state: Any, length: int) -> tuple[int, list[Part]]:
    """Return the number of a state's pass, and the parts of it that were given."""
    number, rows = rows_of(state, length)
    return number, [Part.recomputed(length, number, *row) for row in rows]


def rows_of(state: Any, length: int) -> tuple[int, list[Any]]:
    """Return the number of a state's pass, and the saved form of its parts. Raise DataError for a malformed state."""
    try:
        samples, number = state["samples"], state["pass"]
        rows = [
            (PeerId(bytes.fromhex(row["node"])), tuple(PeerId(bytes.fromhex(rival)) for rival in row["beside"]),
             row["seed"], row["last"])
            for row in state["given"]
        ]  # fmt: skip
        seeds = [seed for _, _, seed, _ in rows if seed is not None]
        numbers = [samples, number, *seeds, *[last for _, _, _, last in rows]]
        is_valid = all(type(value) is int for value in numbers) and samples > 0 and number >= 0
    except (TypeError, KeyError, ValueError, AttributeError):
        is_valid = False
    if not is_valid:
        raise DataError("This is no state of a sampler: give what its state_dict() returned.")
    if samples != length:
        raise DataError(f"The sampler's state is of {samples:,} samples, this dataset has {length:,}: leave it out.")
    return number, rows
