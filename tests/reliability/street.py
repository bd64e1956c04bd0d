"""Each kind of home beside each other one: how their nodes are linked, how soon they mix, and how fast.

    python -m tests.reliability.street [--large]

prints a Markdown table. All machines have 100 Mbit/s. With ``--large`` the model has 4 MB, and the cells have MB/s.
"""

import contextlib
import itertools
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from tests.engines.launched import until
from tests.reliability.home_nodes import are_met, started
from tests.reliability.namespaces import homes

RANDOM = "masquerade fully-random"
KINDS = {
    "port kept": lambda made, number: made.home(number),
    "port anew": lambda made, number: made.home(number, nat=RANDOM),
    "two routers": lambda made, number: made.home(number, is_nested=True),
    "firewall": lambda made, number: [made.public(10 + number, has_firewall=True)],
    "opens ports": lambda made, number: made.home(number, opens_ports=True),
}
"""The kinds of machines beside public ones, by what is between them and the others."""


@contextlib.contextmanager
def street():
    """Make two machines of each kind, public ones first; yield a Homes and the kind of each address."""
    with homes(2, []) as made:
        kinds = dict.fromkeys(made.machines, "public")
        for number, (kind, make) in enumerate(two for two in KINDS.items() for _ in range(2)):
            kinds |= dict.fromkeys(make(made, number), kind)
        made.limit_rates()
        yield made, kinds


class Cell(NamedTuple):
    """The measurements of the nodes of two kinds of machines."""

    paths: tuple[str, ...]  # How they are linked, by each node.
    first_s: float  # Until the first exchange, from the moment at which both listened; the median of all pairs.
    mb_s: float  # The bytes of a model by the median duration of an exchange.


def cells(made, kinds, folder, width=8, stays_s=10.0):
    """Run a node on each machine until all have mixed with each other, and ``stays_s`` longer.

    Returns:
        The cells by pairs of kinds, where two of one kind are of two homes.
    """
    tunnels = str(2 * len(kinds))  # The two public nodes carry all links that need a relay.
    with started(made, folder, WIDTH=str(width), GOSSIP_TUNNELS=tunnels) as nodes:
        until(lambda: are_met(nodes))
        time.sleep(stays_s)
        by_kind = {}
        for node, kind in zip(nodes, kinds.values(), strict=True):
            by_kind.setdefault(kind, []).append(node)
        found = {}
        for one, other in itertools.combinations_with_replacement(by_kind, 2):
            pairs = [(a, b) for a in by_kind[one] for b in by_kind[other] if a is not b]
            mixes = [(max(a.began_at, b.began_at), a.mixes([b])) for a, b in pairs]
            firsts = [rows[0][0] - began_at for began_at, rows in mixes]
            durations = [seconds for _, rows in mixes for _, seconds, _ in rows]
            paths = tuple(rows[-1][2] for _, rows in mixes)
            found[one, other] = Cell(paths, statistics.median(firsts), 4e-6 * width**2 / statistics.median(durations))
        return found


def main():
    is_large = "--large" in sys.argv
    with street() as (made, kinds), tempfile.TemporaryDirectory() as folder:
        found = cells(made, kinds, Path(folder), *((1000, 120.0) if is_large else ()))
    names = list(dict.fromkeys(kinds.values()))
    print("| |", " | ".join(names), "|\n|---|" + "---|" * len(names))
    for row, one in enumerate(names):
        shown = []
        for other in names[row:]:
            cell = found[one, other]
            ways = ", ".join(sorted({path.split()[0] for path in cell.paths}))
            shown.append(f"{ways}, " + (f"{cell.mb_s:.1f} MB/s" if is_large else f"{cell.first_s:.1f} s"))
        print(f"| {one} |" + " |" * row, " | ".join(shown), "|")


if __name__ == "__main__":
    main()
