"""`gossip fetch`: the weights of a live swarm in a file, once or again and again."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

from gossip.errors import CheckpointError, LocalError
from gossip.ids import quantity
from node.cli.local import ending_on_signals
from node.model.checkpoint import checked_target
from node.reader import Reader

__all__ = ["fetch"]


def fetch(seeds: Sequence[str], path: Path, secret_file: Path | None, timeout_s: float, every_s: float | None) -> int:
    """Write the weights to ``path`` and print their figures, with ``every_s`` until ^C.

    Raises LocalError in one sentence if the first read fails. A later failure is told, and the file stays.
    """
    reader, target, has_written = Reader(seeds, secret_file, timeout_s), checked_target(path), False
    with ending_on_signals():
        try:
            while True:
                began_at = time.monotonic()
                try:
                    weights = reader.read()
                    weights.save(target)
                    print(
                        f"{target}: run {weights.run_id[:8]}, {quantity(weights.samples, 'sample')}, "
                        f"{quantity(weights.steps, 'step')}; {weights.bytes_received / 1e6:,.2f} MB from "
                        f"{quantity(weights.donors, 'member')} in {weights.seconds:.2f} s, at most "
                        f"{weights.staleness_s:.2f} s old",
                        flush=True,
                    )
                    has_written = True
                except LocalError as error:
                    if every_s is None or not has_written or isinstance(error, CheckpointError):
                        raise
                    print(f"gossip: {error}", file=sys.stderr, flush=True)
                if every_s is None:
                    return 0
                time.sleep(max(0.0, began_at + every_s - time.monotonic()))
        except KeyboardInterrupt:
            return 0 if has_written else 130
