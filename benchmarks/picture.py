"""Draw a run: the loss of every node over time, the kill of the first node, and the joining of another one.

    python benchmarks/picture.py [--logs FOLDER] [--out docs/pictures/run.svg]

Without ``--logs`` the script stages ``gossip demo`` and draws that run, which takes about a minute. ``--logs`` names a
folder of node-*.jsonl, as ``gossip local --log-dir`` keeps it. The SVG plays the run again and again by itself; a
viewer without animation shows its last frame. It is written by hand: a plotting library would be the largest dependency
of the project, for one picture.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

HERE = Path(__file__).resolve().parent
WIDTH, LEFT, RIGHT = 860, 78, 92  # pixels, as all below
LOSS_TOP, LOSS_BOTTOM = 64, 312
LIVES_TOP, LIFE_HEIGHT = 372, 22
COLOURS = (
    "#0072b2",
    "#e69f00",
    "#009e73",
    "#d55e00",
    "#cc79a7",
    "#56b4e9",
    "#555555",
)  # told apart by the colour blind
NODES = 4  # nodes at the start, as in the demo; one more joins
MEAN_OF = 5  # rows: the loss is one batch of 16, and jumps
LEAD_S = 2.0  # shown part of the time in which the nodes wait for each other
PLAY_S, HOLD_S = 12.0, 4.0  # duration of the animation, and of its still end


@dataclass(frozen=True)
class Life:
    """One node from its first row to its last, in seconds since ``LEAD_S`` before the first loss of all nodes."""

    number: int
    begin_s: float
    end_s: float
    curve: list[tuple[float, float]]  # (seconds, loss)
    killed: bool  # its log breaks off
    accuracy: float | None

    @property
    def colour(self) -> str:
        return COLOURS[self.number % len(COLOURS)]


def stage(folder: Path) -> None:
    """Do what ``gossip demo`` does, and leave the logs in ``folder``."""
    from node.cli import demo
    from node.cli.local import Screen
    from node.local import LocalSwarm

    script = Path(shutil.copy(Path(demo.__file__).with_name("demo_job.py"), folder / "digits.py"))
    arguments = ["--samples", str(demo.SAMPLES), "--step-delay", str(demo.STEP_DELAY_S), "--members", str(NODES + 1)]
    with LocalSwarm(script, arguments, folder=folder) as swarm, Screen(swarm) as screen:
        staged = demo.Stage(swarm, screen)
        staged.play(nodes=NODES, limit_s=90)
        if staged.newcomer is None or staged.broken:
            raise SystemExit("The demo did not come to its end, so there is nothing to draw.")


def read(folder: Path) -> list[Life]:
    """Return the lives of the nodes whose logs are in ``folder``."""
    logs: dict[int, list[dict[str, Any]]] = {}
    for log in folder.glob("node-*.jsonl"):
        lines = log.read_text(encoding="utf-8").splitlines()
        logs[int(log.stem.removeprefix("node-"))] = [json.loads(line) for line in lines if line.endswith("}")]
    logs = {number: rows for number, rows in sorted(logs.items()) if rows}
    if not logs:
        raise SystemExit(f"{folder} holds no node-*.jsonl: name the folder given to gossip local --log-dir.")
    losses_at = [row["t"] for rows in logs.values() for row in rows if row["event"] == "progress" and row["loss"]]
    if not losses_at:
        raise SystemExit(f"No node in {folder} has told a loss, so there is nothing to draw.")
    begin = min(losses_at) - LEAD_S
    lives = []
    for number, rows in logs.items():
        figures = [(row["t"] - begin, row["loss"]) for row in rows if row["event"] == "progress" and row["loss"]]
        losses = [loss for _, loss in figures]
        means = [sum(part) / len(part) for i in range(len(losses)) if (part := losses[max(0, i - MEAN_OF + 1) : i + 1])]
        curve = list(zip((at for at, _ in figures), means, strict=True))
        killed = rows[-1]["event"] != "final"
        lives.append(
            Life(
                number,
                max(0.0, rows[0]["t"] - begin),
                rows[-1]["t"] - begin,
                curve,
                killed,
                accuracy_of(folder, number),
            )
        )
    return lives


def accuracy_of(folder: Path, number: int) -> float | None:
    """Return the accuracy that the demo's job printed last, or None if it printed none."""
    out = folder / f"node-{number}.out"
    lines = out.read_text(encoding="utf-8").splitlines() if out.exists() else []
    try:
        value = json.loads(lines[-1])["accuracy"] if lines else None
    except (ValueError, TypeError, KeyError):
        return None
    return float(value) if value is not None else None


def draw(lives: list[Life]) -> str:
    """Return the SVG's text."""
    last_s = max(life.end_s for life in lives)
    losses = [loss for life in lives for _, loss in life.curve]
    low, high = math.log10(min(losses)), math.log10(max(losses))

    def x(at_s: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * at_s / last_s

    def y(loss: float) -> float:
        return LOSS_BOTTOM - (LOSS_BOTTOM - LOSS_TOP) * (math.log10(loss) - low) / (high - low)

    lives_bottom = LIVES_TOP + LIFE_HEIGHT * len(lives)
    height = lives_bottom + 46
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        'font-family="system-ui, sans-serif" font-size="13" fill="#333">',
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        text(LEFT, 24, f"training loss of each node (one batch, mean of {MEAN_OF} readings a second apart)"),
        text(LEFT, LIVES_TOP - 14, "when each node lived, and its test accuracy at the end"),
    ]
    for loss in ticks(low, high):
        parts += [
            line(LEFT, y(loss), WIDTH - RIGHT, y(loss), "#e4e4e4"),
            text(LEFT - 8, y(loss) + 4, f"{loss:g}", "end"),
        ]
    step_s = 5 if last_s < 60 else 10
    for at_s in range(0, int(last_s) + 1, step_s):
        parts.append(line(x(at_s), LOSS_BOTTOM, x(at_s), LOSS_BOTTOM + 4, "#999999"))
        parts.append(text(x(at_s), lives_bottom + 18, f"{at_s} s", "middle"))
    for number, life in enumerate(lives):
        parts.append(text(LEFT - 8, LIVES_TOP + LIFE_HEIGHT * number + 16, f"node {life.number}", "end"))
    parts.append(line(LEFT, LOSS_BOTTOM, WIDTH - RIGHT, LOSS_BOTTOM, "#999999"))
    shown = "\n".join(of_life(life, number, x, y) for number, life in enumerate(lives))
    parts += [*curtain(x(last_s), height), '<g clip-path="url(#past)">', shown, "</g>"]
    gone = min((life.end_s for life in lives), default=last_s)
    for number, life in enumerate(lives):
        end = "killed" if life.killed else "" if life.accuracy is None else f"{life.accuracy:.1%}"
        label = text(x(life.end_s) + 8, LIVES_TOP + LIFE_HEIGHT * number + 16, end)
        parts.append(appearing(life.end_s / last_s, [label]))
        if life.killed:
            marks = marker(x(life.end_s), lives_bottom, f"node {life.number} killed (-9)", "end")
            parts.append(appearing(life.end_s / last_s, marks))
        elif life.begin_s > gone:
            marks = marker(x(life.begin_s), lives_bottom, f"node {life.number} joins", "start")
            parts.append(appearing(life.begin_s / last_s, marks))
    return "\n".join([*parts, "</svg>", ""])


def of_life(life: Life, number: int, x: Callable[[float], float], y: Callable[[float], float]) -> str:
    """Return the curve and the bar of one node."""
    points = " ".join(f"{x(at):.1f},{y(loss):.1f}" for at, loss in life.curve)
    top = LIVES_TOP + LIFE_HEIGHT * number
    return (
        f'<polyline points="{points}" fill="none" stroke="{life.colour}" stroke-width="2"/>\n'
        f'<rect x="{x(life.begin_s):.1f}" y="{top + 4}" width="{x(life.end_s) - x(life.begin_s):.1f}" '
        f'height="{LIFE_HEIGHT - 8}" rx="3" fill="{life.colour}"/>'
    )


def curtain(right: float, height: float) -> list[str]:
    """Return the clip path ``past``, which opens to the right while the run is played, and the line at its edge."""
    played = PLAY_S / (PLAY_S + HOLD_S)
    timing = f'keyTimes="0;{played:.3f};1" dur="{PLAY_S + HOLD_S:g}s" repeatCount="indefinite"'
    return [
        f'<clipPath id="past"><rect width="{WIDTH}" height="{height}">'
        f'<animate attributeName="width" values="{LEFT};{right:.1f};{right:.1f}" {timing}/></rect></clipPath>',
        f'<line x1="{right:.1f}" y1="{LOSS_TOP}" x2="{right:.1f}" y2="{height - 46}" stroke="#999999" opacity="0">'
        f'<animate attributeName="opacity" values="1;0;0" calcMode="discrete" {timing}/>'
        f'<animate attributeName="x1" values="{LEFT};{right:.1f};{right:.1f}" {timing}/>'
        f'<animate attributeName="x2" values="{LEFT};{right:.1f};{right:.1f}" {timing}/></line>',
    ]


def appearing(share: float, parts: list[str]) -> str:
    """Return a group that is hidden until ``share`` of the run (0 to 1) has been played."""
    at = min(share, 0.999) * PLAY_S / (PLAY_S + HOLD_S)
    timing = f'keyTimes="0;{at:.4f};1" dur="{PLAY_S + HOLD_S:g}s" repeatCount="indefinite"'
    return "\n".join(
        ["<g>", f'<animate attributeName="opacity" values="0;1;1" calcMode="discrete" {timing}/>', *parts, "</g>"]
    )


def marker(x: float, bottom: float, label: str, anchor: str) -> list[str]:
    """Return a dashed line through both halves, with its label above."""
    return [
        f'<line x1="{x:.1f}" y1="46" x2="{x:.1f}" y2="{bottom}" stroke="#333" stroke-dasharray="4 4"/>',
        text(x + (-6 if anchor == "end" else 6), 50, label, anchor),
    ]


def text(x: float, y: float, words: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'


def line(x1: float, y1: float, x2: float, y2: float, colour: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}"/>'


def ticks(low: float, high: float) -> list[float]:
    """Return 1, 2 and 5 times the powers of ten within [10**low, 10**high]."""
    powers = range(math.floor(low), math.ceil(high) + 1)
    values = [digit * 10.0**power for power in powers for digit in (1, 2, 5)]
    return [value for value in values if low <= math.log10(value) <= high]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--logs", type=Path, help="a folder of node-*.jsonl; without it the demo is staged")
    parser.add_argument("--out", type=Path, default=HERE.parent / "docs" / "pictures" / "run.svg")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="gossip-picture-") as name:
        folder = args.logs or Path(name)
        if args.logs is None:
            stage(folder)
        picture = draw(read(folder))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(picture, encoding="utf-8")
    print(f"wrote {args.out}")


if __name__ == "__main__":
    main()
