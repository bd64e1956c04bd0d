"""Four distant nodes: their use of the links, and their time to accuracy, compared with other libraries.

    sudo .venv/bin/python benchmarks/wan.py [--hivemind PYTHON] [--json wan.json]

Needs root, gcc and /dev/net/tun. Four network namespaces are joined by the router of ``benchmarks/replay``: 25 ms one
way, 100 Mbit/s each way, 1 % of packets lost. A run in which more than one packet in twenty came over 5 ms late is
"disturbed" by this machine. It is repeated (``--again``), and left out of the median if there are others.

**link**: our nodes mix whenever they can, for ``--seconds``, alternating with raw streams: two pairs of nodes with a
connection each, in both directions at once. *Used* is the vector bytes that a node received a second, in exchanges that
finished. *Within a stream* is the same during exchanges, with their commits.

**digits**: seconds until the mean accuracy of all four on the test images is 80, 90 and 95 %. They count from the first
step of any node, and from the start of the processes. All train the same job (``benchmarks/peers/wan_job.py``): steps
of 0.1 s, the same batches and initial weights, SGD at one rate, and a model padded to 1 and to 10 MB. Our nodes mix
every 8 steps. DDP over gloo averages gradients at each step. Hivemind averages parameters in the background. "alone"
are nodes without averaging, which shows what it adds. A target that is not reached within ``--limit-s`` after the start
of the processes counts as missed: nothing is extrapolated.

Three rounds of all take some 80 minutes. A round of links takes 4 minutes (65 s, and 15 s more for each size). A round
of digits takes 9 minutes at 1 MB and 15 at 10 MB, mostly for DDP. ``--limit-s`` and ``--peers`` reduce this.

hivemind needs an environment of its own (1.2 GB), whose Python ``--hivemind`` names:

    python3 -m venv DIR
    DIR/bin/pip install -c constraints.txt torch==2.13.0 scikit-learn hivemind==1.1.12
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from links import connected
from swarm_lab import Patient

from benchmarks.replay.links import DISTURBED, EmulatedLinks, missing

PEERS = Path(__file__).resolve().parent / "peers"
NODES, LATENCY_S, MBIT_S, LOSS = 4, 0.025, 100.0, 0.01
RATE = 0.4  # the rate of 0.1, 0.2, 0.4 and 0.8 at which DDP's batches of 32 reach 80 % first
TARGETS = (0.8, 0.9, 0.95)
BEGIN_S = 120.0  # limit for all of our nodes to start training
WARM_S = 5.0  # time for streams to reach their rate
KINDS = {  # the program, the congestion control of every connection, steps from one average to the next
    "gossip": ("wan_gossip.py", "bbr", 8),
    "alone": ("wan_alone.py", "bbr", 0),
    "DDP bbr": ("wan_ddp.py", "bbr", 1),
    "DDP cubic": ("wan_ddp.py", "cubic", 1),
    "hivemind": ("wan_hivemind.py", "bbr", 128),  # Among 16, 32, 64 and 128 this interval stalls least.
}


@contextmanager
def far_apart(congestion: str, seed: int) -> Iterator[EmulatedLinks]:
    with EmulatedLinks(NODES, seed) as links:
        links.rate(-1, MBIT_S, MBIT_S)
        links.latency(-1, -1, LATENCY_S)
        links.loss(-1, -1, LOSS)
        for node in range(NODES):
            links.congestion(node, congestion)
        yield links


class Swarm:
    """The four processes of a run and their diaries: ``with Swarm(...) as swarm``.

    They start at once. At the end they are killed, with all processes that they have started.
    """

    def __init__(
        self, links: EmulatedLinks, python: str, program: str, every: int, megabytes: float, step_s: float
    ) -> None:
        self.links, self.program = links, program
        self.command = [
            python, str(PEERS / program), f"--ranks={NODES}", f"--first={links.address(0)}", f"--every={every}",
            f"--megabytes={megabytes}", f"--rate={RATE}", f"--step-s={step_s}",
        ]  # fmt: skip
        self.nodes: list[Patient] = []

    def __enter__(self) -> Swarm:
        self.room = tempfile.TemporaryDirectory(prefix="gossip-wan-", ignore_cleanup_errors=True)
        self.folder = Path(self.room.name)
        self.started = time.monotonic()
        for rank in range(NODES):
            command = [
                *self.command, f"--rank={rank}", f"--address={self.links.address(rank)}", f"--folder={self.folder}",
            ]  # fmt: skip
            errors = self.folder / f"{rank}.txt"
            with errors.open("wb") as output:
                process = self.links.start(rank, command, stdout=output, stderr=output)
            self.nodes.append(Patient(self.program, process, self.folder / f"{rank}.jsonl", errors))
        return self

    def __exit__(self, *exception: object) -> None:
        for node in self.nodes:
            os.killpg(node.process.pid, signal.SIGKILL)  # each process leads a session
            node.process.wait()
        self.room.cleanup()

    @property
    def rows(self) -> list[list[dict[str, Any]]]:
        """Return the rows of each diary so far."""
        for node in self.nodes:
            if node.process.poll() is not None:
                output = node.errors.read_text(errors="replace").strip()
                sys.exit(f"wan: {node.name} ended by itself: {output[-2_000:] or 'it said nothing'}")
        return [node.read() for node in self.nodes]

    def times(self, kind: str) -> list[float]:
        return [row["at"] for rows in self.rows for row in rows if row["kind"] == kind]

    def accuracies(self) -> list[tuple[float, float]]:
        """Return (time, mean of the four latest accuracies), from when all four have measured one."""
        looks = sorted(
            (row["at"], rank, row["accuracy"])
            for rank, rows in enumerate(self.rows) for row in rows if row["kind"] == "look"
        )  # fmt: skip
        latest: dict[int, float] = {}
        means = []
        for at, rank, accuracy in looks:
            latest[rank] = accuracy
            if len(latest) == NODES:
                means.append((at, statistics.mean(latest.values())))
        return means

    def steps(self) -> int:
        """Return the smallest number of steps of a node."""
        return min(max((row["steps"] for row in rows if row["kind"] == "look"), default=0) for rows in self.rows)


# -- time to accuracy ------------------------------------------------------------------------------------------------
def race(kind: str, python: str, megabytes: float, limit_s: float, step_s: float, seed: int) -> dict[str, Any]:
    """Run one library until the last target or the limit."""
    program, congestion, every = KINDS[kind]
    with far_apart(congestion, seed) as links, Swarm(links, python, program, every, megabytes, step_s) as swarm:
        before, until = links.stats(), swarm.started + limit_s
        while time.monotonic() < until and max((mean for _, mean in swarm.accuracies()), default=0.0) < TARGETS[-1]:
            time.sleep(0.5)
        late = links.stats().late_since(before)
        curve = [(at - swarm.started, mean) for at, mean in swarm.accuracies() if at <= until]
        began_s = min(swarm.times("begins"), default=math.inf) - swarm.started
        ended_s = curve[-1][0] if curve else math.nan
        return {
            "began_s": began_s, "steps": swarm.steps(),
            "step_s": (ended_s - began_s) / swarm.steps() if swarm.steps() else math.nan,
            "reached": max((mean for _, mean in curve), default=0.0),
            "seconds": {str(goal): next((at for at, mean in curve if mean >= goal), math.inf) for goal in TARGETS},
            "late": late, "disturbed": late > DISTURBED,
        }  # fmt: skip


# -- use of the links ------------------------------------------------------------------------------------------------
def gossip_link(seconds: float, step_s: float, megabytes: float, seed: int) -> dict[str, Any]:
    """Measure our nodes, with a mix wanted at every step."""
    program, congestion, _ = KINDS["gossip"]
    with (
        far_apart(congestion, seed) as links,
        Swarm(links, sys.executable, program, 1, megabytes, step_s) as swarm,
    ):  # fmt: skip
        until = time.monotonic() + BEGIN_S
        while len(swarm.accuracies()) == 0:
            if time.monotonic() > until:
                sys.exit(f"wan: not all of ours trained within {BEGIN_S:g} s: try a quiet machine.")
            time.sleep(0.2)
        time.sleep(WARM_S)
        before, begin = links.stats(), time.monotonic()
        time.sleep(seconds)
        late, end = links.stats().late_since(before), time.monotonic()
        time.sleep(1.0)  # exchanges that have ended are then in the diaries
        moved = streaming = 0.0  # bytes and seconds of all four nodes
        failed = 0
        for rows in swarm.rows:
            began: dict[int, float] = {}
            spans = []
            for row in rows:
                if row["kind"] == "exchange.begun":
                    began[row["session"]] = row["at"]
                elif row["kind"] == "exchange.done" and row["session"] in began:
                    since = began.pop(row["session"])
                    within = max(0.0, min(end, row["at"]) - max(begin, since))
                    moved += row["received"] * within / (row["at"] - since)
                    spans.append((max(begin, since), min(end, row["at"])))
                elif row["kind"] == "exchange.failed":
                    failed += begin <= row["at"] <= end
                    began.pop(row["session"], None)
            covered_until = begin  # Spans may overlap; their union counts.
            for since, until in sorted(spans):
                streaming += max(0.0, until - max(since, covered_until))
                covered_until = max(covered_until, until)
        share = streaming / NODES / (end - begin)
        used = moved / NODES / (end - begin)
        return {
            "mb_s": used / 1e6, "streaming": share,
            "within_mb_s": used / max(share, 1e-9) / 1e6, "failed": failed, "late": late, "disturbed": late > DISTURBED,
        }  # fmt: skip


def raw_link(seconds: float, seed: int) -> dict[str, Any]:
    """Measure raw streams: two pairs with a connection each, in both directions at once."""
    with far_apart("bbr", seed) as links:
        ends = [end for pair in ((0, 1), (2, 3)) for end in connected(links, *pair)]
        received, over = [0] * NODES, threading.Event()

        def send(end: Any) -> None:
            piece = bytes(1 << 18)
            while not over.is_set():
                end.sendall(piece)

        def receive(number: int) -> None:
            buffer = bytearray(1 << 18)
            while not over.is_set():
                received[number] += ends[number].recv_into(buffer)

        threads = [threading.Thread(target=send, args=(end,), daemon=True) for end in ends]
        threads += [threading.Thread(target=receive, args=(number,), daemon=True) for number in range(NODES)]
        for thread in threads:
            thread.start()
        time.sleep(WARM_S)
        before, begin, so_far = links.stats(), time.monotonic(), sum(received)
        time.sleep(seconds)
        moved, lasted = sum(received) - so_far, time.monotonic() - begin
        late = links.stats().late_since(before)
        over.set()
        for thread in threads:
            thread.join()
        for end in ends:
            end.close()
        return {"mb_s": moved / NODES / lasted / 1e6, "late": late, "disturbed": late > DISTURBED}


# -- rounds ----------------------------------------------------------------------------------------------------------
Runs = list[dict[str, Any]]


def in_turn(
    rounds: int, again: int, jobs: dict[str, Callable[[int], dict[str, Any]]], found: dict[str, Runs],
    save: Callable[[], None],
) -> None:  # fmt: skip
    """Run each job once a round, and again if it was disturbed.

    Each run is added to ``found`` and saved at once, so that an interrupted benchmark keeps its finished runs.
    """
    for number in range(rounds):
        for name, job in jobs.items():
            for attempt in range(1 + again):
                run = job(1 + number + 1_000 * attempt)  # seed of the losses, the same for all jobs of a round
                found.setdefault(name, []).append(run)
                print(f"{name}: {sentence(run)}; {run['late']:.1%} late{', disturbed' * run['disturbed']}", flush=True)
                save()
                if not run["disturbed"]:
                    break


def sentence(run: dict[str, Any]) -> str:
    if "mb_s" in run:
        more = f", streaming {run['streaming']:.0%} of the time, {run['failed']} failed" if "streaming" in run else ""
        return f"{run['mb_s']:.2f} MB/s{more}"
    goals = [f"{float(goal):.0%} at {seconds:.1f} s" for goal, seconds in run["seconds"].items() if seconds < math.inf]
    best = f"best {run['reached']:.1%}, {run['steps']} steps, begun at {run['began_s']:.1f} s"
    return f"{', '.join(goals) or 'no target'}; {best}"


def counted(runs: Runs) -> Runs:
    """Return the runs that were not disturbed, or all runs if all were."""
    return [run for run in runs if not run["disturbed"]] or runs


def middle(runs: Runs, key: str) -> float:
    return statistics.median(run[key] for run in counted(runs))


def show_links(found: dict[str, Runs]) -> None:
    raw = middle(found["raw"], "mb_s")
    print(f"\nLinks of 12.5 MB/s, a mix wanted whenever there can be one; raw streams take {raw:.2f} MB/s each way\n")
    titles = "MB/s used", "of raw", "in a stream", "of raw", "streaming", "late", "runs"
    print(f"{'':8}" + "".join(f"{title:>13}" for title in titles))
    for name, runs in found.items():
        if name != "raw":
            used, within = middle(runs, "mb_s"), middle(runs, "within_mb_s")
            cells = [f"{used:.2f}", f"{used / raw:.2f}", f"{within:.2f}", f"{within / raw:.2f}"]
            cells += [f"{middle(runs, 'streaming'):.0%}", f"{middle(runs, 'late'):.1%}", str(len(counted(runs)))]
            print(f"{name:8}" + "".join(f"{cell:>13}" for cell in cells))


def show_races(megabytes: float, found: dict[str, Runs], limit_s: float) -> None:
    print(f"\nDigits, a model of {megabytes:g} MB: seconds from the first step (from the processes' start), medians\n")
    print(f"{'':11}" + "".join(f"{goal:>24.0%}" for goal in TARGETS) + f"{'s a step':>10}{'runs':>6}{'late':>7}")
    for kind, runs in found.items():
        cells = "".join(f"{cell:>24}" for cell in learned(counted(runs), limit_s))
        print(f"{kind:11}{cells}{middle(runs, 'step_s'):10.2f}{len(counted(runs)):6}{middle(runs, 'late'):7.1%}")


def learned(runs: Runs, limit_s: float) -> list[str]:
    cells = []
    for goal in map(str, TARGETS):
        whole = statistics.median(run["seconds"][goal] for run in runs)
        if math.isfinite(whole):
            seconds = [(run["seconds"][goal], run["began_s"]) for run in runs]
            trained = statistics.median(at - began if at < math.inf else math.inf for at, began in seconds)
            cells.append(f"{trained:.1f} ({whole:.1f})")
        else:
            best = statistics.median(run["reached"] for run in runs)
            cells.append(f"not within {limit_s:g} s ({best:.0%})")
    return cells


def written(value: Any) -> Any:
    """Convert a value for JSON; an infinite time or NaN becomes null."""
    if isinstance(value, dict):
        return {str(key): written(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [written(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=("link", "digits"), default=["link", "digits"])
    parser.add_argument("--rounds", type=int, default=3, help="each peer in turn")
    parser.add_argument("--megabytes", type=float, nargs="+", default=[1.0, 10.0])
    parser.add_argument("--seconds", type=float, default=60.0, help="of each run of the links")
    parser.add_argument("--limit-s", type=float, default=300.0, help="of each run of digits, from its processes' start")
    parser.add_argument("--peers", nargs="+", choices=KINDS, default=list(KINDS), help="for digits")
    parser.add_argument("--step-s", type=float, default=0.1)
    parser.add_argument("--again", type=int, default=1, help="times that a disturbed run is played again")
    parser.add_argument("--hivemind", metavar="PYTHON", help="of an environment with hivemind; left out without")
    parser.add_argument("--json", type=Path, help="a file of every run, beside the tables")
    args = parser.parse_args()
    if obstacle := missing():
        sys.exit(f"wan: {obstacle}")
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # Exiting also ends the peers.
    links: dict[str, Runs] = {}
    races: dict[float, dict[str, Runs]] = {}

    def save() -> None:
        if args.json is not None:
            found = written({"links": links, "digits": races})
            args.json.parent.mkdir(parents=True, exist_ok=True)
            args.json.write_text(json.dumps(found, indent=1, allow_nan=False) + "\n", encoding="utf-8")

    if "link" in args.parts:
        jobs = {"raw": partial(raw_link, args.seconds)}
        jobs |= {f"{size:g} MB": partial(gossip_link, args.seconds, args.step_s, size) for size in args.megabytes}
        in_turn(args.rounds, args.again, jobs, links, save)
        show_links(links)
    kinds = [kind for kind in args.peers if kind != "hivemind" or args.hivemind]
    for size in args.megabytes if "digits" in args.parts else ():
        pythons = {kind: args.hivemind if kind == "hivemind" else sys.executable for kind in kinds}
        jobs = {kind: partial(race, kind, pythons[kind], size, args.limit_s, args.step_s) for kind in kinds}
        in_turn(args.rounds, args.again, jobs, races.setdefault(size, {}), save)
        show_races(size, races[size], args.limit_s)


if __name__ == "__main__":
    main()
