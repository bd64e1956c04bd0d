"""The two reports: of one result, and of several side by side. :mod:`sim.report.html` has the elements of a page."""

from __future__ import annotations

import math
from collections.abc import Sequence

from sim.report import charts, describe, html, plots
from sim.report.figures import HISTORY
from sim.report.result import Result
from sim.report.units import ABSENT, bytes_text, count_text, duration_text, figure_text, share_text

__all__ = ["comparison", "report"]

SHOWN_DIFFERENCES = 12  # Differing keys of scenarios; more would push the curves off the first screen.


def report(result: Result) -> str:
    """Return the page of one result."""
    summary = result.summary
    parts = [
        html.paragraph(describe.in_words(result.scenario, result.fidelity)),
        html.paragraph(summary["no_exchange"]),
        html.figures(headlines(result)),
        shading_note([result]),
        html.pictures(pictures_of([result])),
        html.table(("", ""), {"Cost": costs(result)}),
        html.details("The rows behind the curves", rows_table(result)),
        html.details("The scenario", result.scenario.to_toml(), preformatted=True),
    ]
    stopped = "" if summary["done"] == 1.0 else f", stopped after {share_text(summary['done'])}"
    return html.page(str(summary["name"]), f"Simulation, seed {summary['seed']}{stopped}", parts)


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
    title = " · ".join(names) if len(names) <= 4 else f"{len(names)} scenarios"
    parts = [
        html.table(("", *names), groups, coloured=True),
        html.paragraph(f"They differ in {left_out} more keys; each scenario.toml has all.", "note") if left_out else "",
        html.key(names),
        shading_note(results),
        html.pictures(pictures_of(results)),
    ]
    return html.page(title, "Simulations compared", parts)


def shading_note(results: Sequence[Result]) -> str:
    """Return the note about shaded periods, if panels shade any."""
    return html.paragraph("Shaded: while the network is cut.", "note") if plots.cuts(results) else ""


def pictures_of(results: Sequence[Result]) -> list[tuple[str, str, str]]:
    """Return panels as (title, caption, svg)."""
    has_several = len(results) > 1
    return [
        (
            panel.title,
            panel.caption_for(results),
            charts.svg_of(charts.draw(results, panel, key=not has_several), panel.title),
        )
        for panel in plots.panels_of(results)
    ]


def headlines(result: Result) -> list[html.Headline]:
    """Return the headline figures."""
    summary, texts = result.summary, result.figures()
    accuracy, last = summary["accuracy"], result.history[-1] if result.history else {}
    figures = []
    if "average model" in texts:
        spread = f"{share_text(accuracy['min'])} to {share_text(accuracy['max'])} over the peers"
        figures.append(html.Headline("Accuracy, mean of peers", texts["accuracy, mean of peers"], spread))
        figures.append(html.Headline("Accuracy, average model", texts["average model"]))
    average = figure_text(last.get("loss_average_model", math.nan))
    figures.append(html.Headline("Loss, mean of peers", texts["loss, mean of peers"], f"average model {average}"))
    meaning = "root mean square, from the average model"
    figures.append(html.Headline("Consensus distance", texts["consensus distance"], meaning))
    ready = count_text(last.get("ready", math.nan))
    figures.append(html.Headline("Peers alive at the end", texts["alive at the end"], f"{ready} of them training"))
    figures.append(html.Headline("Exchanges", texts["exchanges"], f"{texts['failed']} failed"))
    sent_by_one = bytes_text(summary["bytes_sent"] / max(1, summary["peers"]))
    figures.append(html.Headline("Sent", texts["sent"], f"{sent_by_one} a peer"))
    mixes = (
        f"{figure_text(last.get('mixes', math.nan))} mixes and {figure_text(last.get('steps', math.nan))} steps a peer"
    )
    figures.append(html.Headline("Virtual time", texts["virtual time"], mixes))
    return figures


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


def rows_table(result: Result) -> str:
    """Return the main columns of the history as a table."""
    shown = [column for column in HISTORY if column.head]
    rows = [tuple(column.text(row[column.name]) for column in shown) for row in result.history]
    return html.table([column.head for column in shown], {"": rows})
