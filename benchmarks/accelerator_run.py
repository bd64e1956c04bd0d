"""All tests and measurements for a GPU in one command of at most 8 minutes: make accelerator.

    python -m benchmarks.accelerator_run [--simulated] [--only PART ...] [--json FILE]

The parts run one after the other. A part that fails or takes too long is reported, and the next one runs. On a GPU the
figures go to docs/results/accelerator.json. Without one, or with ``--simulated``, everything runs to its end on a
simulated device with tiny sizes, and writes nothing there.
docs/development.md#on-a-gpu says what a bare machine needs.

The exit code is 0 if every part ran and, on a GPU, every aim was met; 1 if a part failed; 2 if an aim was missed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.accelerator_aims import Aim, aims, shown

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "results"
TOTAL_S = 470.0
FIGURE = '{"figure": '  # The begin of a line that is a figure.
LAST_LINES = 15  # Of a part that failed, to be shown.
SLOWER = 10.0  # A simulated device may take so many times as long, on a busy machine.
END_S = 5.0  # For a part to end its own processes when it is told to.
SIMULATED = "These figures are of a simulated device and mean nothing for speed. Nothing is written to docs/results/."


@dataclass(frozen=True, slots=True)
class Part:
    """A command, and the most seconds that it may take on a GPU."""

    name: str
    limit_s: float
    command: Sequence[str]


def parts(simulated: bool) -> list[Part]:
    """Return all parts; their limits add up to the total."""
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    marked = [str(path) for path in files if "mark.cuda" in path.read_text(encoding="utf-8")]
    flag, mark = (["--simulated"], "cuda and not slow") if simulated else ([], "cuda")

    def ranks(count: int, backend: str, *options: str) -> list[str]:
        launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
        return [*launch, "-m", "benchmarks.accelerator_ranks", backend, *options, *flag]

    return [
        Part("tests", 80, ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", mark, *marked]),
        Part("one rank, NCCL", 35, ranks(1, "nccl")),
        Part("two ranks, gloo", 35, ranks(2, "gloo")),
        Part("sharded, NCCL", 30, ranks(1, "nccl", "--sharded")),
        Part("copies", 50, ["-m", "benchmarks.accelerator", "copies", *flag]),
        Part("nodes", 140, ["-m", "benchmarks.accelerator", "nodes", *flag]),
        Part("equal", 100, ["-m", "benchmarks.accelerator_equal", *flag]),
    ]


def run(part: Part, seconds: float, **environment: str) -> dict[str, Any]:
    """Run a part, and return its outcome with the figures that it printed, those before a failure included."""
    began, reason = time.monotonic(), ""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PYTHONPATH": path} | environment
    with tempfile.TemporaryFile("w+", encoding="utf-8") as out:
        command = [sys.executable, *part.command]
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=out, stderr=out, start_new_session=True)
        try:
            if process.wait(seconds):
                reason = f"exit code {process.returncode}"
        except subprocess.TimeoutExpired:
            reason = f"not done after {seconds:.0f} s"
        finally:
            end(process)
        out.seek(0)
        lines = [line.rstrip() for line in out]
    figures = [json.loads(line) for line in lines if line.startswith(FIGURE)]
    if part.name == "tests":
        counts = re.findall(r"(\d+) (passed|failed|skipped|errors?)\b", lines[-1] if lines else "")
        figures.append({"figure": "tests"} | {word: int(count) for count, word in counts})
    if reason:
        lines = [line for line in lines if line and not line.startswith(FIGURE)]
        reason += "".join(f"\n    {line}" for line in lines[-LAST_LINES:])
    return {"ok": not reason, "seconds": round(time.monotonic() - began, 1), "reason": reason, "figures": figures}


def end(process: subprocess.Popen[bytes]) -> None:
    """End a part's processes: torchrun's ranks have sessions of their own, which it ends when it is asked to."""
    for number, patience_s in ((signal.SIGTERM, END_S), (signal.SIGKILL, None)):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        try:
            process.wait(patience_s)
        except subprocess.TimeoutExpired:
            continue
        time.sleep(0.1)


def run_all(wanted: Sequence[Part], simulated: bool) -> dict[str, dict[str, Any]]:
    """Run all parts, and print the outcome of each."""
    slower, environment = (SLOWER, {"CUDA_VISIBLE_DEVICES": ""}) if simulated else (1.0, {})
    until, outcomes = time.monotonic() + TOTAL_S * slower, {}
    for part in wanted:
        left_s = max(1.0, until - time.monotonic())
        outcomes[part.name] = outcome = run(part, min(part.limit_s * slower, left_s), **environment)
        print(
            f"{part.name}, {outcome['seconds']} s: {'done' if outcome['ok'] else 'FAILED, ' + outcome['reason']}",
            flush=True,
        )
    return outcomes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--simulated", action="store_true", help="a simulated device, even where there is a real one")
    parser.add_argument("--only", action="append", metavar="PART", help="run one part; may be repeated")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to this file")
    arguments = parser.parse_args()
    simulated = arguments.simulated or not torch.cuda.is_available()
    if simulated and not arguments.simulated:
        print("There is no GPU here, so everything runs on a simulated device with tiny sizes.", flush=True)
    wanted = parts(simulated)
    unknown = set(arguments.only or ()) - {part.name for part in wanted}
    if unknown:
        parser.error(f"no part is called {unknown.pop()!r}: there are {', '.join(part.name for part in wanted)}")
    outcomes = run_all([part for part in wanted if not arguments.only or part.name in arguments.only], simulated)
    figures = [figure for outcome in outcomes.values() for figure in outcome["figures"]]
    judged = aims(figures)
    result = {"simulated": simulated, "parts": outcomes, "aims": [aim.row() for aim in judged]}
    print("", shown(judged), sep="\n")
    if simulated:
        print(f"\n{SIMULATED}")
    elif not arguments.only:
        (RESULTS / "accelerator.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        print("\nWritten: docs/results/accelerator.json, to be named in docs/results/README.md.")
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return code(outcomes, judged, simulated)


def code(outcomes: dict[str, dict[str, Any]], judged: Sequence[Aim], simulated: bool) -> int:
    """Return the exit code."""
    if not all(outcome["ok"] for outcome in outcomes.values()):
        return 1
    return 2 if not simulated and any(aim.met is False for aim in judged) else 0


if __name__ == "__main__":
    sys.exit(main())
