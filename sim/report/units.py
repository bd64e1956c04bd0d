"""Formatting of figures as text: seconds, bytes, shares and counts."""

import math
from typing import Any

ABSENT = "–"  # noqa: RUF001  The text for a figure that does not exist: a dash.
BYTES = (("B", 1.0), ("kB", 1e3), ("MB", 1e6), ("GB", 1e9), ("TB", 1e12), ("PB", 1e15))  # Decimal units, as for rates.
TIMES = (("ms", 1e-3), ("s", 1.0), ("min", 60.0), ("h", 3600.0), ("days", 86_400.0))
COUNTS = (("", 1.0), (" thousand", 1e3), (" million", 1e6), (" billion", 1e9))
# A text has three digits, so 999.5 kB would read "1000 kB". From this share of a unit on the text is in that unit.
MIN_SHARE_OF_UNIT = 0.9995
# In the same way durations go to the next unit where their rounded text would reach it.
MIN_SECONDS_S = 0.9995  # Below it: three digits of milliseconds.
MIN_MINUTES_S = 59.95  # Below it: three digits of seconds.
MIN_HOURS_S = 3599.5  # Below it: whole seconds.
MIN_DAYS_S = 86_370  # Below it: whole minutes; it is half a minute less than a day.
# An axis has the largest unit of which it shows this many. Seconds begin earlier: 0.5 s is shorter to read than 500 ms.
MIN_AXIS_UNITS, MIN_AXIS_SECONDS = 3.0, 0.5


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
    unit, divisor = TIMES[0]
    for name, size_s in TIMES:
        if largest_s >= (MIN_AXIS_SECONDS if name == "s" else MIN_AXIS_UNITS) * size_s:
            divisor, unit = size_s, name
    return divisor, unit


def bytes_text(count: float) -> str:
    """Return a size like ``1.23 GB``."""
    if not math.isfinite(count):
        return ABSENT
    if count < 1000:
        return f"{count:.0f} B"
    unit, size = next((unit, size) for unit, size in reversed(BYTES) if count >= MIN_SHARE_OF_UNIT * size)
    return f"{three_digits(count / size)} {unit}"


def duration_text(seconds: float) -> str:
    """Return ``45 ms``, ``12.3 s``, ``2 min 5 s``, ``1 h 30 min``, ``2 days 3 h``: at most two parts."""
    if not math.isfinite(seconds):
        return ABSENT
    if seconds == 0:
        return "0 s"
    if seconds < MIN_SECONDS_S:
        return f"{three_digits(seconds * 1e3)} ms"
    if seconds < MIN_MINUTES_S:
        return f"{three_digits(seconds)} s"
    if seconds < MIN_HOURS_S:
        return two_units(round(seconds), 60, "min", "s")
    if seconds < MIN_DAYS_S:
        return two_units(round(seconds / 60), 60, "h", "min")
    hours = round(seconds / 3600)
    return two_units(hours, 24, "day" if hours < 48 else "days", "h")


def two_units(count: int, count_per_large: int, large: str, small: str) -> str:
    """Return a count of the small unit as large and small ones: 125 s as ``2 min 5 s``, 120 s as ``2 min``."""
    many, few = divmod(count, count_per_large)
    return f"{many} {large} {few} {small}" if few else f"{many} {large}"


def count_text(count: float) -> str:
    """Return ``12,345``, and from a million on ``1.23 million``."""
    if not math.isfinite(count):
        return ABSENT
    if abs(count) < 1e6:
        return f"{count:,.0f}" if abs(count) >= 100 or count == round(count) else f"{three_digits(count)}"
    word, size = next((word, size) for word, size in reversed(COUNTS) if abs(count) >= MIN_SHARE_OF_UNIT * size)
    return f"{three_digits(count / size)}{word}"


def share_text(share: float) -> str:
    """Return ``93.4 %``, with up to three decimals so that a share below 1 is not 100 % and one above 0 is not 0 %."""
    if not math.isfinite(share):
        return ABSENT
    for decimals in (1, 2, 3):
        text = f"{100 * share:.{decimals}f}"
        looks_whole, looks_empty = float(text) >= 100, float(text) <= 0
        if (share >= 1 or not looks_whole) and (share <= 0 or not looks_empty):
            break
    return f"{text} %"


def figure_text(value: float) -> str:
    """Return a number with three digits, ``0.0123`` or ``4.56``; with two if it needs an exponent, ``1.2e-09``."""
    return three_digits(value) if math.isfinite(value) else ABSENT


def three_digits(value: float) -> str:
    """Return a finite number as :func:`figure_text` does, without zeros at the end of its decimals."""
    if value == 0:
        return "0"
    if not 1e-4 <= abs(value) < 1e6:
        return f"{value:.2g}"
    # Round before counting digits: 9.999 is 10.0, which has one decimal less than 9.99.
    rounded = abs(float(f"{value:.3g}"))
    decimals = max(0, 2 - math.floor(math.log10(rounded)))
    text = f"{value:,.{decimals}f}"
    return text.rstrip("0").rstrip(".") if decimals else text
