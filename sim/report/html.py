"""A self-contained HTML file: figures, pictures and tables, for light and dark themes and any width."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from sim.report.plots import COLOURS, GRID, INK, MUTED, SHADE

__all__ = ["Headline", "details", "figures", "key", "page", "paragraph", "pictures", "table"]


@dataclass(frozen=True, slots=True)
class Headline:
    """A headline figure: its name, the figure with its unit, and a note."""

    name: str
    value: str
    note: str = ""


def page(title: str, kind: str, parts: Iterable[str]) -> str:
    """Return the whole file. ``kind`` is shown small above the title; ``parts`` come from the functions below."""
    return PAGE.format(title=escape(title), kind=escape(kind), style=STYLE, body="\n".join(parts))


def paragraph(text: str, style: str = "lead") -> str:
    return f'<p class="{style}">{escaped(text)}</p>' if text else ""


def figures(items: Iterable[Headline]) -> str:
    """Return headline figures, in as many columns as fit."""
    cells = (
        f"<div><dt>{escape(item.name)}</dt><dd>{escaped(item.value)}<small>{escaped(item.note)}</small></dd></div>"
        for item in items
    )
    return f'<dl class="figures">{"".join(cells)}</dl>'


def pictures(items: Iterable[tuple[str, str, str]]) -> str:
    """Return pictures, given as (title, caption, ``<svg>`` element)."""
    cells = (
        f"<figure><figcaption><h2>{escape(title)}</h2><p>{escape(caption)}</p></figcaption>{svg}</figure>"
        for title, caption, svg in items
    )
    return f'<section class="pictures">{"".join(cells)}</section>'


def key(names: Sequence[str]) -> str:
    """Return the key of colours and scenarios, which stays visible while the pictures scroll."""
    entries = "".join(f"<li>{swatch(number)}{escape(name)}</li>" for number, name in enumerate(names))
    return f'<ul class="key">{entries}</ul>'


def swatch(number: int) -> str:
    """Return a short line in the colour and dashes of a series."""
    dashes = ("", "5 2", "1.5 1.5", "6 2 1.5 2")[number // len(COLOURS) % 4]
    line = f'stroke="var(--s{number % len(COLOURS)})" stroke-width="3" stroke-dasharray="{dashes}"'
    return f'<svg width="22" height="10" aria-hidden="true"><path d="M0 5H22" {line}/></svg>'


def table(heads: Sequence[str], groups: Mapping[str, Iterable[Sequence[str]]], *, coloured: bool = False) -> str:
    """Return a table of rows in groups, each group under its title.

    The first column names the row, the others hold figures. With ``coloured`` the other columns are scenarios.
    """
    first, *others = heads
    columns = "".join(
        f'<th scope="col">{swatch(number) if coloured else ""}{escape(head)}</th>' for number, head in enumerate(others)
    )
    body = "".join(
        f"<tbody>{title_row(title, len(heads))}{''.join(map(table_row, rows))}</tbody>"
        for title, rows in groups.items()
    )
    head = f"<thead><tr><th>{escape(first)}</th>{columns}</tr></thead>" if any(heads) else ""
    return f'<div class="scroll" tabindex="0"><table>{head}{body}</table></div>'


def title_row(title: str, columns: int) -> str:
    return f'<tr class="title"><th scope="rowgroup" colspan="{columns}">{escape(title)}</th></tr>' if title else ""


def table_row(cells: Sequence[str]) -> str:
    first, *others = cells
    return f'<tr><th scope="row">{escaped(first)}</th>{"".join(f"<td>{escaped(cell)}</td>" for cell in others)}</tr>'


def details(title: str, inside: str, *, preformatted: bool = False) -> str:
    """Return a folded section."""
    body = f"<pre>{escape(inside)}</pre>" if preformatted else inside
    return f"<details><summary>{escape(title)}</summary>{body}</details>"


def colours(shade: int) -> str:
    """Return the series' colours as CSS variables: 0 for the light page, 1 for the dark one."""
    return "".join(f" --s{number}: {pair[shade]};" for number, pair in enumerate(COLOURS))


def escaped(text: str) -> str:
    """Return escaped text in which numbers stay on one line with their units."""
    return escape(UNIT.sub("\N{NO-BREAK SPACE}", text))


UNIT = re.compile(r"(?<=\d) (?=(?:%|(?:ms|s|min|h|days?|[kMGTP]?B|Mbit/s|million|billion|of|to)\b))")
STYLE = (
    f"""
:root {{ color-scheme: light dark; --page: #ffffff; --ink: {INK}; --muted: {MUTED}; --grid: {GRID}; --shade: {SHADE};
 {colours(0)} }}
@media (prefers-color-scheme: dark) {{ :root {{ --page: #15181c; --ink: #e8eaed; --muted: #a3abb5; --grid: #2d333a;
  --shade: #20252b; {colours(1)} }} }}
"""
    + """
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; text-size-adjust: 100%; }
body { margin: 0 auto; max-width: 1240px; padding: 2.25rem 1.5rem 3rem; background: var(--page); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif; }
header p { margin: 0; color: var(--muted); font-size: .875rem; }
h1 { margin: 0 0 .75rem; font-size: 1.9rem; line-height: 1.2; letter-spacing: -.015em; overflow-wrap: anywhere; }
h2 { margin: 0; font-size: 1rem; }
.lead { max-width: 72ch; margin: 0 0 1rem; }
.note { max-width: 72ch; margin: .5rem 0; color: var(--muted); font-size: .875rem; }
.figures { display: grid; grid-template-columns: repeat(4, 1fr); gap: 1.25rem 1.5rem;
  margin: 1.75rem 0; padding: 1.25rem 0; border-top: 1px solid var(--grid); border-bottom: 1px solid var(--grid); }
.figures dt { color: var(--muted); font-size: .875rem; }
.figures dd { margin: 0; font-size: 1.6rem; line-height: 1.3; letter-spacing: -.01em;
  font-variant-numeric: tabular-nums; }
.figures small { display: block; color: var(--muted); font-size: .8125rem; line-height: 1.4; letter-spacing: 0; }
.pictures { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 21rem), 1fr)); gap: 2.25rem 2rem;
  margin: 1.5rem 0 2.5rem; }
figure { margin: 0; display: flex; flex-direction: column; justify-content: space-between; }
figcaption p { margin: .1rem 0 .5rem; color: var(--muted); font-size: .8125rem; line-height: 1.4; }
figure svg { display: block; width: 100%; height: auto; overflow: visible; }
figure svg text { font-variant-numeric: tabular-nums; }
.key { position: sticky; top: 0; z-index: 1; display: flex; flex-wrap: wrap; gap: .25rem 1.25rem; margin: 1rem 0;
  padding: .6rem 0; list-style: none; background: var(--page); border-bottom: 1px solid var(--grid);
  font-size: .9375rem; }
.key svg, th svg { margin-right: .5rem; vertical-align: middle; fill: none; }
.scroll { overflow-x: auto; margin: 1rem 0; }
table { border-collapse: collapse; font-size: .875rem; font-variant-numeric: tabular-nums; }
th, td { padding: .35rem 0 .35rem 1.5rem; text-align: right; border-bottom: 1px solid var(--grid); }
th:first-child { padding-left: 0; text-align: left; position: sticky; left: 0; background: var(--page); }
th { font-weight: 500; }
thead th { vertical-align: bottom; }
tbody th { color: var(--muted); font-weight: 400; white-space: nowrap; vertical-align: top; }
td { min-width: 5.5rem; max-width: 15rem; vertical-align: top; }
.title th { padding-top: 1.1rem; color: var(--ink); font-weight: 600; }
details { margin: .5rem 0; }
summary { cursor: pointer; padding: .25rem 0; }
pre { overflow-x: auto; padding: 1rem; background: var(--shade); border-radius: 6px;
  font-size: .8125rem; line-height: 1.45; }
@media (max-width: 40rem) { body { padding: 1.25rem 1rem 2rem; } h1 { font-size: 1.5rem; }
  .figures { grid-template-columns: repeat(2, 1fr); } tbody th { max-width: 8rem; white-space: normal; }
  th, td { padding-left: 1rem; } .figures dd { font-size: 1.35rem; } }
@media print { body { max-width: none; } .key { position: static; } figure { break-inside: avoid; } }
"""
)

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<header><p>{kind}</p><h1>{title}</h1></header>
<main>
{body}
</main>
</body>
</html>
"""
