"""Play the fuzzer: ``python -m tests.fuzz --inputs 10000000``, or one again with ``--target T --seed S --input N``."""

import argparse
import multiprocessing
import time
from itertools import count

from tests.fuzz import files, settings, vectors, wire
from tests.fuzz.engine import LIMIT_S, Figures, Target, play, play_life

TARGETS: dict[str, type[Target]] = {
    target.name: target
    for target in (
        wire.Prefixes, wire.Frames, wire.Headers, wire.Records, wire.Layouts, wire.Messages, wire.Statuses,
        files.Books, files.Keys, files.Secrets, files.Invites, files.Checkpoints, files.Timelines,
        settings.Configs, settings.Tomls, settings.Scenarios, settings.Parts, settings.Addresses, settings.Graphs,
        vectors.Payloads, vectors.Chunks, vectors.Certificates, vectors.Handshakes, vectors.SealedRecords,
    )
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--inputs", type=int, default=100_000, help="of all targets together")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=multiprocessing.cpu_count())
    parser.add_argument("--target", choices=sorted(TARGETS), action="append", help="this one alone; may be repeated")
    parser.add_argument("--input", type=int, help="play this input of --target, with what its life had before it")
    args = parser.parse_args()
    if args.input is not None:
        return replay(TARGETS[(args.target or ["frames"])[0]], args.seed, args.input)
    names = args.target or list(TARGETS)
    began = time.monotonic()
    jobs = max(1, args.jobs)
    tasks = [(name, args.seed, inputs_of(name, names, args.inputs), job, jobs) for name in names for job in range(jobs)]
    totals = {name: Figures() for name in names}
    with multiprocessing.get_context("spawn").Pool(jobs, maxtasksperchild=1) as pool:
        for name, figures in pool.imap_unordered(work, tasks):
            totals[name].add(figures)
            print(row(name, totals[name]), flush=True)  # for who interrupts it; the table comes at the end
            for find in figures.finds.values():
                print(f"\n{find.target}: an input {find.what}\n{find.detail}\nreplay: {find.replay}\n", flush=True)
    print(table(totals, time.monotonic() - began, args.seed))
    return 1 if any(figures.finds for figures in totals.values()) else 0


def inputs_of(name: str, names: list[str], inputs: int) -> int:
    """Return the number of inputs of one target by its share; the last target gets the rounding remainder."""
    whole = sum(TARGETS[one].share for one in names)
    shares = {one: int(inputs * TARGETS[one].share / whole) for one in names}
    return shares[name] + (inputs - sum(shares.values()) if name == names[-1] else 0)


def work(task: tuple[str, int, int, int, int]) -> tuple[str, Figures]:
    """Play every ``jobs``-th life of a target, with the inputs that fall to this job."""
    name, seed, inputs, job, jobs = task
    mine = inputs // jobs + (job < inputs % jobs)
    return name, play(TARGETS[name], seed, count(job, jobs), mine)


def replay(target: type[Target], seed: int, number: int) -> int:
    life, place = divmod(number, target.life)
    figures = Figures(inputs=1)  # The first input of Figures is traced, which would slow it.
    play_life(target, seed, life, place + 1, figures)
    for find in figures.finds.values():
        print(f"{find.target} input {find.number} {find.what}\n{find.detail}")
    if not figures.finds:
        print(f"{target.name} input {number}: nothing is wrong with it, slowest {1e3 * figures.slowest_s:.1f} ms.")
    return 1 if figures.finds else 0


def table(totals: dict[str, Figures], seconds: float, seed: int) -> str:
    """Return the table of docs/fuzzing.md in Markdown."""
    lines = [
        "| target | inputs | refused | seconds | slowest ms | peak of one input, KiB | process grew, MiB | finds |",
        "|---|---|---|---|---|---|---|---|",
    ]
    whole = Figures()
    for figures in totals.values():
        whole.add(figures)
    lines += [row(name, figures) for name, figures in [*totals.items(), ("all", whole)]]
    slow = f"over {1e3 * LIMIT_S:.0f} ms is one"
    said = f"{whole.inputs:,} inputs, seed {seed}, {seconds:.0f} s, {len(whole.finds)} finds ({slow})."
    return "\n".join([*lines, "", said])


def row(name: str, one: Figures) -> str:
    return (
        f"| {name} | {one.inputs:,} | {one.refused:,} | {one.seconds:.0f} | {1e3 * one.slowest_s:.1f} "
        f"| {one.peak_bytes / 1024:.0f} | {one.grown_bytes / (1 << 20):.0f} | {len(one.finds)} |"
    )
