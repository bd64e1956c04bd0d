"""Peers with unlike data and a normalised optimizer learn together what each alone unlearns."""

import pytest

from gossip import Config
from sim.scenario.scenario import Scenario
from sim.scenario.task import Optimizer, Partition, Task
from sim.simulation import simulate
from tests.sim.scenarios import digest

MUON = Optimizer(name="muon", lr=0.02, adam_lr=0.005)


def scenario(level: str, mix_state: str, optimizer: Optimizer) -> Scenario:
    """Return a swarm whose peers hold two or three classes of the ten each."""
    task = Task(
        dataset="digits", model="mlp", batch_size=8, optimizer=optimizer,
        partition=Partition(kind="dirichlet", alpha=0.1),
    )  # fmt: skip
    return Scenario(
        peers=8, duration_s=40.0, seed=5, fidelity=level, task=task,
        gossip=Config(mix_every_steps=2, mix_state=mix_state),
    )  # fmt: skip


def accuracy(*arguments) -> float:
    """Return the mean accuracy of the peers' own models at the end."""
    return simulate(scenario(*arguments), progress=False).summary["accuracy"]["mean"]


@pytest.mark.parametrize("level", ["whole", "exchange"])
def test_muon_learns_from_uneven_data_once_its_momentum_is_mixed(level):
    assert accuracy(level, "auto", MUON) > accuracy(level, "off", MUON) + 0.1


def test_sgd_takes_the_same_path_whether_moments_would_be_mixed_or_not():
    runs = {mix_state: digest(scenario("whole", mix_state, Optimizer(lr=0.1))) for mix_state in ("auto", "off")}
    assert runs["auto"] == runs["off"]


def test_a_part_costs_the_bytes_of_its_codec():
    off, auto = (
        simulate(scenario("exchange", mix_state, MUON), progress=False).summary["bytes_sent"]
        for mix_state in ("off", "auto")
    )  # fmt: skip
    assert off < auto < 1.5 * off
