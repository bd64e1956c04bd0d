"""Small scenarios that tests play, and helpers that read a run."""

from gossip.config import Config
from sim.scenario.scenario import ChurnSpec, Compute, Distribution, Scenario
from sim.scenario.task import Optimizer, Task
from sim.simulation import Simulation, simulate

MOMENTUM = Optimizer(lr=0.05, momentum=0.9)
ADAMW = Optimizer(name="adamw", lr=0.003, weight_decay=0.1)
JITTERED = Compute(step_s=Distribution.lognormal(0.1, 0.3))
COMING_AND_GOING = ChurnSpec(up=Distribution.exponential(6), down=Distribution.exponential(2), farewell=0.5)
AVERAGING = Task(dataset="averaging", elements=8)


def small(**changes) -> Scenario:
    """Six peers, a few hundred steps of a linear model on digits."""
    scenario = {
        "peers": 6,
        "duration_s": 8.0,
        "fidelity": "whole",
        "task": Task(model="linear", samples_per_peer=20, batch_size=4, optimizer=MOMENTUM),
        "compute": JITTERED,
        "gossip": Config(mix_every_steps=4),
    }
    return Scenario(**scenario | changes)


def hostile(**changes) -> Scenario:
    """Return a scenario with everything that draws at random, at once."""
    latency = {"kind": "quantiles", "name": "internet"}
    network = {"latency": latency, "loss": 0.02, "partitions": [{"at_s": 3.0, "until_s": 6.0}]}
    return small(**{"duration_s": 12.0, "churn": COMING_AND_GOING, "network": network} | changes)


def played(scenario: Scenario) -> Simulation:
    """Play a scenario to its end; all steps that have ended by then are in the vectors."""
    run = Simulation(scenario)
    for _ in run.slices():
        pass
    run.swarm.run_until(run.swarm.now)
    return run


def log_of(run: Simulation) -> str:
    return run.swarm.events.digest().hexdigest()


def digest(scenario: Scenario) -> str:
    return simulate(scenario, progress=False).summary["digest"]
