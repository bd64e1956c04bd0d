"""The cost of the membership protocol for a member, without training and mixing.

    python benchmarks/membership.py [--peers 10 100 1000] [--seed 1] [--idle] [--watch-s S]

Founders that know each other take a step of 8 samples every 0.1 s and so always have progress to gossip, unless
``--idle``. After ``--watch-s`` seconds they are measured for as long again. One JSON line a swarm:

``messages``  membership messages sent by each member a second, and ``bytes`` of their frames, including the keys and
              signatures that simulated records lack
``cpu_us``    CPU microseconds for each member and second, with the simulator's own work: only for comparisons
``signed``    records signed by each member in a minute
``error``     largest error of a member's ``swarm_samples``, at the beginning and at the end of the measurement
"""

from __future__ import annotations

import argparse
import json
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

NEVER, NEVER_S = 10**9, 1e9  # interval in steps, so that no peer ever mixes, and in seconds
STEP_S, SAMPLES = 0.1, 8
UNSIGNED_BYTES = 96  # size of a key and a signature in msgpack, minus that of the empty values in simulated records


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
        swarm.add_peer(np.zeros(4, np.float32), step_s=STEP_S, samples_per_step=SAMPLES, founder=True)
    swarm.introduce()

    def signed() -> int:
        return sum(host.peer.membership.me.sequence for host in swarm.hosts)

    def error() -> float:
        trained = SAMPLES * peers * swarm.now / STEP_S
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
    parser.add_argument("--peers", type=int, nargs="+", default=[10, 100, 1_000], help="sizes of the swarms")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--idle", action="store_true", help="nobody takes a step, so that there is nothing to tell")
    parser.add_argument("--watch-s", type=float, help="by default 300 s, or 0.6 s for each member")
    options = parser.parse_args()
    for peers in options.peers:
        watch_s = options.watch_s or max(300.0, 0.6 * peers)
        print(json.dumps(load(peers, options.seed, options.idle, watch_s)), flush=True)


if __name__ == "__main__":
    main()
