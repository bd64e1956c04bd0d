"""The engine of the fuzzer: inputs by number, each judged by what it raises, how long it takes and what it allocates.

An input belongs to a *life* of its target: a generator seeded with the seed, the target's name and the life's number
makes the inputs of one life in order, for targets that hold a state as for those that do not. So a target, a seed and
a number are all it takes to play an input again, and no input depends on which process plays it.
"""

from __future__ import annotations

import gc
import resource
import time
import traceback
import tracemalloc
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from random import Random
from typing import ClassVar

__all__ = ["LIMIT_BYTES", "LIMIT_S", "Figures", "Find", "Target", "play"]

LIMIT_S = 0.1  # of the thread's own time, so that a busy machine makes no input slow
LIMIT_BYTES = 16 << 20  # at once, for one input: four of the largest bodies, or msgpack's 64 KiB header 56 times over
TRACE_EVERY = 509  # inputs from one that is traced to the next: starting to trace takes 5 ms; a prime
MOST_FINDS = 20  # of one target, each with another cause: enough to mend


class Target(ABC):
    """One parser or state machine. An instance is one life; ``life`` says for how many inputs."""

    name: ClassVar[str]
    share: ClassVar[float]  # of all inputs, when there are many targets
    life: ClassVar[int] = 64
    declared: ClassVar[tuple[type[BaseException], ...]]  # what its input may make it raise

    def __init__(self, rng: Random) -> None:
        self.rng = rng

    @abstractmethod
    def prepare(self) -> tuple[object, Callable[[], object]]:
        """The next input, for a person to see, and what to do with it; neither timed nor judged."""

    def ended(self, error: BaseException) -> None:  # noqa: B027 - most have nothing to do then
        """The input raised what was declared."""

    def close(self) -> None:  # noqa: B027
        """The life is over."""


@dataclass(frozen=True, slots=True)
class Find:
    """An input that raised what nobody declared, or was slow, or allocated too much."""

    target: str
    seed: int
    number: int
    what: str
    cause: str  # of two finds with one cause one is enough
    detail: str

    @property
    def replay(self) -> str:
        """The command that plays it again."""
        return f"python -m tests.fuzz --target {self.target} --seed {self.seed} --input {self.number}"


@dataclass(slots=True)
class Figures:
    """What was played of one target."""

    inputs: int = 0
    refused: int = 0  # by a declared error
    seconds: float = 0.0  # of the inputs themselves
    slowest_s: float = 0.0
    peak_bytes: int = 0  # of one input, of those traced
    grown_bytes: int = 0  # of the process, from before the target's first input
    finds: dict[str, Find] = field(default_factory=dict)

    def add(self, other: Figures) -> None:
        self.inputs += other.inputs
        self.refused += other.refused
        self.seconds += other.seconds
        self.slowest_s = max(self.slowest_s, other.slowest_s)
        self.peak_bytes = max(self.peak_bytes, other.peak_bytes)
        self.grown_bytes = max(self.grown_bytes, other.grown_bytes)
        self.finds |= other.finds


def generator(target: type[Target], seed: int, life: int) -> Random:
    return Random(f"{target.name} {seed} {life}")


def play(target: type[Target], seed: int, lives: Iterable[int], limit: int | None = None) -> Figures:
    """Play lives of a target, up to ``limit`` inputs."""
    figures = Figures()
    was_frozen = gc.get_freeze_count() > 0
    gc.collect()
    gc.freeze()  # or a collection of all that is imported falls into some input, which takes 60 ms by itself
    before = max_resident_bytes()
    try:
        for life in lives:
            if limit is not None and figures.inputs >= limit:
                break
            count = target.life if limit is None else min(target.life, limit - figures.inputs)
            play_life(target, seed, life, count, figures)
            if len(figures.finds) >= MOST_FINDS:
                break
    finally:
        if not was_frozen:  # As the tests' own process is: the next target's collection leaves out what is imported.
            gc.unfreeze()
    figures.grown_bytes = max(0, max_resident_bytes() - before)
    return figures


def play_life(target: type[Target], seed: int, life: int, count: int, figures: Figures) -> None:
    subject = target(generator(target, seed, life))
    try:
        for place in range(count):
            number = life * target.life + place
            shown, act = subject.prepare()
            traced = figures.inputs % TRACE_EVERY == 0
            if traced:
                tracemalloc.start()
            error: BaseException | None = None
            start = time.thread_time()
            try:
                act()
            except Exception as raised:
                error = raised
            seconds = time.thread_time() - start
            if traced:
                peak = tracemalloc.get_traced_memory()[1]
                tracemalloc.stop()
                figures.peak_bytes = max(figures.peak_bytes, peak)
                if peak > LIMIT_BYTES:
                    found(figures, target, seed, number, f"allocated {peak:,} bytes", "memory", shown)
            else:  # what is traced is slower
                if seconds > LIMIT_S:
                    seconds = again(target, seed, number, seconds)
                figures.slowest_s = max(figures.slowest_s, seconds)
                if seconds > LIMIT_S:
                    found(figures, target, seed, number, f"took {1e3 * seconds:.0f} ms", "time", shown)
            figures.inputs += 1
            figures.seconds += seconds
            if error is None:
                continue
            if isinstance(error, target.declared):
                figures.refused += 1
                subject.ended(error)
                continue
            frames = traceback.extract_tb(error.__traceback__)
            cause = f"{type(error).__name__} at {frames[-1].filename}:{frames[-1].lineno}"
            if cause not in figures.finds:
                said = "".join(traceback.format_exception(error))[-4_000:]
                found(figures, target, seed, number, f"raised {type(error).__name__}", cause, shown, said)
            return  # its state may be anything now
    finally:
        subject.close()


def again(target: type[Target], seed: int, number: int, seconds: float) -> float:
    """The least time of three: the first use of a module or a machine's hiccup is no property of the input."""
    life, place = divmod(number, target.life)
    for _ in range(2):
        subject = target(generator(target, seed, life))
        try:
            for at in range(place + 1):
                _, act = subject.prepare()
                start = time.thread_time()
                try:
                    act()
                except Exception as error:
                    if at < place:
                        subject.ended(error)
            seconds = min(seconds, time.thread_time() - start)
        finally:
            subject.close()
    return seconds


def found(
    figures: Figures, target: type[Target], seed: int, number: int, what: str, cause: str, shown: object, said: str = ""
) -> None:
    if cause not in figures.finds:
        try:
            text = repr(shown)
        except (ValueError, RecursionError):  # a number of thousands of digits, a thousand brackets
            text = "beyond what Python writes down"
        detail = f"{said}input: {text[:2_000]}{'...' if len(text) > 2_000 else ''}"
        figures.finds[cause] = Find(target.name, seed, number, what, cause, detail)


def max_resident_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
