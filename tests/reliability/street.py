"""Each kind of home beside each other one: how their nodes are linked, how soon they mix, and how fast.

    python -m tests.reliability.street [--large]

prints a Markdown table. All machines have 100 Mbit/s. With ``--large`` each pair of kinds has a swarm of its own, whose
public seed seldom mixes, and a model of 4 MB in fp32: the cells have MB/s of exchanges in both directions at once.
"""

import contextlib
import itertools
import statistics
import subprocess
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
    "public": lambda made, number: [made.public(10 + number)],
    "port kept": lambda made, number: made.home(number),
    "port anew": lambda made, number: made.home(number, nat=RANDOM),
    "two routers": lambda made, number: made.home(number, is_nested=True),
    "firewall": lambda made, number: [made.public(10 + number, has_firewall=True)],
    "opens ports": lambda made, number: made.home(number, opens_ports=True),
}
"""The kinds of machines, by what is between them and the others."""


@contextlib.contextmanager
def street():
    """Make two machines of each kind, public ones first; yield a Homes and the kind of each address."""
    with homes(0, []) as made:
        kinds = {}
        for number, (kind, make) in enumerate(two for two in KINDS.items() for _ in range(2)):
            kinds |= dict.fromkeys(make(made, number), kind)
        made.limit_rates()
        yield made, kinds


class Cell(NamedTuple):
    """The measurements of the nodes of two kinds of machines."""

    paths: tuple[str, ...]  # How they are linked, by each node.
    first_s: float  # Until the first exchange, from the moment at which both listened; the median of all pairs.


def cells(made, kinds, folder):
    """Run a node on each machine until all have mixed with each other, and 10 s longer.

    Returns:
        The cells by pairs of kinds, where two of one kind are of two homes.
    """
    tunnels = str(2 * len(kinds))  # The two public nodes carry all links that need a relay.
    with started(made, folder, GOSSIP_TUNNELS=tunnels) as nodes:
        until(lambda: are_met(nodes))
        time.sleep(10.0)
        by_kind = {}
        for node, kind in zip(nodes, kinds.values(), strict=True):
            by_kind.setdefault(kind, []).append(node)
        found = {}
        for one, other in itertools.combinations_with_replacement(by_kind, 2):
            pairs = [(a, b) for a in by_kind[one] for b in by_kind[other] if a is not b]
            mixes = [(max(a.began_at, b.began_at), a.mixes([b])) for a, b in pairs]
            firsts = [rows[0][0] - began_at for began_at, rows in mixes]
            found[one, other] = Cell(tuple(rows[-1][2] for _, rows in mixes), statistics.median(firsts))
        return found


def speed(folder, one, other):
    """Return how nodes of two kinds are linked, the MB/s of their exchanges, and those of a TCP stream to the seed."""
    with homes(1, []) as made:
        (seed,) = made.machines
        ends = [KINDS[kind](made, number)[0] for number, kind in enumerate((one, other))]
        made.limit_rates()
        with started(made, folder, {seed: {"STEP_S": "1"}}, WIDTH="1000") as (_, a, b):
            until(lambda: a.exchanges_with([b]))
            began = time.time()
            until(lambda: len(a.mixes([b], began)) >= 15)
            rows = a.mixes([b], began)
        return rows[-1][2], 4.0 / statistics.median(seconds for _, seconds, _ in rows), raw_mb_s(made, ends[0], seed)


def raw_mb_s(made, one, other):
    """Return the MB/s of a TCP stream of 20 MB from one machine to another."""

    def enter(address):
        return ("ip", "netns", "exec", made.machines[address], sys.executable, "-c")

    take = f"import socket\ns = socket.create_server(({other!r}, 9)); print(flush=True); c = s.accept()[0]\n"
    take += "while c.recv(65536): pass\nc.send(b'.')"
    give = f"import socket, time\nc = socket.create_connection(({other!r}, 9)); t = time.time()\n"
    give += "c.sendall(bytes(20_000_000)); c.shutdown(1); c.recv(1); print(20 / (time.time() - t))"
    with subprocess.Popen((*enter(other), take), stdout=subprocess.PIPE) as taker:
        taker.stdout.readline()
        return float(subprocess.run((*enter(one), give), capture_output=True, check=True).stdout)


def main():
    with tempfile.TemporaryDirectory() as folder:
        if "--large" in sys.argv:
            rows = {}
            for pair in itertools.combinations_with_replacement(KINDS, 2):
                way, mb_s, raw = speed(Path(tempfile.mkdtemp(dir=folder)), *pair)
                rows[pair] = f"{way.split()[0]}, {mb_s:.1f} of {raw:.1f} MB/s"
        else:
            with street() as (made, kinds):
                found = cells(made, kinds, Path(folder))
            ways = {pair: ", ".join(sorted({path.split()[0] for path in cell.paths})) for pair, cell in found.items()}
            rows = {pair: f"{ways[pair]}, {cell.first_s:.1f} s" for pair, cell in found.items()}
    print("| |", " | ".join(KINDS), "|\n|---|" + "---|" * len(KINDS))
    for place, one in enumerate(KINDS):
        print(f"| {one} |" + " |" * place, " | ".join(rows[one, other] for other in list(KINDS)[place:]), "|")


if __name__ == "__main__":
    main()
