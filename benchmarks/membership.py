"""What membership costs the simulator: events handled in a CPU second, with nothing trained and nothing mixed.

    python benchmarks/membership.py [--peers 100 300 1000] [--seed 1] [--events 200000] [--idle] [--profile]

Each swarm joins through its first peer, all at once, and then runs on while every peer takes a step a second and so
always has progress to tell; ``--idle``: nobody tells any. An event is what the heap hands to a handler: a message, a
timer, the end of a step. One JSON line a swarm:

``join_*``    from the first peer to the second in which everybody is ready and holds everybody ALIVE
``events_s``  events in a CPU second of one thread, after all that the join gave to tell has been told
``digest``    what a change that should change no decision leaves as it was
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import resource
import time

import numpy as np

from gossip.config import Config
from sim.engine.swarm import Swarm
from sim.world.network import NetworkModel

NEVER = 10**9  # steps: no peer ever mixes
STEP_S, NEVER_S = 1.0, 1e9
WARM_UP_S = 0.25  # for each member: a join gives each some 200 tellings a second to make for so long


def joined(peers: int, seed: int, idle: bool) -> Swarm:
    """A swarm in which everybody is ready and holds everybody ALIVE."""
    told = {"progress_period_s": NEVER_S} if idle else {}
    swarm = Swarm(seed, NetworkModel(), Config(mix_every_steps=NEVER, **told))
    for index in range(peers):
        swarm.add_peer(np.zeros(4, np.float32), seeds=[0] if index else [], step_s=STEP_S)
    while any(len(host.peer.membership.alive()) < peers - 1 or not host.peer.ready for host in swarm.hosts):
        swarm.run_until(swarm.now + 1.0)
    return swarm


def measure(peers: int, seed: int, events: int, idle: bool, profile: cProfile.Profile | None) -> dict[str, object]:
    began = time.process_time()
    swarm = joined(peers, seed, idle)
    join_cpu_s, join_events, join_s = time.process_time() - began, swarm.events.handled, swarm.now
    swarm.run_until(swarm.now + WARM_UP_S * peers)
    first, first_s, began = swarm.events.handled, swarm.now, time.process_time()
    if profile is not None:
        profile.enable()
    while swarm.events.handled - first < events:
        swarm.run_until(swarm.now + 1.0)
    if profile is not None:
        profile.disable()
    cpu_s, handled = time.process_time() - began, swarm.events.handled - first
    return {
        "peers": peers, "idle": idle, "join_virtual_s": join_s, "join_cpu_s": round(join_cpu_s, 2),
        "join_events_s": round(join_events / join_cpu_s), "virtual_s": swarm.now - first_s,
        "cpu_s": round(cpu_s, 2), "events": handled, "events_s": round(handled / cpu_s),
        "virtual_s_per_cpu_s": round((swarm.now - first_s) / cpu_s, 2),
        "peak_rss_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024), "digest": swarm.digest()[:16],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=int, nargs="+", default=[100, 300, 1000])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--events", type=int, default=200_000, help="how many are measured, at the least")
    parser.add_argument("--idle", action="store_true", help="nobody takes a step, so that there is nothing to tell")
    parser.add_argument("--profile", action="store_true", help="say where the time went (which slows everything)")
    options = parser.parse_args()
    for peers in options.peers:
        profile = cProfile.Profile() if options.profile else None
        print(json.dumps(measure(peers, options.seed, options.events, options.idle, profile)), flush=True)
        if profile is not None:
            pstats.Stats(profile).sort_stats("tottime").print_stats(35)


if __name__ == "__main__":
    main()
