"""Every published method, codec, part and mixing between real nodes over loopback: vectors come closer.

No node trains, so that mixing alone moves the vectors: a pair keeps its mean, and push-sum keeps the sum of mass times
vector.
"""

from dataclasses import dataclass, field

import numpy as np
import pytest

from gossip.config import Config
from gossip.config.config import as_published
from gossip.config.methods import METHODS
from tests.harness.configs import tuned

ELEMENTS = 600  # three blocks of a codec, the last one short
NODES = 3
QUICK = {"join_timeout_s": 3.0, "bench_s": 0.2}
RARELY = 8  # a published interval longer than this is shortened: the method is the same, and the test quicker
SLOW = {"sparta": 0.5, "clippedgossip": 0.5, "streaming-diloco": 0.7, "int4": 0.7}
"""Methods that bring little at each mix: what of the first disagreement may be left. Of others a twentieth."""

WITH: dict[str, dict[str, object]] = {
    **{codec: {"codec": codec} for codec in ("bf16", "fp16", "int8", "int4", "moniqua4")},
    "mask 0.3": {"part": "mask 0.3", "mix_every_steps": 1},
    "push-sum to two": {"mixing": "push-sum", "partners": 2},
    "clip": {"filter": "clip"},
    "nearest": {"selection": "nearest"},
    "torus": {"selection": "torus", "partners": 0},
}


def configured(name: str) -> Config:
    if name in WITH:
        return tuned(**({"mix_every_steps": 2, "filter": "none", "outer_momentum": 0.0} | WITH[name] | QUICK))
    changes = as_published(name)
    if 1 < changes["mix_every_steps"] < 1000:
        changes["mix_every_steps"] = min(changes["mix_every_steps"], RARELY)
    if name == "sparta":
        changes["part"] = "mask 0.05"  # A tenth of that is published: a mix would move three elements.
    return tuned(**(changes | QUICK))


@dataclass
class Swarm:
    """Nodes that began with the same vector, and were then pushed apart."""

    trainees: list
    vectors: list[np.ndarray]
    start: float  # every element, of every node
    pushed: list[tuple[float, np.ndarray]] = field(default_factory=list)  # The mass at that moment, and the shift.

    def push_apart(self) -> None:
        for number, (trainee, vector) in enumerate(zip(self.trainees, self.vectors, strict=True)):
            noise = np.random.default_rng(number).normal(size=ELEMENTS).astype(np.float32)

            def push(node, vector=vector, noise=noise):
                vector += noise
                return node._training.live.boundary.mass

            self.pushed.append((trainee.do(push), noise))

    @property
    def mass(self) -> float:
        return sum(trainee.side.live.boundary.mass for trainee in self.trainees)

    @property
    def disagreement(self) -> float:
        """Return the root mean square distance from the mean."""
        return float(np.sqrt(np.mean(np.var(self.vectors, axis=0))))

    def mixed(self, times: int) -> bool:
        return all(trainee.node.metrics().exchanges_done >= times for trainee in self.trainees)


@pytest.fixture
def swarm(train, until):
    def start(config: Config) -> Swarm:
        start = 10.0 if config.filter == "balance" else 1.0  # Balance accepts what is close relative to the norm.
        vectors = [np.full(ELEMENTS, start, np.float32) for _ in range(NODES)]
        trainees: list = []
        for vector in vectors:
            seeds = [trainees[0].node.address] if trainees else []
            trainees.append(train({"x": vector}, config=config, seeds=seeds))

        def complete() -> bool:  # A busy machine may begin two runs, one of which gives way.
            views = [trainee.side.network.peer.view for trainee in trainees]
            is_one_run = len({view.run_id for view in views}) == 1 and all(view.ready for view in views)
            boundaries = [trainee.side.live.boundary for trainee in trainees]
            is_adopting = any(boundary.adoption is not None or boundary.has_requests for boundary in boundaries)
            has_all = all(trainee.node.metrics().members_alive == NODES for trainee in trainees)
            return is_one_run and has_all and not is_adopting

        until(complete)
        return Swarm(trainees, vectors, start)

    return start


NAMES = [name for name in METHODS if name != "local-sgd"]


@pytest.mark.parametrize("name", [*NAMES, *WITH])
def test_nodes_that_were_pushed_apart_come_closer(name, swarm, until):
    config = configured(name)
    nodes = swarm(config)
    nodes.push_apart()
    first = float(np.sqrt(np.mean(np.var([noise for _, noise in nodes.pushed], axis=0))))
    until(lambda: nodes.mixed(5) and nodes.disagreement < SLOW.get(name, 0.05) * first)
    if not config.plain or config.mixing == "row-stochastic" or config.filter == "clip" or name in SLOW:
        return  # These do not keep the mean, or reach it slowly.
    if config.kappa:
        return  # the corrections of all nodes add up to 0, but each node applies its own at each of its steps
    if config.codec == "fp32":
        until(lambda: nodes.disagreement < 1e-4 * first)
    # Mass times vector, in flight as well, is what it was. A pair has a mass of 1 on either side.
    expected = nodes.start + np.sum([mass * noise for mass, noise in nodes.pushed], axis=0) / NODES
    found = np.average(nodes.vectors, axis=0)
    assert np.sqrt(np.mean((found - expected) ** 2)) < 2 * nodes.disagreement + 1e-5
    if config.mixing == "push-sum":
        until(lambda: abs(nodes.mass - NODES) < 1e-9)  # Check between two pushes.


def test_a_node_of_local_sgd_mixes_with_nobody(swarm, until):
    nodes = swarm(configured("local-sgd"))
    nodes.push_apart()
    until(lambda: all(trainee.node.metrics().steps > 50 for trainee in nodes.trainees))
    assert nodes.disagreement > 0.5  # They are as they were pushed.
    assert not nodes.mixed(1)
