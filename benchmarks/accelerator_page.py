"""The aims of the accelerator's measurements, and the page of their figures."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

COPY_SHARE = 0.8  # Of the limit of page-locked copies.
LOST = 0.01
MEMORY_BYTES = 256 << 20
POINTS = 0.5
LOSS = 0.01  # Of the CPU's loss.
PACE = 0.9  # Of the steps a second without a swarm.

Figure = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Aim:
    """An aim, the figure that was found, and whether it is met; both None if it was not measured."""

    aim: str
    found: str | None
    met: bool | None

    def row(self) -> dict[str, Any]:
        return asdict(self)


def aims(figures: Sequence[Figure]) -> list[Aim]:
    """Judge the figures of all parts; those of parts that failed are missing."""
    return [*copied(figures), *mixed(figures), *equal(figures)]


def aim(text: str, value: float | None, met: Callable[[float], bool], form: str) -> Aim:
    return Aim(text, None, None) if value is None else Aim(text, form.format(value), met(value))


def select(figures: Iterable[Figure], figure: str, **values: Any) -> list[Figure]:
    """Return the figures of this kind that have these values."""
    wanted = {"figure": figure, **values}
    return [candidate for candidate in figures if all(candidate[name] == value for name, value in wanted.items())]


def largest(figures: Sequence[Figure]) -> list[Figure]:
    """Return those of the largest model."""
    most = max((figure["parameters"] for figure in figures), default=0)
    return [figure for figure in figures if figure["parameters"] == most]


def copied(figures: Sequence[Figure]) -> list[Aim]:
    judged = []
    limits = next(iter(select(figures, "limits")), None)
    wanted = [("snapshot", "down", "float32"), ("addition", "up", "float32"), ("snapshot", "down", "bfloat16")]
    for operation, direction, dtype in wanted:
        rates = [row["rate_gb_s"] for row in largest(select(figures, "boundary", operation=operation, dtype=dtype))]
        share = rates[0] / limits[f"{direction}_gb_s"] if rates and limits else None
        text = f"{operation} of the largest model, {dtype}, at {COPY_SHARE} of the limit of page-locked copies"
        judged.append(aim(text, share, lambda share: share >= COPY_SHARE, "{:.2f}"))
    return judged


def mixed(figures: Sequence[Figure]) -> list[Aim]:
    rows = select(figures, "nodes")
    waits = sum(row["waits"] for row in rows) if rows else None
    judged = [aim("no wait of the host for the device at a mix", waits, lambda count: count == 0, "{:.0f}")]
    large = largest(rows)
    rare = [row for row in large if row["every"] == max(row["every"] for row in large)]
    lost = next((row["lost"] for row in rare if not row["settings"]), None)
    text = f"at most {LOST:.0%} of the step time lost with the rarer mixes, largest model"
    judged.append(aim(text, lost, lambda share: share <= LOST, "{:.2%}"))
    for settings, name in (({}, "default settings"), ({"correction": 0.0}, "correction = 0")):
        taken = [row["memory_bytes"] for row in large if row["settings"] == settings]
        text = f"at most {MEMORY_BYTES >> 20} MiB of device memory beyond training, largest model, {name}"
        most = max(taken) / (1 << 20) if taken else None
        judged.append(aim(text, most, lambda size: size <= MEMORY_BYTES >> 20, "{:.0f} MiB"))
    return judged


def equal(figures: Sequence[Figure]) -> list[Aim]:
    scores = {swarm["swarm"]: swarm["score"] for swarm in select(figures, "equal")}

    def difference(swarm: str, reference: str) -> float | None:
        return scores[swarm] - scores[reference] if swarm in scores and reference in scores else None

    cpu, mixed = "digits, CPU", "digits, one GPU and two CPUs"
    behind = difference("GPT, GPU", "GPT, CPU")
    share = None if behind is None else behind / scores["GPT, CPU"]
    uneven = [node for swarm in select(figures, "equal") if swarm["swarm"] == mixed for node in swarm["nodes"]]
    paces = [node["together_steps_s"] / node["alone_steps_s"] for node in uneven]
    digits, form = difference("digits, GPU", cpu), "{:+.2f} points"
    return [
        aim(f"digits: a GPU's nodes at most {POINTS} points behind the CPU's", digits, enough, form),
        aim(f"GPT: a GPU's loss at most {LOSS:.0%} above the CPU's", share, lambda above: above <= LOSS, "{:+.2%}"),
        aim(f"digits: nodes of uneven pace at most {POINTS} points behind", difference(mixed, cpu), enough, form),
        aim(
            f"nobody waits: each uneven node takes {PACE} of its steps a second alone", min(paces, default=None),
            lambda pace: pace >= PACE, "{:.2f}",
        ),
    ]  # fmt: skip


def enough(points: float) -> bool:
    return points >= -POINTS


def shown(judged: Sequence[Aim]) -> str:
    """Return the aims as lines of text."""
    words = {True: "met", False: "MISSED", None: "not measured"}
    return "\n".join(f"{words[aim.met]:12}  {aim.aim}: {aim.found or '-'}" for aim in judged)


# -- the page ----------------------------------------------------------------------------------------------------------
def page(result: dict[str, Any]) -> str:
    """Return docs/results/accelerator.md for the figures of a real device."""
    figures = [figure for part in result["parts"].values() for figure in part["figures"]]
    machine = next(iter(select(figures, "machine")), {})
    about = ", ".join(f"{name} {value}" for name, value in machine.items() if name not in ("device", "date", "figure"))
    blocks = [
        "# On a GPU",
        f"{machine.get('device', 'An unknown device')}, {about}; {machine.get('date', 'no date')}. The heads of "
        "`benchmarks/accelerator.py` and `benchmarks/accelerator_equal.py` define the figures.",
        "```\nmake accelerator\n```",
        "## Aims",
        table(["aim", "found", ""], [[aim["aim"], aim["found"], WORDS[aim["met"]]] for aim in result["aims"]]),
        "## Parts",
        table(["part", "s", ""], [[name, part["seconds"], outcome(part)] for name, part in result["parts"].items()]),
        "## Copies",
        limits(figures),
        table(
            ["", "parameters", "type", "call, ms", "stall, ms", "GB/s", "bytes a parameter"],
            [[
                row["operation"], f"{row['parameters']:,}", row["dtype"], ms(row["call_s"]), ms(row["stall_s"]),
                f"{row['rate_gb_s']:.1f}", f"{row['bytes_a_parameter']:.2f}",
            ] for row in select(figures, "boundary")],
        ),
        "## Two nodes on one device",
        table(
            [
                "parameters", "a mix every", "settings", "step, ms", "without, ms", "lost", "mixes", "lost a mix, ms",
                "longest step(), ms", "MiB beyond training", "reserved, MiB", "waits",
            ],
            [[
                f"{row['parameters']:,}", row["every"], settings(row), ms(row["step_s"]),
                " and ".join(ms(without) for without in row["step_without_s"]), f"{row['lost']:.2%}", row["mixes"],
                ms(row["lost_a_mix_s"]), ms(row["longest_step_s"]), row["memory_bytes"] >> 20,
                row["reserved_bytes"] >> 20, row["waits"],
            ] for row in select(figures, "nodes")],
        ),
        "## Equal to the CPU",
        table(
            ["swarm", "accuracy, % (loss)", "node", "pause, ms", "steps/s alone", "in the swarm", "longest step(), ms"],
            [[
                row["swarm"], f"{row['score']:.2f}", node["device"], ms(node["pause_s"]),
                f"{node['alone_steps_s']:.1f}", f"{node['together_steps_s']:.1f}", ms(node["longest_step_s"]),
            ] for row in select(figures, "equal") for node in row["nodes"]],
        ),
    ]  # fmt: skip
    return "\n\n".join(blocks) + "\n"


WORDS = {True: "met", False: "**missed**", None: "not measured"}


def outcome(part: dict[str, Any]) -> str:
    counts = next(iter(select(part["figures"], "tests")), {})
    counted = ", ".join(f"{count} {word}" for word, count in counts.items() if word != "figure")
    return "; ".join(filter(None, ["done" if part["ok"] else f"failed: {part['reason'].splitlines()[0]}", counted]))


def limits(figures: Sequence[Figure]) -> str:
    rates = next(iter(select(figures, "limits")), None)
    if rates is None:
        return "The limits of page-locked copies were not measured."
    down, up = rates["down_gb_s"], rates["up_gb_s"]
    return f"Page-locked copies reach {down:.1f} GB/s from the device and {up:.1f} GB/s to it."


def settings(row: Figure) -> str:
    return ", ".join(f"{name} = {value:g}" for name, value in row["settings"].items()) or "default"


def ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1e3 * seconds:.2f}"


def table(heads: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(str('-' if cell is None else cell) for cell in line)} |" for line in lines)
