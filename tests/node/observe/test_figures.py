"""The figures of a node: names that programs rely on, and a page that has them all."""

import copy
import pickle
import threading
from collections.abc import Mapping
from types import SimpleNamespace

import pytest

from gossip.kernel import implementation
from node import Metrics
from node.observe.figures import FIGURES, VERSION, Source, reading, refusals_of, status_reading
from node.observe.status import METRICS
from sim import Scenario
from tests.harness.marks import slow
from tests.harness.world import World
from tests.sim.scenarios import played


def source() -> Source:
    swarm = World(9)
    [node] = swarm.swarm(1)
    links = SimpleNamespace(bytes_sent=1234, bytes_received=56, ignored_messages=3, lossy_links=2, striped_links=1)
    return Source(node.peer, links, steps=7, samples=28, swarm_samples=30, model_file="m.safetensors")


VALUES = {
    "steps": 7, "samples": 28, "swarm_samples": 30, "loss": None, "members_alive": 1, "exchanges_done": 0,
    "exchanges_failed": 0, "exchange_seconds": None, "step_overhead_seconds": None, "bytes_sent": 1234,
    "bytes_received": 56, "consensus_distance": None, "partner": None, "ready": True, "alone": False,
    "messages_ignored": 3, "events_dropped": 0, "version": VERSION, "kernel": implementation(), "lossy_links": 2,
    "wide_links": 1, "faults": 0, "network_restarts": 0, "interval_steps": 8, "codec": "fp32",
    "model_file": "m.safetensors",
}  # fmt: skip
TABLES = {"refused": (), "suspicious": (), "mixed": (), "failures": ()}


def test_the_log_has_these_figures_and_what_is_not_known_is_null():
    names = (
        "steps", "samples", "swarm_samples", "loss", "members_alive", "exchanges_done", "exchanges_failed",
        "exchange_seconds", "bytes_sent", "bytes_received", "partner", "alone", "interval_steps", "codec",
        "model_file",
    )  # fmt: skip
    assert reading(source()) == {name: VALUES[name] for name in names}
    logged = [figure.name for figure in FIGURES if figure.logged]
    assert sorted(logged) == sorted([*names, "mb_s_sent", "mb_s_received"])


def test_an_honest_member_whose_vector_was_shortened_is_not_among_the_refused():
    at = source()
    for code in ("clipped", "clipped", "direction", "budget", "norm"):
        at.peer.exchanges.refusals.add(at.peer.membership.me.id, code)
    assert refusals_of(at) == ((at.peer.membership.me.id.hex(), "norm", 1),)


ONE_PACE = {"kind": "constant", "value_s": 1.0}
PACES, UNLIKE_PACES = ({"kind": "lognormal", "median_s": 1.0, "sigma": sigma} for sigma in (0.8, 1.2))


@pytest.mark.parametrize(
    ("peers", "rate", "step_s", "duration_s", "seed"),
    [
        (8, 0.5, UNLIKE_PACES, 480.0, 3),
        slow(12, 0.4, PACES, 960.0, 4, id="12-nodes-for-longer"),
        slow(32, 1.0, ONE_PACE, 960.0, 1, id="32-nodes-at-the-edge-of-stability"),
    ],
)
def test_in_a_swarm_of_uneven_data_the_status_shows_no_member_as_refused_or_misbehaving(
    peers, rate, step_s, duration_s, seed
):
    """Some vectors are shortened, because a member with data of its own is far from the others."""
    partition = {"kind": "dirichlet", "alpha": 0.05}
    scenario = {
        "seed": seed, "peers": peers, "duration_s": duration_s, "fidelity": "whole", "compute": {"step_s": step_s},
        "task": {"dataset": "digits", "partition": partition, "optimizer": {"lr": rate}},
        "gossip": {"mix_every_steps": 8},  # Nodes that mix more often are closer to each other.
    }  # fmt: skip
    hosts = played(Scenario.from_mapping(scenario)).swarm.hosts
    shortened = {code for host in hosts for _, code in host.peer.exchanges.refusals.counts}
    assert shortened == {"clipped", "direction", "budget"}, "or nothing is proved"
    links = SimpleNamespace(bytes_sent=0, bytes_received=0, ignored_messages=0, lossy_links=0, striped_links=0)
    for host in hosts:
        shown = status_reading(Source(host.peer, links, steps=0, samples=0, swarm_samples=0))
        assert (shown["refused"], shown["suspicious"], shown["failures"]) == ((), (), ())


def test_a_status_has_its_figures_in_the_order_that_other_versions_read():
    assert METRICS[:28] == (
        "id", "address", "swarm", "steps", "samples", "swarm_samples", "loss", "members_alive", "exchanges_done",
        "exchanges_failed", "bytes_sent", "bytes_received", "consensus_distance", "ready", "alone", "refused",
        "messages_ignored", "suspicious", "mixed", "failures", "version", "kernel",
        "lossy_links", "wide_links", "faults", "network_restarts",
        "interval_steps", "codec",
    )  # fmt: skip
    assert list(status_reading(source()).values()) == [(VALUES | TABLES)[name] for name in METRICS[3:]]


def test_metrics_are_a_mapping_of_every_figure_that_is_one_value_and_none_before_there_is_any():
    metrics = Metrics.of(source())
    assert dict(metrics) == VALUES
    assert all(getattr(metrics, name) == value for name, value in metrics.items())
    assert set(metrics) <= set(dir(metrics))
    assert not {*dir(Mapping)} & {*metrics}, "no figure hides what a mapping can do"


def test_a_reading_does_not_change_and_can_be_copied_and_sent():
    metrics = Metrics.of(source())
    with pytest.raises(AttributeError, match="does not change"):
        metrics.steps = 8
    with pytest.raises(TypeError):
        metrics["steps"] = 8
    with pytest.raises(AttributeError, match="no figure 'step': steps, samples"):
        metrics.step  # noqa: B018
    assert metrics == copy.deepcopy(metrics) == pickle.loads(pickle.dumps(metrics)) == dict(metrics)
    assert repr(metrics).startswith("Metrics(steps=7, samples=28, ")


def test_a_training_thread_reads_the_distance_while_exchanges_end_in_another():
    """Reading it ended a training loop that asked for its metrics."""
    exchanges, ended = source().peer.exchanges, threading.Event()

    def mix() -> None:
        while not ended.is_set():
            exchanges.last_squares.append((0.5, 1.0))

    thread = threading.Thread(target=mix)
    thread.start()
    try:
        for _ in range(100_000):
            assert exchanges.consensus_distance > 0.0
    finally:
        ended.set()
        thread.join()
