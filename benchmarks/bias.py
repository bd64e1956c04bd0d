"""The drift that a patient attacker causes: in every exchange it pushes its partner in one fixed direction.

    python benchmarks/bias.py [--peers 8 32] [--liars 1 3] [--hours 1] [--seed 1] [--push 0.25]

The attacker trains and mixes like the others. It sends its partner's own vector plus a step in the fixed direction. The
step is the longest that the partner's radius does not clip at that moment, or the share --push of it; no real attacker
can know it better. The job
is digits, IID, with steps of one second and a mix every eight steps, so an hour has 450 intervals. The same swarm
without attackers is the reference. For each quarter of an hour the table states how far the honest models moved in that
direction, relative to the norm of the honest mean. It also has the accuracy.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from numpy.typing import NDArray

from gossip.averaging.pair import PairAverage
from sim import Scenario
from sim.engine.host import FlowTransfer, Host
from sim.engine.sessions import Sessions
from sim.scenario.adversaries import Attacker, Sight
from sim.simulation import Simulation

Floats = NDArray[np.float32]
INTERVAL_STEPS, STEP_S = 8, 1.0
LOOKS = 4  # measurements an hour


def scenario(peers: int, liars: int, hours: float, seed: int) -> Scenario:
    table: dict[str, Any] = {
        "name": "bias", "seed": seed, "peers": peers, "duration_s": hours * 3600,
        "task": {"dataset": "digits", "partition": {"kind": "iid"}, "optimizer": {"lr": 0.1}},
        "gossip": {"mix_every_steps": INTERVAL_STEPS},
        "compute": {"step_s": {"kind": "constant", "value_ms": 1000 * STEP_S}},
        "network": {"latency": {"kind": "constant", "value_ms": 0}},
        "membership": {"mode": "ideal"},
    }  # fmt: skip
    if liars:
        table["attackers"] = {"share": liars / peers, "kind": "sign-flip"}  # the kind is replaced by the push below
    return Scenario.from_mapping(table)


def push(sessions: Sessions, direction: Floats, share: float) -> None:
    """Make attackers send their partner's vector plus this share of the longest step that the radius does not clip."""
    usual_send = sessions.send_snapshot

    def send(host: Host, transfer: FlowTransfer, pair: PairAverage) -> None:
        partner = sessions.links.by_id[pair.partner]
        if host.attacker is None or partner.attacker is not None:
            usual_send(host, transfer, pair)
            return
        snapshot = partner.averager.snapshot_of(pair.session)
        theirs = pair.ours if snapshot is None else snapshot.array
        longest = partner.peer.exchanges.filter.longest_whole(theirs.size)  # type: ignore[attr-defined]
        vector = theirs + np.float32(share * longest) * direction
        host.attacker = Pushing(host.attacker, vector)
        usual_send(host, transfer, pair)
        host.attacker = host.attacker.before

    sessions.send_snapshot = send  # type: ignore[method-assign]


class Pushing(Attacker):
    """An attacker that sends one given vector; ``before`` is the attacker that it replaces for one message."""

    def __init__(self, before: Attacker, vector: Floats) -> None:
        super().__init__(before.spec, before.seed, before.name, before.peers)
        self.before, self.vector = before, vector

    def false_values(self, values: Floats, session: int, sight: Callable[[], Sight] | None = None) -> Floats:
        return self.vector


def play(peers: int, liars: int, hours: float, seed: int, share: float) -> tuple[list[float], float, float]:
    """Simulate a swarm and measure its honest peers.

    Returns:
        The position of the honest mean along the direction at each measurement, the mean's norm at the end, and the
        accuracy in %.
    """
    simulation = Simulation(scenario(peers, liars, hours, seed))
    size = simulation.learners.elements
    signs = np.random.default_rng(seed).choice([-1.0, 1.0], size)
    direction = (signs / math.sqrt(size)).astype(np.float32)
    push(simulation.swarm.sessions, direction, share)
    honest = [row for row, name in enumerate(simulation.names) if name not in simulation.attackers]
    along, due = [], 3600.0 / LOOKS
    for _ in simulation.slices():
        if simulation.level.now >= due * (len(along) + 1):
            along.append(float(simulation.learners.matrix[honest].mean(axis=0) @ direction))
    mean = simulation.learners.matrix[honest].mean(axis=0)
    along.append(float(mean @ direction))
    return along, float(np.linalg.norm(mean)), 100 * simulation.row()["accuracy_mean"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--liars", type=int, nargs="+", default=[1, 3])
    parser.add_argument("--hours", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--push", type=float, default=1.0, help="the share of the longest step")
    arguments = parser.parse_args()
    print("| peers | liars | moved, of the honest mean's length | accuracy, % | without liars, % | took |")
    print("|---|---|---|---|---|---|")
    for peers, liars in zip(arguments.peers, arguments.liars, strict=True):
        began = time.monotonic()
        usual_along, _, usual_accuracy = play(peers, 0, arguments.hours, arguments.seed, 0.0)
        along, length, accuracy = play(peers, liars, arguments.hours, arguments.seed, arguments.push)
        moved = ", ".join(
            f"{100 * (attacked - usual) / length:.0f} %" for attacked, usual in zip(along, usual_along, strict=False)
        )
        took = time.monotonic() - began
        print(f"| {peers} | {liars} | {moved} | {accuracy:.1f} | {usual_accuracy:.1f} | {took:.0f} s |", flush=True)


if __name__ == "__main__":
    main()
