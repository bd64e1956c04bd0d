"""The samples that a loop draws from its share, which `node.step` counts, and the end of a run inside a pass."""

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, TypeVar

import torch

from gossip.errors import ConfigError, LocalError
from node.data.division import share_size
from node.data.epochs import Epochs
from node.data.sampler import Samplers

T = TypeVar("T")


class BatchSource(NamedTuple):
    """What a pass is over."""

    length: int | None  # The samples of its data; None for a stream.
    has_gradients: bool  # Whether gradients were on when it began.
    data: int = 0  # The id of its data, which differs between two datasets of one length; 0: not known yet.
    place: int = 0  # Among the passes over these data that are open at once, side by side.


UNSTEPPED_PASSES = 3  # One pass may accumulate gradients all along.
UNSTEPPED_BATCHES = 256  # And many passes over a share of few batches may.
SKIPPED_EPOCHS = 100  # Epochs in a row that are skipped at once, while no member trains.
SKIPPED_S = 0.05  # A body of the loop that takes longer may wait for something.
COMPARED_STEPS = 8  # Steps before the samples that a loop states are compared with those drawn.
COMPARED_ONES = 64  # The same for a loop of its own over a sampler, whose workers draw ahead.
EMPTY_STEPS = 256  # Steps in a row without a sample before a loop is told.
FEW = 4  # A pass over so small a part of this node's share of an epoch counts steps and not rows.
MUCH = 1.5  # A ratio of stated to drawn samples that padding and skipped batches do not reach.

NO_SAMPLES = (
    "node.epochs counts samples, and this step has none: loop over node.loader(loader) or node.shard, or give "
    "node.step(loss, samples=len(batch))."
)
SAMPLER_SAMPLES = (
    "The batches of node.sampler are drawn by a loader that this node does not see: give node.step(loss, "
    "samples=len(batch)), or loop over node.loader(loader) without that sampler."
)
STEPS_AS_SAMPLES = (
    "Each step counts as one sample, and this loop has taken few of them for an epoch of so many samples: give "
    "node.step(loss, samples=len(batch)), or node.epochs the number of steps."
)
EMPTY = (
    f"{EMPTY_STEPS} steps in a row drew nothing from node.loader or node.shard and stated no samples: iterate over the "
    "loader again for each pass, and not over a copy of its batches, or give node.step(loss, samples=len(batch))."
)
PART = (
    "An evaluation over node.loader or node.shard has seen {:,} of {:,} samples, the share of this node: read "
    "validation data from a plain DataLoader, or add up the figures of all nodes by node.reduce."
)
BEGUN = (
    "node.epochs counts the samples of the whole run, also those of earlier calls and of a checkpoint: of these {} "
    "epochs {} are over already. Give the number of all epochs in one call, or train each phase in a new Node."
)
SKIPPED = (
    f"{SKIPPED_EPOCHS} epochs in a row have drawn nothing from this node's share, so this loop would never end: "
    "node.epochs counts the samples of the swarm, so resume by node.load, and leave out a `continue` over epochs that "
    "an earlier process has trained."
)
UNDIVIDED = (
    "node.epochs was given data of which this loop has drawn nothing by node.loader or node.shard: if its batches come "
    "from that data, every node trains on all of it. Loop over node.loader(loader), or, if the program divides the "
    "data itself, give node.epochs the number of samples."
)


class DrawCount:
    """The samples that one loop has drawn from its share since its last step.

    A pass that begins without gradients is an evaluation, as is one over other data than those of the epochs. It is
    always whole, and a step that has drawn other samples does not count them.

    Args:
        samplers: The samplers of the node.
        given: Returns the samples that samplers have given to loaders that this node does not see.
    """

    def __init__(self, samplers: Samplers, given: Callable[[], int] = int) -> None:
        self.samplers, self.given = samplers, given
        self.pending: dict[BatchSource, int] = {}  # Samples since the last step.
        self.giving: BatchSource = BatchSource(None, True)  # That of the last batch.
        self.source: BatchSource | None = None  # That of the last batch for training; None before the first.
        self.unstepped_batches = 0  # Batches for training since the last step.
        self.passes_begun = 0
        self.open: set[BatchSource] = set()  # The passes that the loop is inside of.
        self.steps = self.empty_steps = 0
        self.single_steps = 0  # Steps that count as one sample because nothing else is known.
        self.stated_steps = self.stated = self.drawn = 0  # Steps that stated their samples, these, and those drawn.
        self.told: set[str] = set()  # The kinds of sentences that the user has seen.
        self.is_divided = False  # A step has drawn from the share, or the loop has taken files of it.
        self.undivided_steps = 0  # Steps in the epochs of a dataset of which nothing was drawn.
        self.epochs: Epochs | None = None  # Those of the loop, while it is inside ``node.epochs``.
        self.epochs_source: BatchSource | None = None  # Of the data of these epochs; None before the first batch.
        self.epochs_length: Callable[[], int | None] = int  # Returns the present samples of that data.
        self.counts_steps = True  # A step without samples may count as one in these epochs.
        self.last_total: int | None = None  # The samples of its last run of epochs.
        self.last_length = 0  # The samples of an epoch of that run; 0 before the first.
        self.is_evaluating: Callable[[], bool] = bool  # Whether the model is in the mode of evaluations.
        # Changes as the model accumulates gradients, or updates its buffers.
        self.training_marks: Callable[[], list[int]] = list
        self.part: tuple[int, int] | None = None  # The samples of the last evaluation, and of its data.

    # -- drawing ---------------------------------------------------------------------------------------------------
    def give(self, samples: int) -> None:
        """Count samples that the loop gets."""
        self.pending[self.giving] = self.pending.get(self.giving, 0) + samples
        if self.giving.has_gradients:
            self.source = self.giving
            self.unstepped_batches += 1
        self.samplers.on_draw()

    def passes(self, batches: Iterable[T], length: int | None, data: object) -> Iterator[T]:
        """Yield the batches of a pass, up to the end of the run; in the last epoch pass after pass until that end.

        Next to another pass of training it is one pass in the last epoch too, so that the two keep pace.

        Args:
            batches: Gives a pass at each ``iter``.
            length: The samples of the data, those of other members included; None for a stream.
            data: The data.
        """
        source = BatchSource(length, torch.is_grad_enabled(), id(data))
        while source in self.open:
            source = source._replace(place=source.place + 1)
        self.open.add(source)
        self.passes_begun += 1
        before = self.steps, self.training_marks()
        unstepped, given_before = 0, self.pending.get(source, 0)  # Passes in a row without a step.
        try:
            goes_on = not self.is_over(source)
            while goes_on:
                goes_on, steps_before = False, self.steps
                for batch in batches:
                    self.giving = source
                    yield batch
                    if self.is_over(source):
                        return
                    goes_on = self.is_of_epochs(source) and self.epochs is not None and self.epochs.is_last
                    # Passes side by side end together, and the epoch's number comes again.
                    goes_on = goes_on and sum(other.has_gradients for other in self.open) == 1
                unstepped = 0 if self.steps > steps_before else unstepped + 1
                if goes_on:
                    self.check_steps(unstepped, "passes")
            signs = self.is_evaluating() + (not source.has_gradients)  # Of an evaluation.
            is_idle = before == (self.steps, self.training_marks()) and self.is_apart(source)
            if length is not None and signs + is_idle >= 2:
                self.part = self.pending.get(source, 0) - given_before, length
        finally:
            self.open.discard(source)

    def tell_of_part(self) -> None:
        """Tell once of an evaluation over a share, unless ``node.reduce`` has followed it."""
        if self.part and self.part[0] < self.part[1] and len(self.samplers.sharers.members()) > 1:
            self.tell_once(PART.format(*self.part), PART)
        self.part = None

    def is_apart(self, source: BatchSource) -> bool:
        """Return True if a pass is over other data than the epochs that run, or after the last ones."""
        if self.epochs is None or self.epochs_source is None:
            return self.epochs is None and self.samplers.has_ended
        return source.length != self.epochs_source.length or self.epochs_source.data not in (0, source.data)

    def tell_once(self, sentence: str, kind: str = "") -> None:
        if kind not in self.told:
            self.told.add(kind)
            self.samplers.notify("samples", sentence)

    def is_of_epochs(self, source: BatchSource) -> bool:
        """Return True if a pass is one of the running epochs, and ends with their run."""
        if self.epochs is None or not source.has_gradients:
            return False
        if self.epochs_source is None or (self.epochs_source.data == 0 and source.length == self.epochs_length()):
            self.epochs_source = source
        return source[:3] == self.epochs_source[:3]

    def is_over(self, source: BatchSource) -> bool:
        """Return True if a pass is one of epochs whose run has ended, so that it gives nothing more."""
        return self.is_of_epochs(source) and self.epochs is not None and self.epochs.is_over

    # -- epochs ----------------------------------------------------------------------------------------------------
    def numbers(self, epochs: Epochs, length: Callable[[], int | None], counts_steps: bool) -> Iterator[int]:
        """Yield the numbers of these epochs.

        Args:
            epochs: The epochs.
            length: Returns the present samples of their data, if these are divided.
            counts_steps: A step without samples may count as one.
        """
        begun = min(epochs.sharers.swarm_samples() // epochs.length, epochs.count)
        if begun >= (epochs.count if self.last_length in (0, epochs.length) else 1) and not epochs.sharers.finished():
            self.tell_once(BEGUN.format(epochs.count, begun), BEGUN)
        self.epochs, self.last_total, self.counts_steps = epochs, epochs.total, counts_steps
        self.last_length, self.epochs_length = epochs.length, length
        try:
            unstepped = skipped = 0  # Epochs in a row that drew batches and took no step, and that drew none.
            for number in epochs.numbers():
                began, activity = time.monotonic(), self.activity()
                steps_before, singles_before = self.steps, self.single_steps
                # Its first pass over so many samples shows which data they are: each epoch may make them anew.
                self.epochs_source = None if length() is None else BatchSource(length(), True)
                yield number
                singles = self.single_steps - singles_before
                if 0 < singles * FEW * len(self.samplers.sharers.members()) < epochs.length:
                    self.tell_once(STEPS_AS_SAMPLES)
                unstepped = unstepped + 1 if self.pending and self.steps == steps_before else 0
                self.check_steps(unstepped, "epochs")
                is_skipped = self.activity() == activity and time.monotonic() - began < SKIPPED_S
                skipped = skipped + 1 if is_skipped and length() is not None else 0
                sharers = epochs.sharers
                if skipped >= SKIPPED_EPOCHS and share_size(epochs.length, sharers.me(), sharers.members(), number):
                    raise LocalError(SKIPPED)
        finally:
            self.samplers.has_ended = epochs.is_over
            self.epochs = self.epochs_source = None
            self.counts_steps = True

    def activity(self) -> tuple[int, ...]:
        """Return the counts of the swarm's samples, and of this loop's steps and passes."""
        numbers = [sampler.next_number for sampler in self.samplers.last.values()]
        return self.samplers.sharers.swarm_samples(), self.steps, self.passes_begun, *numbers

    def total(self, samples: Any) -> Any:
        """Return the samples of the whole run, by default those of the last epochs; None if they are unknown.

        Raises:
            ConfigError: ``samples`` is no number above 0.
        """
        if samples is None:
            return self.last_total
        if isinstance(samples, bool) or not isinstance(samples, int | float) or not samples > 0:
            raise ConfigError(f"total is {samples!r}: give the samples of the whole run, of all members together.")
        return samples

    # -- steps -----------------------------------------------------------------------------------------------------
    def take(self, stated: int | None) -> int:
        """Return the samples of a step: those drawn since the last step, else the stated ones, else 1.

        Drawn samples of a dataset are certain, and epochs, shares and progress count the same. In a stream a batch may
        have any form, so what the loop states counts. A further step on one batch has no samples.

        Raises:
            ConfigError: The samples are needed, and unknown.
        """
        self.steps, self.unstepped_batches = self.steps + 1, 0
        self.tell_of_part()
        source, drawn = self.source, 0
        if self.pending:
            source, drawn = self.pending_samples()
            self.pending = {}
            self.is_divided |= drawn > 0
        if (drawn or any(source.has_gradients for source in self.open)) and (
            stated is None or (source is not None and source.length is not None)
        ):
            self.note_empty(not drawn)
            if stated is not None:
                self.compare(stated, drawn)
            return drawn
        if stated is None:
            return self.unstated()
        self.note_undivided()
        self.compare(stated, 0)
        return stated

    def pending_samples(self) -> tuple[BatchSource | None, int]:
        """Return what a step has drawn: of the epochs' data, else of the last, else in a loop without gradients."""
        for wanted in filter(None, (self.epochs_source, self.source)):
            if alike := [pair for pair in self.pending.items() if pair[0][:3] == wanted[:3]]:
                return max(alike, key=lambda pair: pair[1])
        return (self.source, 0) if torch.is_grad_enabled() else self.pending.popitem()

    def unstated(self) -> int:
        """Return the samples of a step that has drawn none and states none."""
        if self.given():
            raise ConfigError(SAMPLER_SAMPLES)
        if self.source is not None:
            self.note_empty(True)
            return 0 if self.epochs is not None else 1
        if not self.counts_steps:
            raise ConfigError(NO_SAMPLES)
        self.single_steps += 1
        return 1

    def note_empty(self, is_empty: bool) -> None:
        """Tell if many steps in a row draw nothing: of a pass that was left, or of a copy of its batches."""
        self.empty_steps = self.empty_steps + 1 if is_empty else 0
        if self.empty_steps == EMPTY_STEPS:
            self.samplers.notify("samples", EMPTY)

    def note_undivided(self) -> None:
        """Tell once if steps are taken in the epochs of a dataset of which nothing was ever drawn."""
        if self.is_divided or self.epochs_source is None or self.given():
            return
        self.undivided_steps += 1
        if self.undivided_steps == COMPARED_STEPS:
            self.samplers.notify("samples", UNDIVIDED)

    def compare(self, stated: int, drawn: int) -> None:
        """Compare what the loop states with what it has drawn, now and then, and tell once if they are far apart."""
        self.stated_steps, self.stated, self.drawn = self.stated_steps + 1, self.stated + stated, self.drawn + drawn
        steps = self.stated_steps
        if steps < COMPARED_STEPS or steps & (steps - 1):
            return
        if self.drawn:
            is_far = not self.drawn / MUCH <= self.stated <= self.drawn * MUCH
            text = f"node.loader and node.shard gave {self.drawn:,}. These count: leave samples out."
        else:
            given = self.given()
            is_step_count = steps >= COMPARED_ONES and self.stated == steps and given >= 4 * steps
            is_far = given > 0 and (is_step_count or self.stated > MUCH * given)
            text = f"node.sampler gave {given:,}. Epochs, progress and shares count these: give samples=len(batch)."
        if is_far:
            self.tell_once(f"This loop has stated {self.stated:,} samples in {steps} steps, for which {text}")

    def check_steps(self, unstepped: int, what: str) -> None:
        """Raise LocalError if so many passes or epochs without a step are too many."""
        if unstepped >= UNSTEPPED_PASSES and self.unstepped_batches >= UNSTEPPED_BATCHES:
            raise LocalError(
                f"{unstepped} {what} have drawn batches without node.step(), so this loop would never end: call "
                "node.step(loss) after each optimizer.step()."
            )
