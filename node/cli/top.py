"""`gossip top`: a swarm in the terminal, as one of its nodes sees it, refreshed every two seconds."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gossip.errors import LocalError
from gossip.ids import quantity
from node.cli.local import ending_on_signals
from node.cli.main import ask, shown
from node.terminal import plain_console

if TYPE_CHECKING:
    from rich.console import RenderableType

MAX_ROWS = 60  # Members shown: the height of a terminal.
STATE_ORDER = {"alive": 0, "suspect": 1, "dead": 2, "left": 3}


def run_top(address: str, secret_file: Path | None, timeout_s: float, every_s: float) -> int:
    """Show what the node at an address answers until ^C; once where the output is no terminal.

    When the node stops answering, its last picture stays, with its age. Raises LocalError if the first query fails.
    """
    from rich.console import Group
    from rich.live import Live
    from rich.text import Text

    console = plain_console()
    answer, before, answered_at = ask(address, secret_file, timeout_s), None, time.monotonic()
    if not console.is_terminal:
        console.print(picture_of(answer, None, 0.0))
        return 0
    with ending_on_signals(), Live(picture_of(answer, None, 0.0), console=console, screen=True) as live:
        try:
            while True:
                time.sleep(every_s)
                try:
                    before, answer = answer, ask(address, secret_file, timeout_s)
                except LocalError as error:
                    notice = f"{error}\nThis is {time.monotonic() - answered_at:.0f} s old:"
                    live.update(Group(Text(notice), picture_of(answer, None, 0.0)))
                    continue
                passed_s, answered_at = time.monotonic() - answered_at, time.monotonic()
                live.update(picture_of(answer, before, passed_s))
        except KeyboardInterrupt:
            return 0


def picture_of(answer: Mapping[str, Any], before: Mapping[str, Any] | None, passed_s: float) -> RenderableType:
    """Return one answer of `gossip status` as a table, with rates over ``passed_s`` if there is an answer before it."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    metrics = answer["metrics"]
    own_row = {"id": answer["id"], "address": answer["address"], "state": "alive", **metrics}
    others = sorted(answer["members"], key=lambda member: (STATE_ORDER.get(member["state"], 4), member["id"]))
    rows_before: dict[str, Any] = {}
    if before is not None:
        rows_before = {member["id"]: member for member in before["members"]} | {before["id"]: before["metrics"]}
    table = Table("member", "state", "steps", "samples", "loss", "samples/s", "link", "address", expand=True)
    for member in [own_row, *others][:MAX_ROWS]:
        pace = rate(rows_before.get(member["id"], {}).get("samples"), member.get("samples"), passed_s)
        figures = map(shown, map(member.get, ("state", "steps", "samples", "loss")))
        cells = (member["id"][:8], *figures, pace, member.get("link") or "-", member["address"] or "-")
        table.add_row(*map(Text, cells), style="dim" if member["state"] != "alive" else "")
    metrics_before = {} if before is None else before["metrics"]
    byte_counts = [(metrics_before.get(name), metrics.get(name)) for name in ("bytes_sent", "bytes_received")]
    up, down = (rate(*counts, passed_s, 1e-6) for counts in byte_counts)  # In MB/s.
    heading = (
        f"node {answer['id'][:8]}  swarm {answer['swarm']!r}  {shown(metrics.get('members_alive'))} alive  "
        f"{count_text(metrics.get('swarm_samples'), 'sample')}  distance {shown(metrics.get('consensus_distance'))}  "
        f"{up}/{down} MB/s  {count_text(metrics.get('exchanges_done'), 'exchange')}"
    )
    failed = ", ".join(f"{reason} {count}" for reason, _, count in metrics.get("failures") or ())
    hidden = len(others) + 1 - MAX_ROWS
    notes = [f"failed: {failed}"] if failed else []
    notes += [f"and {hidden:,} more"] if hidden > 0 else []
    return Group(Text(heading), table, *map(Text, notes))


def count_text(value: Any, noun: str) -> str:
    """Return another node's count with its noun; a dash if it sent none."""
    return quantity(value, noun) if type(value) is int else f"- {noun}s"


def rate(before: Any, after: Any, passed_s: float, scale: float = 1.0) -> str:
    """Return the growth per second as text; a dash if it is unknown, or the count has restarted."""
    are_numbers = isinstance(before, int | float) and isinstance(after, int | float)
    return f"{(after - before) * scale / passed_s:,.3g}" if are_numbers and passed_s > 0 and after >= before else "-"
