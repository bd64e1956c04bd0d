"""The use of a link's time if a mix is wanted at every step: 4 peers, 25 ms one way, 100 Mbit/s, 1 % loss, bbr.

    python benchmarks/wide.py                          the scenarios of benchmarks/wide/, seeds 1 to 5

Each peer is sampled every millisecond of virtual time. *Used* is the rate of vector bytes that a peer sent, relative to
the link's rate. *Beside a stream* is the same relative to a connection on which both sides send all the time.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
from collections import Counter
from pathlib import Path

from gossip.exchange.transitions import State
from sim.engine.host import Host
from sim.scenario.scenario import Scenario
from sim.simulation import Simulation
from sim.world.line import Line, line_key
from sim.world.network import NetworkModel
from sim.world.tcp import Back

LOOK_S, BEGINS_S = 0.001, 20.0  # sampling interval; start of the measurement, after links and timeouts have settled
ROWS = (
    "streaming",
    "rest of a stream",
    "COMMIT",
    "boundary",
    "Accept",
    "ahead alone",
    "update",
    "backing off",
    "other",
)


def activity_of(simulation: Simulation, host: Host) -> str:
    """Return the activity of a peer at this moment."""
    streams = simulation.swarm.sessions.flows
    if any(sender is host for sender, _ in streams):
        return "streaming"
    states = {exchange.state for exchange in host.peer.exchanges.table.values() if exchange.has_slot}
    for state, word in (
        (State.STREAMING, "rest of a stream"), (State.VERIFIED, "COMMIT"), (State.PREPARING, "boundary"),
        (State.OFFERED, "Accept"),
    ):  # fmt: skip
        if state in states:
            return word
    if states:
        return "ahead alone"
    if host.boundary.pending_updates or host.boundary.arrived_updates:
        return "update"
    return "backing off" if host.peer.schedule.retry_at > host.events.now else "other"


def play(scenario: Scenario) -> tuple[Counter[str], float]:
    """Simulate a scenario; return the samples by activity, and the vector bytes that a peer sent a second."""
    assert scenario.duration_s is not None
    simulation, samples = Simulation(scenario), Counter[str]()
    swarm = simulation.swarm
    swarm.run_until(BEGINS_S)
    before, now = swarm.links.carrier.flows.sent_bytes, BEGINS_S
    while now < scenario.duration_s:
        now += LOOK_S
        swarm.events.run_until(now)
        samples.update(activity_of(simulation, host) for host in swarm.hosts)
    peer_seconds = (scenario.duration_s - BEGINS_S) * scenario.peers
    samples["mixes"] = swarm.sessions.mixes
    return samples, (swarm.links.carrier.flows.sent_bytes - before) / peer_seconds


def kept_stream(network: NetworkModel, rate_bytes_s: float, seconds: float, seed: int) -> float:
    """Return the bytes/s in each direction of a connection on which both sides send all the time."""
    assert network.transport is not None
    rtt, size_bytes = 2 * network.latency(0, 1), seconds * rate_bytes_s
    line, back = (Line(line_key(seed, place, 0.0), 0.0, network.loss_of(0, 1)) for place in (0, 1))
    return size_bytes / network.transport.seconds(line, size_bytes, rate_bytes_s, rtt, 0.0, Back(back, rate_bytes_s))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    here = Path(__file__).parent / "wide"
    parser.add_argument("scenarios", nargs="*", type=Path, default=sorted(here.glob("*.toml")))
    parser.add_argument("--seeds", type=int, default=5)
    options = parser.parse_args()
    for path in options.scenarios:
        scenario = Scenario.from_toml(path)
        assert scenario.duration_s is not None
        runs = []
        for seed in range(1, options.seeds + 1):
            seeded = dataclasses.replace(scenario, seed=seed)
            samples, rate = play(seeded)
            network = Simulation(seeded).swarm.network
            raw = kept_stream(network, network.up_bytes_s(0), scenario.duration_s, seed)
            runs.append((samples, rate / network.up_bytes_s(0), rate / raw))
        used, beside = (statistics.median(run[place] for run in runs) for place in (1, 2))
        looks = scenario.peers * (scenario.duration_s - BEGINS_S) / LOOK_S
        print(
            f"{scenario.name}: used {used:.3f} of the rate, {beside:.3f} beside a stream "
            f"({min(run[2] for run in runs):.3f} to {max(run[2] for run in runs):.3f})"
        )
        for word in ROWS:
            share = statistics.median(run[0][word] / looks for run in runs)
            if share > 0.0005:
                print(f"  {word:<18} {share:.3f}")
        mixes = statistics.median(run[0]["mixes"] for run in runs) / scenario.peers / scenario.duration_s
        print(f"  mixes a peer and second {mixes:.2f}")


if __name__ == "__main__":
    main()
