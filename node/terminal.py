"""The one way in which nodes print to a terminal: text of others is text, and no markup."""

from __future__ import annotations

from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.console import Console


def plain_console(file: TextIO | None = None, stderr: bool = False) -> Console:
    """Return a console that prints all text as it is: a member may call itself ``[/x]``."""
    from rich.console import Console  # Imported here: it takes 50 ms that only a table is worth.

    return Console(file=file, stderr=stderr, highlight=False, markup=False, emoji=False)
