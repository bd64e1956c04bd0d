"""The cost of the membership protocol: events handled in a CPU second, without training and mixing.

    python benchmarks/membership.py [--peers 100 300 1000] [--seed 1] [--events 200000] [--idle] [--profile]
    python benchmarks/membership.py --load [--peers 10 100 1000] [--idle] [--watch-s S]

In each swarm all peers join at once through the first one. Then every peer takes a step a second and so always has
progress to gossip; with ``--idle`` no peer has. An event is one call of a handler from the event heap: a message, a
timer, or the end of a step. One JSON line a swarm:

``join_*``    from the first peer until the second in which all peers are ready and ALIVE to all
``events_s``  events in a CPU second of one thread, after the news of the joins has spread
``digest``    must stay the same after a change that should alter no decision

``--load`` measures the cost for a member. Founders that know each other take a step of 8 samples every 0.1 s. After
``--watch-s`` seconds they are measured for as long again. One JSON line a swarm:

``messages``  membership messages sent by each member a second, and ``bytes`` of their frames, including the keys and
              signatures that simulated records lack
``cpu_us``    CPU microseconds for each member and second, with the simulator's own work: only for comparisons
``signed``    records signed by each member in a minute
``error``     largest error of a member's ``swarm_samples``, at the beginning and at the end of the measurement
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
from gossip.config.internal import Internal
from gossip.effects import Send
from gossip.ids import MemberRecord
from gossip.wire.frames import encode
from sim.engine.host import Host
from sim.engine.swarm import Swarm
from sim.world.network import NetworkModel

NEVER = 10**9  # interval in steps, so that no peer ever mixes
STEP_S, NEVER_S = 1.0, 1e9
LOAD_STEP_S, SAMPLES = 0.1, 8
UNSIGNED_BYTES = 96  # size of a key and a signature in msgpack, minus that of the empty values in simulated records
WARM_UP_S = 0.25  # seconds a member, during which a join causes each about 200 gossip messages a second


def joined(peers: int, seed: int, idle: bool) -> Swarm:
    """Return a swarm in which all peers are ready and ALIVE to all."""
    internal = Internal(progress_period_s=NEVER_S) if idle else Internal()
    swarm = Swarm(seed, NetworkModel(), Config(mix_every_steps=NEVER, internal=internal))
    for index in range(peers):
        swarm.add_peer(np.zeros(4, np.float32), seeds=[0] if index else [], step_s=STEP_S)
    while any(len(host.peer.membership.alive()) < peers - 1 or not host.peer.view.ready for host in swarm.hosts):
        swarm.run_until(swarm.now + 1.0)
    return swarm


def measure(peers: int, seed: int, events: int, idle: bool, profile: cProfile.Profile | None) -> dict[str, object]:
    began = time.process_time()
    swarm = joined(peers, seed, idle)
    join_cpu_s, join_events, join_s = time.process_time() - began, swarm.events.handled_events, swarm.now
    swarm.run_until(swarm.now + WARM_UP_S * peers)
    first, first_s, began = swarm.events.handled_events, swarm.now, time.process_time()
    if profile is not None:
        profile.enable()
    while swarm.events.handled_events - first < events:
        swarm.run_until(swarm.now + 1.0)
    if profile is not None:
        profile.disable()
    cpu_s, handled = time.process_time() - began, swarm.events.handled_events - first
    return {
        "peers": peers, "idle": idle, "join_virtual_s": join_s, "join_cpu_s": round(join_cpu_s, 2),
        "join_events_s": round(join_events / join_cpu_s), "virtual_s": swarm.now - first_s,
        "cpu_s": round(cpu_s, 2), "events": handled, "events_s": round(handled / cpu_s),
        "virtual_s_per_cpu_s": round((swarm.now - first_s) / cpu_s, 2),
        "peak_rss_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024), "digest": swarm.digest()[:16],
    }  # fmt: skip


class Meter:
    """A counter of the messages and bytes that a swarm sends."""

    def __init__(self, swarm: Swarm) -> None:
        self.messages = self.bytes = 0
        self.send = swarm.performers[Send]
        swarm.performers[Send] = self.count_and_send

    def count_and_send(self, host: Host, effect: Send) -> None:
        message = effect.message
        updates = (*getattr(message, "updates", ()), *getattr(message, "records", ()))
        records = sum(isinstance(update, MemberRecord) for update in updates)
        self.messages += 1
        self.bytes += len(encode(message)) + UNSIGNED_BYTES * records
        self.send(host, effect)


def load(peers: int, seed: int, idle: bool, watch_s: float) -> dict[str, object]:
    internal = Internal(progress_period_s=NEVER_S) if idle else Internal()
    swarm = Swarm(seed, NetworkModel(), Config(mix_every_steps=NEVER, internal=internal))
    for _ in range(peers):
        swarm.add_peer(np.zeros(4, np.float32), step_s=LOAD_STEP_S, samples_per_step=SAMPLES, founder=True)
    swarm.introduce()

    def signed() -> int:
        return sum(host.peer.membership.me.sequence for host in swarm.hosts)

    def error() -> float:
        trained = SAMPLES * peers * swarm.now / LOAD_STEP_S
        return round(max(abs(host.peer.local.progress.samples / trained - 1) for host in swarm.hosts), 4)

    swarm.run_until(watch_s)
    errors, first, began = [error()], signed(), time.process_time()
    swarm.run_until(1.5 * watch_s)  # timed without the meter, which costs time too
    cpu_s, meter = time.process_time() - began, Meter(swarm)
    swarm.run_until(2 * watch_s)
    member_seconds = peers * watch_s / 2  # the meter counts in the second half, and the first is timed
    return {
        "peers": peers, "idle": idle, "messages": round(meter.messages / member_seconds, 2),
        "bytes": round(meter.bytes / member_seconds),
        "cpu_us": round(1e6 * cpu_s / member_seconds), "signed": round((signed() - first) / member_seconds * 30, 2),
        "error": [*errors, error()], "virtual_s": swarm.now,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=int, nargs="+", help="sizes of the swarms")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--events", type=int, default=200_000, help="how many are measured, at the least")
    parser.add_argument("--idle", action="store_true", help="nobody takes a step, so that there is nothing to tell")
    parser.add_argument("--load", action="store_true", help="messages, bytes and time for each member and second")
    parser.add_argument("--watch-s", type=float, help="of --load; by default 300 s, or 0.6 s for each member")
    parser.add_argument("--profile", action="store_true", help="say where the time went (which slows everything)")
    options = parser.parse_args()
    for peers in options.peers or ([10, 100, 1_000] if options.load else [100, 300, 1_000]):
        if options.load:
            watch_s = options.watch_s or max(300.0, 0.6 * peers)
            print(json.dumps(load(peers, options.seed, options.idle, watch_s)), flush=True)
            continue
        profile = cProfile.Profile() if options.profile else None
        print(json.dumps(measure(peers, options.seed, options.events, options.idle, profile)), flush=True)
        if profile is not None:
            pstats.Stats(profile).sort_stats("tottime").print_stats(35)


if __name__ == "__main__":
    main()
