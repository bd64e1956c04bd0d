"""Charts: panels as picture files, and as SVG within a page. matplotlib is imported only when something is drawn."""

from __future__ import annotations

import importlib.util
import io
import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

import numpy as np

from gossip.errors import LocalError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# (on a white page, on a dark page): each has a contrast of 3 or more to the page. CIELAB distances are at least 25 with
# protanopia and deuteranopia, and 19 with tritanopia (simulated after Machado, Oliveira and Fernandes, 2009).
COLOURS = (
    ("#0067a9", "#4ea8e6"),
    ("#d55e00", "#f28e3c"),
    ("#2ba561", "#57fecf"),
    ("#c66e99", "#aa6c66"),
    ("#783a05", "#e1e993"),
    ("#538eff", "#abe1ff"),
)
DASHES = ("-", (0, (5, 2)), (0, (1.5, 1.5)), (0, (6, 2, 1.5, 2)))  # Used from the seventh curve on.
INK, MUTED, GRID, SHADE = "#1f2328", "#59636e", "#dfe3e8", "#eceff3"
CSS_VARIABLES = {INK: "ink", MUTED: "muted", GRID: "grid", SHADE: "shade"} | {
    light: f"s{number}" for number, (light, _) in enumerate(COLOURS)
}
PANEL_INCHES = (4.0, 2.6)  # At 72 points an inch; a phone shows it at about that size.
MIN_TICKS = 3  # The least ticks on a logarithmic axis, before more digits are used.
# Leading digits of ticks, from few to many.
TICK_DIGITS = ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 5, 7), (1, 1.2, 1.4, 1.6, 1.8, 2, 2.5, 3, 3.5, 4, 5, 6, 7, 8, 9))

Key = Literal["each", "once", ""]
"""The keys of a figure's curves: one in each panel with several curves, one for all panels, or none."""


class Panel(NamedTuple):
    """A picture that answers one question, readable at a phone's width; ``draw`` draws it on axes."""

    name: str  # Part of its file's name.
    title: str
    caption: str
    draw: Callable[[Axes], None]


def require_matplotlib() -> None:
    """Raise :class:`LocalError`, saying what to install, if matplotlib is missing."""
    if importlib.util.find_spec("matplotlib") is None:
        raise LocalError("Reports are drawn with matplotlib, which is missing: pip install 'gossip-trainer[sim]'.")


def draw(panels: Sequence[Panel], key: Key = "", *, titled: bool = True, heading: str = "") -> Figure:
    """Return a figure of panels in rows of up to three; a page has titles of its own, and asks for none."""
    from matplotlib.figure import Figure

    columns = min(3, len(panels))
    rows, (width, height) = math.ceil(len(panels) / columns), PANEL_INCHES
    size = (width * columns, (height + 0.25) * rows + 0.5) if titled else PANEL_INCHES
    with styled():
        figure = Figure(figsize=size, layout="constrained")
        layout: Any = figure.get_layout_engine()
        all_axes = np.atleast_1d(cast(Any, figure.subplots(rows, columns))).ravel()
        for axes, panel in zip(all_axes, panels, strict=False):
            panel.draw(axes)
            if key == "each" and len(axes.get_legend_handles_labels()[0]) > 1:
                # Keep it out of the layout: it may be wider than the axes, which would be narrowed to it.
                axes.legend(loc="lower left", bbox_to_anchor=(-0.02, 0.98), ncols=4).set_in_layout(False)
            if titled:
                axes.set_title(panel.title, loc="left", color=INK, pad=22 if key == "each" else 6)
        for axes in all_axes[len(panels) :]:
            axes.set_axis_off()
        if titled:
            layout.set(w_pad=0.12, h_pad=0.1)
        elif key == "each":  # Keep room for the key in every panel, so that the panels of a page align.
            layout.set(rect=(0, 0, 1, 0.93))
        if heading:
            figure.suptitle(heading, x=0.01, ha="left", color=INK, size=13)
        if key == "once":
            figure.legend(*all_axes[0].get_legend_handles_labels(), loc="outside upper left", ncols=2 * columns)
    return figure


def save(figure: Figure, path: Path) -> None:
    """Write a picture of the kind that the suffix names (png, svg, pdf). Raises :class:`LocalError` if it cannot."""
    with styled():
        try:
            figure.savefig(path, dpi=160, metadata={"Date": None} if path.suffix == ".svg" else None)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or "name a .png or a .svg file"
            raise LocalError(f"The picture {path} cannot be written: {reason}.") from None


def svg_of(figure: Figure, label: str, *, themed: bool = True) -> str:
    """Return a figure as an ``<svg>`` element.

    With ``themed`` its colours are the CSS variables that the page defines; otherwise they are those of a
    white page.
    """
    stream = io.StringIO()
    with styled():
        figure.savefig(stream, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = stream.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'<g id="[^"]*"', "<g", text)  # axes_1 in every panel would repeat the same id.
    text = re.sub(r"<!--.*?-->\s*", "", text, flags=re.DOTALL)
    text = re.sub(r"font: ([\d.]+px) [^;\"]*", r"font-size: \1", text)  # Use the page's own typeface.
    for colour, variable in CSS_VARIABLES.items() if themed else ():
        text = text.replace(colour, f"var(--{variable})")
    width, height = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', text).groups()  # type: ignore[union-attr]
    namespaces = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
    opening = f'<svg {namespaces} viewBox="0 0 {width} {height}"'
    return opening + f' role="img" aria-label="{escape(label)}"' + text[text.index(">") :].strip()


def line_of(number: int, label: str) -> dict[str, Any]:
    """Return the keywords of ``Axes.plot`` for one of several curves."""
    dash = DASHES[number // len(COLOURS) % len(DASHES)]
    return {"color": COLOURS[number % len(COLOURS)][0], "linestyle": dash, "label": label}


def plain_ticks(axes: Axes, low: float, high: float, which: str = "y") -> None:
    """Set round, written-out ticks on a logarithmic axis: powers of ten on a long axis, more digits on a short one."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    low, high = low / 1.15, high * 1.15
    powers = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 2)
    for digits in TICK_DIGITS:
        if sum(low <= digit * 10.0**power <= high for power in powers for digit in digits) >= MIN_TICKS:
            break
    axis = axes.xaxis if which == "x" else axes.yaxis
    axis.set_major_locator(FixedLocator([digit * 10.0**power for power in powers for digit in digits]))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    axis.set_minor_locator(NullLocator())
    (axes.set_xlim if which == "x" else axes.set_ylim)(low, high)


@contextmanager
def styled() -> Iterator[None]:
    """Apply our style while a figure is made or written; the user's own settings stay as they are."""
    import matplotlib as mpl

    style: Any = {
        "axes.edgecolor": MUTED, "axes.grid": True, "axes.grid.axis": "y", "axes.labelcolor": MUTED,
        "axes.labelsize": 8.5, "axes.linewidth": 0.6, "axes.spines.left": False, "axes.spines.right": False,
        "axes.spines.top": False, "axes.axisbelow": True, "axes.titlesize": 10.5, "axes.titleweight": "bold",
        "axes.facecolor": "none", "axes.labelpad": 4, "font.size": 8.5, "grid.color": GRID, "grid.linewidth": 0.6,
        "legend.borderaxespad": 0.2, "legend.columnspacing": 1.2, "legend.fontsize": 8.5, "legend.frameon": False,
        "legend.handlelength": 1.4, "legend.handletextpad": 0.5, "legend.labelcolor": INK, "lines.linewidth": 1.6,
        "lines.solid_capstyle": "round", "svg.fonttype": "none", "svg.hashsalt": "gossip", "text.color": INK,
        "xtick.color": MUTED, "xtick.labelcolor": MUTED, "xtick.major.size": 3, "xtick.major.width": 0.6,
        "xtick.minor.size": 0, "ytick.color": MUTED, "ytick.labelcolor": MUTED, "ytick.major.size": 0,
        "ytick.minor.size": 0, "font.family": ["DejaVu Sans"], "axes.formatter.useoffset": False,
    }  # fmt: skip
    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rcParams.update(style)
        yield
