"""The engine of the fuzzer: numbered inputs, each judged by its exceptions, its duration and its allocations.

An input belongs to a *life* of its target, with or without a state. A random generator makes the inputs of one life in
order; its seed is the fuzzer's seed, the target's name and the life's number. So a target, a seed and a number suffice
to play an input again, and no input depends on the process that plays it.
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

LIMIT_S = 0.1  # CPU time of the thread, so that no input counts as slow because the machine is busy.
LIMIT_BYTES = 16 << 20  # The peak of one input: four of the largest bodies, or msgpack's 64 KiB header 56 times over.
TRACE_EVERY = 509  # Trace the memory of every 509th input only, since starting a trace takes 5 ms; a prime number.
MOST_FINDS = 20  # A target ends after so many finds with different causes: that is enough work for one repair.


Input = tuple[object, Callable[[], object]]
"""An input as a person reads it, and a function that feeds it to its target."""


class Target(ABC):
    """One parser or state machine. An instance is one life, which takes ``life`` inputs."""

    name: ClassVar[str]
    share: ClassVar[float]  # Its part of all inputs, if several targets are played.
    life: ClassVar[int] = 64
    declared: ClassVar[tuple[type[BaseException], ...]]  # The exceptions that an input may cause.

    def __init__(self, rng: Random) -> None:
        self.rng = rng

    @abstractmethod
    def prepare(self, rng: Random) -> Input:
        """Return the next input; making it is not judged."""

    def ended(self, error: BaseException) -> None:  # noqa: B027 - most have nothing to do then
        """Note that the input raised a declared exception."""

    def close(self) -> None:  # noqa: B027
        """End this life."""


@dataclass(frozen=True, slots=True)
class Find:
    """An input that raised an undeclared exception, was slow, or allocated too much."""

    target: str
    seed: int
    number: int
    what: str
    cause: str  # Of several finds with the same cause only the first is kept.
    detail: str

    @property
    def replay(self) -> str:
        """The command that plays the input again."""
        return f"python -m tests.fuzz --target {self.target} --seed {self.seed} --input {self.number}"


@dataclass(slots=True)
class Figures:
    """The statistics of one target."""

    inputs: int = 0
    refused: int = 0  # Inputs that raised a declared exception.
    seconds: float = 0.0  # CPU time of the inputs themselves.
    slowest_s: float = 0.0
    peak_bytes: int = 0  # The largest allocation of a traced input.
    grown_bytes: int = 0  # The growth of the process since before the target's first input.
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
    gc.freeze()  # Otherwise some input would include a collection of all imported objects, which takes 60 ms.
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
        if not was_frozen:  # Test processes freeze imported objects at their start, and keep them frozen.
            gc.unfreeze()
    figures.grown_bytes = max(0, max_resident_bytes() - before)
    return figures


def play_life(target: type[Target], seed: int, life: int, count: int, figures: Figures) -> None:
    subject = target(generator(target, seed, life))
    try:
        for place in range(count):
            number = life * target.life + place
            shown, act = subject.prepare(subject.rng)
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
            else:  # Tracing slows an input, so only untraced ones are timed.
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
            return  # The target's state is undefined after an undeclared exception.
    finally:
        subject.close()


def again(target: type[Target], seed: int, number: int, seconds: float) -> float:
    """Play an input twice more and return its least time: the first use of a module or a pause may have slowed it."""
    life, place = divmod(number, target.life)
    for _ in range(2):
        subject = target(generator(target, seed, life))
        try:
            for at in range(place + 1):
                _, act = subject.prepare(subject.rng)
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
        except (ValueError, RecursionError):  # A number of thousands of digits, or a thousand nested brackets.
            text = "beyond what Python writes down"
        detail = f"{said}input: {text[:2_000]}{'...' if len(text) > 2_000 else ''}"
        figures.finds[cause] = Find(target.name, seed, number, what, cause, detail)


def max_resident_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
