"""The aims of the accelerator's measurements."""

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
