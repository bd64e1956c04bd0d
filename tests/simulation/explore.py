"""Many seeds over all cores, one seed in words, and how soon each planted bug is found.

python -m tests.simulation SEED                one schedule, its trace, and how it ends
python -m tests.simulation --seeds 100000      many; each failure with the command that replays it
python -m tests.simulation --no-large --seeds 100000    without the one in 2,000 that is large, four times as fast
python -m tests.simulation --large --seeds 10  hundreds of peers, a hundred runs or hours of virtual time in each
python -m tests.simulation --mutants           each planted bug, and the first seed that shows it
"""

import argparse
import dataclasses
import multiprocessing
import os
import random
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

from gossip.config import Config
from tests.simulation.judge import Failure
from tests.simulation.large import Large
from tests.simulation.mutants import MUTANTS, planted
from tests.simulation.schedule import Schedule
from tests.simulation.transitions import watched

LARGE = 0.0005  # share of the seeds; each takes as long as a hundred others
ENOUGH = 228  # seeds within which a throw-away explorer found every bug planted in it
BATCH = 20  # seeds that one process plays before it reports
SHOWN = 20  # failures printed in full
SHORTER_S = (1.0, 2.0, 4.0, 8.0)  # tried on a schedule that fails


class Outcome(NamedTuple):
    """The outcome of one seed; ``claim`` is empty if every claim held."""

    seed: int
    claim: str
    detail: str
    events: int
    exchanges: int
    one_sided: int
    overlapping: int  # the most mixes of one host that streamed at once


def schedule_of(seed: int, large: bool | None = None, **how: Any) -> Schedule:
    """Return the schedule of a seed; ``large``, if given, decides on its size instead of the seed."""
    if large is None:
        large = random.Random(f"scale {seed}").random() < LARGE
    return (Large if large else Schedule)(seed, **how)


def outcome(seed: int, watch: bool = True, **how: Any) -> Outcome:
    """Play a seed; ``watch`` also checks every session against its table of transitions."""
    schedule = schedule_of(seed, **how)
    claim = detail = ""
    try:
        with watched() if watch else nullcontext():
            schedule.play()
    except Failure as failure:
        claim, detail = failure.claim, str(failure)
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        claim = f"no exception: {type(error).__name__} in {os.path.basename(where.filename)}, {where.name}"
        detail = f"{claim}: {error}"
    judge = schedule.world.judge
    return Outcome(seed, claim, detail, schedule.world.events, judge.done, judge.one_sided, judge.overlapping)


def shrunk(seed: int, claim: str) -> list[str]:
    """Arguments of a smaller schedule of this seed that fails in the same way, if one is found at once."""
    words: list[str] = []
    how: dict[str, Any] = {}
    for change in ({"liars": False}, *({"peers": count} for count in (2, 3, 4)), *({"seconds": s} for s in SHORTER_S)):
        name, value = next(iter(change.items()))
        if name not in how and outcome(seed, **how, **change).claim == claim:
            how |= change
            words += ["--honest"] if name == "liars" else [f"--{name}", str(value)]
    return words


def batch(seeds: range, large: bool | None = None) -> list[Outcome]:
    return [outcome(seed, large=large) for seed in seeds]


def played(first: int, count: int, processes: int, large: bool | None = None) -> Iterator[Outcome]:
    play = partial(batch, large=large)
    batches = [range(at, min(at + BATCH, first + count)) for at in range(first, first + count, BATCH)]
    if processes == 1:
        for seeds in batches:
            yield from play(seeds)
        return
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        for outcomes in pool.imap(play, batches):
            yield from outcomes


def explore(first: int, count: int, processes: int, large: bool | None = None) -> int:
    """Play these seeds, and return how many failed."""
    began, events, exchanges, one_sided = time.monotonic(), 0, 0, 0
    claims: Counter[str] = Counter()
    overlapping: Counter[int] = Counter()
    for done, one in enumerate(played(first, count, processes, large), 1):
        events, exchanges, one_sided = events + one.events, exchanges + one.exchanges, one_sided + one.one_sided
        overlapping[one.overlapping] += 1
        if one.claim:
            claims[one.claim] += 1
            if claims.total() <= SHOWN:
                small = claims[one.claim] == 1 and not large
                smaller = " ".join(shrunk(one.seed, one.claim)) if small else "--large" * bool(large)
                print(f"\n{one.detail}\n    python -m tests.simulation {one.seed} {smaller}".rstrip(), flush=True)
        if done % 1000 == 0 or done == count:
            seconds = time.monotonic() - began
            rate = f"{1000 * seconds / done:.1f} ms a seed"
            print(f"{done:,} of {count:,} seeds in {seconds:.0f} s ({rate}): {claims.total()} failed", flush=True)
    print(f"{events:,} events, {exchanges:,} exchanges, {one_sided} of them ended on one side, as a doubt may.")
    two, three = (sum(overlapping[most] for most in overlapping if most >= least) for least in (2, 3))
    print(f"{two:,} seeds had two overlapping mixes of one peer at once, {three:,} of them three.")
    for claim, times in claims.most_common():
        print(f"{times:8,}  {claim}")
    return claims.total()


def find(name: str, seeds: int = ENOUGH) -> Outcome | None:
    """Return the outcome of the first seed that shows a planted bug, or None."""
    with planted(name):  # unwatched: the bug's effects must show without the tables
        return next((one for one in (outcome(seed, watch=False) for seed in range(seeds)) if one.claim), None)


def find_all() -> int:
    missed = 0
    for name in MUTANTS:
        one = find(name)
        missed += one is None
        said = "not found" if one is None else f"{one.seed + 1:4} seeds: {one.claim}"
        print(f"{name:20} {said}", flush=True)
    return missed


def replay(seed: int, how: dict[str, Any], mutant: str) -> int:
    """Play one seed to its end, in words."""
    how["tell"] = print
    schedule = schedule_of(seed, **how)
    usual = Config()
    for field in dataclasses.fields(usual):
        value = getattr(schedule.config, field.name)
        if value != getattr(usual, field.name):
            print(f"{field.name} = {value!r}")
    if not mutant:
        with watched():
            schedule.play()
    else:
        with planted(mutant):
            schedule.play()
    print(f"All held: {schedule.world.events} events, {schedule.world.judge.done} exchanges.")
    return 0


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__.splitlines()[0])
    parser.add_argument("seed", nargs="?", type=int, help="play this one, in words")
    parser.add_argument("--seeds", type=int, default=0, help="how many to play")
    parser.add_argument("--from", type=int, default=0, dest="first", help="the first of them")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--mutants", action="store_true", help="look for each planted bug")
    parser.add_argument("--mutant", default="", choices=["", *MUTANTS], help="play the one seed with this bug planted")
    parser.add_argument("--peers", type=int, help="of the one seed: no more than so many")
    parser.add_argument("--seconds", type=float, help="of the one seed: faults for no longer")
    parser.add_argument("--honest", action="store_true", help="of the one seed: without its liars")
    parser.add_argument("--apart", action="store_true", help="of the one seed: as it was before mixes were to overlap")
    parser.add_argument(
        "--large", action=argparse.BooleanOptionalAction, help="hundreds of peers, or hours, in each; or in none"
    )
    asked = parser.parse_args()
    if asked.mutants:
        sys.exit(1 if find_all() else 0)
    if asked.seed is None:
        sys.exit(1 if explore(asked.first, asked.seeds or 1000, asked.processes, asked.large) else 0)
    how = {"peers": asked.peers, "seconds": asked.seconds, "liars": False if asked.honest else None}
    how["large"] = asked.large
    how["overlaps"] = not asked.apart
    sys.exit(replay(asked.seed, how, asked.mutant))
