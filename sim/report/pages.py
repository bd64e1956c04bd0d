"""The pages of a report, for one result, for several side by side, and for a sweep: page.html.jinja has their form."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from sim.report import charts, describe, plots
from sim.report.charts import COLOURS, GRID, INK, MUTED, SHADE, Key, Panel
from sim.report.figures import HISTORY
from sim.report.result import Result
from sim.report.units import ABSENT, bytes_text, count_text, duration_text, figure_text, share_text
from sim.scenario.scenario import Scenario

SHOWN_DIFFERENCES = 12  # Differing keys of scenarios; more would push the curves off the first screen.
UNIT = re.compile(r"(?<=\d) (?=(?:%|(?:ms|s|min|h|days?|[kMGTP]?B|Mbit/s|million|billion|of|to)\b))")


class FigureTable(NamedTuple):
    """A table of rows in groups, each group under its title. With ``coloured`` the columns are the page's curves."""

    heads: Sequence[str]
    groups: Mapping[str, Iterable[Sequence[str]]]
    coloured: bool = False


def page(panels: Sequence[Panel], key: Key, **parts: Any) -> str:
    """Return a self-contained HTML file: figures, pictures and tables, for light and dark themes and any width.

    Args:
        panels: The pictures.
        key: The keys within the pictures.
        **parts: The other variables of page.html.jinja, each of which may be left out.
    """
    import jinja2

    folder = jinja2.FileSystemLoader(Path(__file__).parent)
    environment = jinja2.Environment(loader=folder, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    # Numbers stay on one line with their units.
    environment.filters["units"] = lambda text: UNIT.sub("\N{NO-BREAK SPACE}", text)
    pictures = [
        (panel.title, panel.caption, charts.svg_of(charts.draw([panel], key, titled=False), panel.title))
        for panel in panels
    ]
    colours = {"colours": COLOURS, "ink": INK, "muted": MUTED, "grid": GRID, "shade": SHADE}
    return environment.get_template("page.html.jinja").render(colours, pictures=pictures, **parts)


def report(result: Result) -> str:
    """Return the page of one result."""
    summary, scenario = result.summary, result.scenario
    stopped = "" if summary["done"] == 1.0 else f", stopped after {share_text(summary['done'])}"
    return page(
        plots.panels_of([result]), "each", title=summary["name"], kind=f"Simulation, seed {summary['seed']}{stopped}",
        lead=[describe.in_words(scenario, result.fidelity), summary["no_exchange"]], headlines=headlines(result),
        notes=shading_note([result]),
        tables_below=[settings_table(result), FigureTable(("", ""), {"Cost": costs(result)})],
        rows=rows_table(result), scenario=scenario.to_toml(),
    )  # fmt: skip


def comparison(results: Sequence[Result]) -> str:
    """Return the page of several results: the same panels with a colour for each, and a table."""
    names = [str(result.summary["name"]) for result in results]
    different = describe.differences([result.scenario for result in results])
    keys = list(different)[:SHOWN_DIFFERENCES]
    left_out = len(different) - len(keys)
    columns = [result.figures() for result in results]
    heads = dict.fromkeys(head for figures in columns for head in figures)
    groups = {"At the end": [(head, *(figures.get(head, ABSENT) for figures in columns)) for head in heads]}
    if keys:
        groups["Where they differ"] = [(key, *different[key]) for key in keys]
    more = f"They differ in {left_out} more keys; each scenario.toml has all." if left_out else ""
    return page(
        plots.panels_of(results), "", kind="Simulations compared", names=names,
        title=" · ".join(names) if len(names) <= 4 else f"{len(names)} scenarios",
        tables_above=[FigureTable(("", *names), groups, coloured=True)], notes=[more, *shading_note(results)],
    )  # fmt: skip


def shading_note(results: Sequence[Result]) -> list[str]:
    """Return the note about shaded periods, if panels shade any."""
    return ["Shaded: while the network is cut."] if plots.cuts(results) else []


def headlines(result: Result) -> list[tuple[str, str, str]]:
    """Return the headline figures: name, figure with its unit, and a note."""
    summary, texts = result.summary, result.figures()
    accuracy, last = summary["accuracy"], result.history[-1] if result.history else {}

    def figure(name: str) -> str:
        return figure_text(last.get(name, math.nan))

    learned = []
    if "average model" in texts:
        spread = f"{share_text(accuracy['min'])} to {share_text(accuracy['max'])} over the peers"
        learned = [
            ("Accuracy, mean of peers", texts["accuracy, mean of peers"], spread),
            ("Accuracy, average model", texts["average model"], ""),
        ]
    sent_by_one = bytes_text(summary["bytes_sent"] / max(1, summary["peers"]))
    ready = count_text(last.get("ready", math.nan))
    return [
        *learned,
        ("Loss, mean of peers", texts["loss, mean of peers"], f"average model {figure('loss_average_model')}"),
        ("Consensus distance", texts["consensus distance"], "root mean square, from the average model"),
        ("Peers alive at the end", texts["alive at the end"], f"{ready} of them training"),
        ("Exchanges", texts["exchanges"], f"{texts['failed']} failed"),
        ("Sent", texts["sent"], f"{sent_by_one} a peer"),
        ("Virtual time", texts["virtual time"], f"{figure('mixes')} mixes and {figure('steps')} steps a peer"),
    ]


def costs(result: Result) -> list[tuple[str, str]]:
    """Return what the simulation cost, as names and figures."""
    summary = result.summary
    return [
        ("real time", duration_text(summary["wall_s"])),
        ("processor time", duration_text(summary["cpu_s"])),
        ("events", count_text(summary["events"])),
        ("node updates", count_text(summary["node_updates"])),
        ("updates per processor second", count_text(summary["updates_per_cpu_s"])),
        ("memory at most", bytes_text(1e6 * summary["peak_rss_mb"])),
        ("digest", str(summary["digest"])[:16]),
    ]


def rows_table(result: Result) -> FigureTable:
    """Return the main columns of the history as a table."""
    shown = [column for column in HISTORY if column.head]
    rows = [tuple(column.text(row[column.name]) for column in shown) for row in result.history]
    return FigureTable([column.head for column in shown], {"": rows})


def settings_table(result: Result) -> FigureTable:
    """Return the scenario's keys that differ from the defaults, with both values."""
    scenario = result.scenario
    usual = Scenario(duration_s=scenario.duration_s, rounds=scenario.rounds)
    different = describe.differences([scenario, usual])
    return FigureTable(("", "here", "by default"), {"Settings": [(key, *values) for key, values in different.items()]})
