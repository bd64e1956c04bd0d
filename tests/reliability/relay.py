"""The cost of two tunnels to their relay, beside a public node that carries none: mixes, memory, steps.

    python -m tests.reliability.relay

Two public nodes and four homes whose routers map each destination anew, 100 Mbit/s a machine, a model of 1 MB.
"""

import tempfile
import time
from pathlib import Path

from tests.engines.launched import until
from tests.reliability.home_nodes import started
from tests.reliability.namespaces import homes


def resident_mb(pid):
    rows = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(row for row in rows if row.startswith("VmRSS")).split()[1]) / 1024


def main():
    with homes(2, [1] * 4, nat="masquerade fully-random") as made, tempfile.TemporaryDirectory() as folder:
        made.limit_rates()
        relays_nothing = {"192.79.0.11": {"GOSSIP_TUNNELS": "0"}}
        with started(made, Path(folder), relays_nothing, WIDTH="512") as nodes:
            publics, hidden = nodes[:2], nodes[2:]
            until(lambda: all(node.mixes(publics[:1]) for node in hidden))
            time.sleep(25.0)
            began_at, steps = time.time(), [node.log.figure("steps") for node in publics]
            time.sleep(60.0)
            carried = sum(len(one.mixes([other], began_at)) for one in hidden for other in hidden if one is not other)
            for name, node, before in zip(("relay", "other"), publics, steps, strict=True):
                mixes, taken = len(node.mixes(nodes, began_at)), node.log.figure("steps") - before
                print(f"{name}: {mixes} mixes, {taken} steps, {resident_mb(node.log.pid):.0f} MB")
            print(f"through tunnels: {carried // 2} mixes")


if __name__ == "__main__":
    main()
