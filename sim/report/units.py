"""Formatting of figures as text: seconds, bytes, shares and counts."""

from __future__ import annotations

import math
from typing import Any

__all__ = [
    "NOTHING",
    "bytes_axis",
    "bytes_text",
    "count_text",
    "duration_text",
    "figure_text",
    "number",
    "share_text",
    "time_axis",
]

NOTHING = "–"  # noqa: RUF001  a dash, where there is no figure
BYTES = (("B", 1.0), ("kB", 1e3), ("MB", 1e6), ("GB", 1e9), ("TB", 1e12), ("PB", 1e15))  # Decimal units, as for rates.
TIMES = (("ms", 1e-3), ("s", 1.0), ("min", 60.0), ("h", 3600.0), ("days", 86_400.0))
COUNTS = (("", 1.0), (" thousand", 1e3), (" million", 1e6), (" billion", 1e9))


def number(value: Any) -> float:
    """Return a summary's figure as a float, nan for null."""
    return math.nan if value is None else float(value)


def bytes_axis(largest: float) -> tuple[float, str]:
    """Return the divisor and unit of bytes that give short figures on an axis up to ``largest``."""
    divisor, unit = 1.0, "B"
    for name, size in BYTES:
        if largest >= size:
            divisor, unit = size, name
    return divisor, unit


def time_axis(largest_s: float) -> tuple[float, str]:
    """Return the divisor and unit of time that give short figures on an axis up to ``largest_s``."""
    divisor, unit = TIMES[0][1], TIMES[0][0]
    for name, size_s in TIMES:
        if largest_s >= (0.5 if name == "s" else 3.0) * size_s:
            divisor, unit = size_s, name
    return divisor, unit


def bytes_text(count: float) -> str:
    """Return a size like ``1.23 GB``."""
    if not math.isfinite(count):
        return NOTHING
    if count < 1000:
        return f"{count:.0f} B"
    unit, size = next((unit, size) for unit, size in reversed(BYTES) if count >= 0.9995 * size)
    return f"{three_digits(count / size)} {unit}"


def duration_text(seconds: float) -> str:
    """Return ``45 ms``, ``12.3 s``, ``2 min 5 s``, ``1 h 30 min``, ``2 days 3 h``: at most two parts."""
    if not math.isfinite(seconds):
        return NOTHING
    if seconds == 0:
        return "0 s"
    if seconds < 0.9995:
        return f"{three_digits(seconds * 1e3)} ms"
    if seconds < 59.95:
        return f"{three_digits(seconds)} s"
    if seconds < 3599.5:
        return parts(round(seconds), 60, "min", "s")
    if seconds < 86_370:
        return parts(round(seconds / 60), 60, "h", "min")
    hours = round(seconds / 3600)
    return parts(hours, 24, "day" if hours < 48 else "days", "h")


def parts(whole: int, size: int, large: str, small: str) -> str:
    many, few = divmod(whole, size)
    return f"{many} {large} {few} {small}" if few else f"{many} {large}"


def count_text(count: float) -> str:
    """Return ``12,345``, and from a million on ``1.23 million``."""
    if not math.isfinite(count):
        return NOTHING
    if abs(count) < 1e6:
        return f"{count:,.0f}" if abs(count) >= 100 or count == round(count) else f"{three_digits(count)}"
    word, size = next((word, size) for word, size in reversed(COUNTS) if abs(count) >= 0.9995 * size)
    return f"{three_digits(count / size)}{word}"


def share_text(share: float) -> str:
    """Return ``93.4 %``, with enough digits that no share below 1 is 100 % and none above 0 is 0 %."""
    if not math.isfinite(share):
        return NOTHING
    for digits in (1, 2, 3):
        text = f"{100 * share:.{digits}f}"
        if (float(text) < 100 or share >= 1) and (float(text) > 0 or share <= 0):
            break
    return f"{text} %"


def figure_text(value: float) -> str:
    """Return a number with three digits: ``0.0123``, ``4.56``, ``1.2e-09``."""
    return three_digits(value) if math.isfinite(value) else NOTHING


def three_digits(value: float) -> str:
    if value == 0:
        return "0"
    if not 1e-4 <= abs(value) < 1e6:
        return f"{value:.2g}"
    digits = max(0, 2 - math.floor(math.log10(abs(float(f"{value:.3g}")))))
    text = f"{value:,.{digits}f}"
    return text.rstrip("0").rstrip(".") if digits else text
