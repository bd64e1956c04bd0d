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
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from gossip.errors import LocalError
from sim.report.plots import COLOURS, GRID, INK, MUTED, SHADE, Panel, cuts, panels_of
from sim.report.result import Result
from sim.report.units import time_axis

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


__all__ = [
    "PANEL_INCHES",
    "draw",
    "require_matplotlib",
    "save",
    "save_all",
    "side_by_side",
    "single",
    "styled",
    "svg_of",
]

CSS_VARIABLES = {INK: "ink", MUTED: "muted", GRID: "grid", SHADE: "shade"} | {
    light: f"s{number}" for number, (light, _) in enumerate(COLOURS)
}

PANEL_INCHES = (4.0, 2.6)  # At 72 points an inch; a phone shows it at about that size.


def require_matplotlib() -> None:
    """Raise :class:`LocalError`, saying what to install, if matplotlib is missing."""
    if importlib.util.find_spec("matplotlib") is None:
        raise LocalError("Reports are drawn with matplotlib, which is missing: pip install 'gossip-trainer[sim]'.")


# -- pictures ----------------------------------------------------------------------------------------------------------
def draw(results: Sequence[Result], panel: Panel | None = None, *, key: bool = True) -> Figure:
    """Return a figure of one panel, or of all panels with their titles. ``key`` adds the key of the curves to one."""
    with styled():
        return draw_all(results) if panel is None else draw_one(results, panel, key)


def draw_one(results: Sequence[Result], panel: Panel, key: bool) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=PANEL_INCHES, layout="constrained")
    axes = figure.subplots()
    paint(axes, panel, results)
    if len(results) == 1:  # Keep room for the key in every panel, so that the panels of a page align.
        cast(Any, figure.get_layout_engine()).set(rect=(0, 0, 1, 0.93))
    if key and len(results) > 1:
        figure.legend(*axes.get_legend_handles_labels(), loc="outside upper left", ncols=2)
    return figure


def draw_all(results: Sequence[Result]) -> Figure:
    from matplotlib.figure import Figure

    panels = panels_of(results)
    columns = min(3, len(panels))
    rows = math.ceil(len(panels) / columns)
    figure = Figure(figsize=(PANEL_INCHES[0] * columns, (PANEL_INCHES[1] + 0.25) * rows + 0.5), layout="constrained")
    cast(Any, figure.get_layout_engine()).set(w_pad=0.12, h_pad=0.1)
    all_axes = np.atleast_1d(figure.subplots(rows, columns)).ravel()
    for axes, panel in zip(all_axes, panels, strict=False):
        paint(axes, panel, results)
        axes.set_title(panel.title, loc="left", color=INK, pad=22 if len(results) == 1 else 6)
    for axes in all_axes[len(panels) :]:
        axes.set_axis_off()
    if len(results) == 1:
        figure.suptitle(str(results[0].summary["name"]), x=0.01, ha="left", color=INK, size=13)
    else:
        handles = all_axes[0].get_legend_handles_labels()
        figure.legend(*handles, loc="outside upper left", ncols=min(6, len(results)))
    return figure


def paint(axes: Axes, panel: Panel, results: Sequence[Result]) -> None:
    """Draw one panel onto axes, with the key above it if a single result has several curves."""
    from matplotlib.ticker import MaxNLocator

    has_several = len(results) > 1
    draw_on = panel.draw_several if has_several and panel.draw_several is not None else panel.draw
    draw_on(axes, results)
    if panel.about_time:
        last_s = max((float(each.column("virtual_s").max(initial=0.0)) for each in results), default=0.0)
        divisor, unit = time_axis(last_s)
        axes.set_xlim(0, last_s / divisor if last_s > 0 else 1)
        axes.set_xlabel(f"virtual time ({unit})")
        axes.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
        for cut in cuts(results):
            axes.axvspan(cut.at_s / divisor, min(cut.until_s, last_s) / divisor, color=SHADE, linewidth=0, zorder=0)
    if not has_several and len(axes.get_legend_handles_labels()[0]) > 1:
        # Keep it out of the layout: it may be wider than the axes, which would be narrowed to it.
        axes.legend(loc="lower left", bbox_to_anchor=(-0.02, 0.98), ncols=4).set_in_layout(False)


def single(draw_on: Callable[[Axes], None]) -> Figure:
    """Return a figure of one panel that a function draws."""
    from matplotlib.figure import Figure

    with styled():
        figure = Figure(figsize=PANEL_INCHES, layout="constrained")
        draw_on(figure.subplots())
        return figure


def side_by_side(pictures: Sequence[tuple[str, Callable[[Axes], None]]], labels: Sequence[str]) -> Figure:
    """Return a figure of titled panels in a row, with a key if there is more than one label."""
    from matplotlib.figure import Figure

    with styled():
        figure = Figure(figsize=(PANEL_INCHES[0] * len(pictures), PANEL_INCHES[1] + 0.4), layout="constrained")
        cast(Any, figure.get_layout_engine()).set(w_pad=0.12)
        panels = np.atleast_1d(figure.subplots(1, len(pictures)))
        for axes, (title, draw_on) in zip(panels, pictures, strict=True):
            draw_on(axes)
            axes.set_title(title, loc="left", color=INK)
        if len(labels) > 1:
            figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper left", ncols=min(6, len(labels)))
        return figure


def save(figure: Figure, path: Path) -> None:
    """Write a picture of the kind that the suffix names (png, svg, pdf). Raises :class:`LocalError` if it cannot."""
    with styled():
        try:
            figure.savefig(path, dpi=160, metadata={"Date": None} if path.suffix == ".svg" else None)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or "name a .png or a .svg file"
            raise LocalError(f"The picture {path} cannot be written: {reason}.") from None


def save_all(results: Sequence[Result], folder: Path) -> None:
    """Write a PNG of each panel, named after it, and curves.png with all of them."""
    save(draw(results), folder / "curves.png")
    for panel in panels_of(results):
        save(draw(results, panel), folder / f"{panel.name}.png")


def svg_of(figure: Figure, label: str, *, themed: bool = True) -> str:
    """Return a figure as an ``<svg>`` element.

    With ``themed`` its colours are the CSS variables that :mod:`sim.report.html` defines; otherwise they are those of a
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
