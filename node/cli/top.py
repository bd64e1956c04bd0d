"""`gossip top`: a swarm in the terminal, as one of its nodes sees it, refreshed every two seconds."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from gossip.errors import LocalError
from gossip.ids import quantity
from node.cli.local import ending_on_signals
from node.cli.main import shown

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

__all__ = ["picture_of", "run_top"]

MAX_ROWS = 60  # Members shown: the height of a terminal.
ORDER = {"alive": 0, "suspect": 1, "dead": 2, "left": 3}


def run_top(ask: Callable[[], dict[str, Any]], every_s: float, console: Console | None = None) -> int:
    """Show what ``ask`` answers until ^C; once where the output is no terminal.

    When the node stops answering, its last picture stays, with its age. Raises LocalError if the first query fails.
    """
    from rich.console import Console, Group
    from rich.live import Live
    from rich.text import Text

    console = console or Console(highlight=False, markup=False, emoji=False)
    answer, before, at, passed_s = ask(), None, time.monotonic(), 0.0
    if not console.is_terminal:
        console.print(picture_of(answer, None, 0.0))
        return 0
    with ending_on_signals(), Live(picture_of(answer, None, 0.0), console=console, screen=True) as live:
        try:
            while True:
                time.sleep(every_s)
                try:
                    before, answer = answer, ask()
                except LocalError as error:
                    said = f"{error}\nThis is {time.monotonic() - at:.0f} s old:"
                    live.update(Group(Text(said), picture_of(answer, None, 0.0)))
                    continue
                passed_s, at = time.monotonic() - at, time.monotonic()
                live.update(picture_of(answer, before, passed_s))
        except KeyboardInterrupt:
            return 0


def picture_of(answer: Mapping[str, Any], before: Mapping[str, Any] | None, passed_s: float) -> RenderableType:
    """Return one answer of `gossip status` as a table, with rates if there is an answer before it."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    metrics = answer["metrics"]
    mine = {"id": answer["id"], "address": answer["address"], "state": "alive", **metrics}
    others = sorted(answer["members"], key=lambda one: (ORDER.get(one["state"], 4), one["id"]))
    old = {} if before is None else {one["id"]: one for one in before["members"]} | {before["id"]: before["metrics"]}
    table = Table("member", "state", "steps", "samples", "loss", "samples/s", "address", expand=True)
    for member in [mine, *others][:MAX_ROWS]:
        pace = rate(old.get(member["id"], {}).get("samples"), member.get("samples"), passed_s)
        cells = (member["id"][:8], member["state"], *map(shown, map(member.get, ("steps", "samples", "loss"))), pace)
        table.add_row(*map(Text, (*cells, member["address"] or "-")), style="dim" if member["state"] != "alive" else "")
    earlier = {} if before is None else before["metrics"]
    up, down = (rate(earlier.get(name), metrics.get(name), passed_s, 1e-6) for name in ("bytes_sent", "bytes_received"))
    head = (
        f"node {answer['id'][:8]}  swarm {answer['swarm']!r}  {shown(metrics.get('members_alive'))} alive  "
        f"{count_text(metrics.get('swarm_samples'), 'sample')}  distance {shown(metrics.get('consensus_distance'))}  "
        f"{up}/{down} MB/s  {count_text(metrics.get('exchanges_done'), 'exchange')}"
    )
    failed = ", ".join(f"{reason} {count}" for reason, _, count in metrics.get("failures") or ())
    hidden = len(others) + 1 - MAX_ROWS
    foot = [f"failed: {failed}"] if failed else []
    foot += [f"and {hidden:,} more"] if hidden > 0 else []
    return Group(Text(head), table, *map(Text, foot))


def count_text(value: Any, noun: str) -> str:
    """Return another node's count with its noun; a dash if it sent none."""
    return quantity(value, noun) if type(value) is int else f"- {noun}s"


def rate(before: Any, after: Any, passed_s: float, scale: float = 1.0) -> str:
    numbers = isinstance(before, int | float) and isinstance(after, int | float)
    return f"{(after - before) * scale / passed_s:,.3g}" if numbers and passed_s > 0 and after >= before else "-"
