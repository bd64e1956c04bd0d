"""A checkpoint of any run loads, even with absurd numbers, and leaves nothing of the earlier weights."""

import dataclasses
import json
import math
import threading
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from gossip.averaging.jobs import MixJob
from gossip.effects import MemberState, Mix
from gossip.errors import CheckpointError
from gossip.ids import MemberRecord, PeerId
from gossip.wire.records import check, trusting
from node import Node
from node.loop import network_side
from node.loop.held_run import HeldRun
from node.model import checkpoint
from tests.node.trainees import filled, heard_of, linear

MOST = 2**53 - 1
RUN_ID = "ab" * 16


def saved(path, **meta):
    weights = linear(5).state_dict()
    checkpoint.save(path, weights, None, meta)
    return weights


@pytest.mark.parametrize(
    ("meta", "samples", "version"),
    [
        ({"swarm_samples": 2**70, "version": 1e300}, MOST, MOST),
        ({"swarm_samples": 2**53, "version": 2.0**53}, MOST, MOST),
        ({"swarm_samples": -5, "version": -1.0}, 0, 0.0),
        ({"swarm_samples": math.nan, "version": math.nan}, 0, 0.0),
        ({"swarm_samples": math.inf, "version": math.inf}, MOST, MOST),
        ({"swarm_samples": "many", "version": None}, 0, 0.0),
        ({"swarm_samples": [1], "version": {"a": 1}}, 0, 0.0),
        ({}, 0, 0.0),
    ],
    ids=["beyond 64 bits", "one too many", "negative", "nan", "infinite", "text", "nested", "none"],
)
def test_a_checkpoint_with_numbers_that_cannot_be_loads_and_its_node_is_not_refused(
    meta, samples, version, quick, tmp_path
):
    weights = saved(tmp_path / "run", run_id=RUN_ID, **meta)
    model = linear()
    with Node(model, config=quick) as node:
        node.load(tmp_path / "run")
        node.step(samples=4)
        peer = node._training.network.peer
        record = peer.membership.me
        check(record, trusting)
        assert record.run_id.hex() == RUN_ID
        assert record.progress == samples
        assert min(version, 2**52) <= peer.local.version <= version + 1  # A node keeps to half of what others read.
    assert torch.equal(model.weight, weights["weight"])


@pytest.mark.parametrize(
    ("tensors", "meta", "sentence"),
    [
        *[
            ({}, {"run_id": run_id}, "run that cannot be")
            for run_id in ("zz" * 16, "ab", "", 5, ["ab"], "ab" * 17, "\u00fc" * 32)
        ],
        ({"weight": torch.ones(2, 7)}, {}, r"another model than this node's \(tensor 'weight' has shape \(2, 4\) here"),
        ({"scale": torch.ones(2)}, {}, "'scale' is in the file and not here"),
        ({"weight": torch.ones(2, 4, dtype=torch.int32)}, {}, "'weight' is torch.int32 in the file and torch.float32"),
    ],
)
def test_a_checkpoint_that_cannot_be_is_refused_in_a_sentence_and_the_model_is_left_alone(
    tensors, meta, sentence, quick, tmp_path
):
    checkpoint.save(tmp_path / "run", linear(5).state_dict() | tensors, None, meta)
    model = linear()
    before = model.weight.detach().clone()
    with Node(model, config=quick) as node:
        with pytest.raises(CheckpointError, match=sentence) as error:
            node.load(tmp_path / "run")
        assert str(tmp_path / "run") in str(error.value)
        node.step()
    assert torch.equal(model.weight, before)


def test_weights_of_no_run_begin_one_and_what_is_not_loaded_is_said(quick, tmp_path, caplog):
    weights = filled(linear(), 7.0).state_dict()
    save_file(weights, tmp_path / "pretrained.safetensors")
    model = linear()
    with Node(model, config=quick) as node:
        assert node.load(tmp_path / "pretrained.safetensors") == {}
        assert torch.equal(model.weight, weights["weight"])
        assert node.swarm_samples == 0
        node.step(samples=4)
        assert node.swarm_samples == 4
        filled(model, 1.0)
        node.load(tmp_path / "pretrained.safetensors")  # Trained weights are worth more than any file.
        assert model.weight.unique().tolist() == [1.0]
        node.save(tmp_path / "ours")
        node.load(tmp_path / "ours.safetensors")
        node.load_state_dict(node.state_dict())
        node._training.network.sync()
    assert [sentence.split(": ", 1)[1] for sentence in heard_of(caplog, "load")] == [
        f"{path} is not loaded: the run that this node holds has 4 samples behind it, and stays.{more}"
        for path, more in (
            (tmp_path / "pretrained.safetensors", ""),
            (tmp_path / "ours.safetensors", ""),
            (
                "The state of a checkpoint",
                " Weights that the program has loaded count as its newest: load both before the Node starts.",
            ),
        )
    ]


def test_a_checkpoint_that_is_not_loaded_leaves_the_pass_of_the_loop_alone(quick, tmp_path):
    data = torch.arange(32.0)
    with Node(linear(), config=quick) as node:
        for number in range(2):
            for batch in node.shard(data, 4):
                node.step(samples=len(batch))
            if number == 0:
                node.save(tmp_path / "first")
        passes = node.state_dict()["samplers"]
        node.load(tmp_path / "first")
        assert node.state_dict()["samplers"] == passes


def hundred(train, until, tmp_path):
    """Save a checkpoint whose weights are all 100. Return a trained node of another run."""
    first = train(linear(1))
    until(lambda: first.node.metrics().samples > 20)

    first.do(lambda node: (filled(first.model, 100.0), node.save(tmp_path / "run")))
    first.stop()
    second = train(linear(2))
    until(lambda: second.node.metrics().samples > 0)
    return second


def test_a_mixing_job_of_earlier_weights_does_not_move_the_outer_step_of_loaded_ones(train, until, tmp_path):
    second = hundred(train, until, tmp_path)
    side = second.side

    def load(node):
        averager, pool, call = side.network.runtime.averager, side.live.pool, side.network.call
        jobs = []
        for _ in range(2):
            snapshot, difference = pool.take(), pool.take()
            snapshot.array[:] = difference.array[:] = 1.0
            averager.boundary.begin_update()
            jobs.append(MixJob(averager, snapshot, difference, None, Mix(1, 0.5)))

        def compute(*what):  # One job runs before the network thread learns of the load, the other afterwards.
            jobs[0].run()
            side.network.call = call
            return call(*what)

        side.network.call = compute
        node.load(tmp_path / "run")
        jobs[1].run()
        for job in jobs:
            job.finish()
        return side.live.outer._phi.copy(), side.live.outer._momentum.copy(), averager.boundary.pending_updates

    phi, momentum, owed = second.do(load)
    assert (phi == 100.0).all()
    assert not momentum.any()
    assert not owed
    assert all((parameter == 100.0).all() for parameter in second.model.parameters())


def test_load_returns_when_the_network_thread_has_dropped_what_was_pending(train, until, tmp_path, monkeypatch):
    """Loading waits however long that takes: a later update would be added to the new weights."""

    class Hasty(threading.Event):
        def wait(self, timeout=None):
            return super().wait(None if timeout is None else timeout / 100)

    second = hundred(train, until, tmp_path)
    side, gate, waits = second.side, threading.Event(), threading.Event()

    def load(node):
        monkeypatch.setattr(
            network_side, "threading", SimpleNamespace(Event=Hasty, current_thread=threading.current_thread)
        )
        side.network.call(lambda: (waits.set(), gate.wait(20)))
        waits.wait(10)
        opening = threading.Timer(0.5, gate.set)
        opening.start()
        node.load(tmp_path / "run")
        return gate.is_set(), side.network.runtime.averager.outside_replacements

    assert second.do(load) == (True, 1)


def overwritten(caplog):
    return heard_of(caplog, "overwritten")


def test_nodes_of_a_run_that_save_to_one_path_are_told_once(train, until, caplog, tmp_path):
    first = train(linear())
    second = train(linear(1), seeds=[first.node.address])
    for node in (first, first, second, second, second):
        node.do(lambda node: node.save(tmp_path / "run"))
        node.do(lambda node: node.save(tmp_path / node.id))
    until(lambda: overwritten(caplog))
    first.do(lambda node: node.save(tmp_path / "run"))
    until(lambda: len(overwritten(caplog)) == 2)
    for sentence, node in zip(overwritten(caplog), (first, second), strict=True):
        assert f"Member {node.node.id[:8]} saves to {tmp_path / 'run'} as well" in sentence
        assert sentence.endswith("save on one node alone, or put node.id into the path.")


def test_a_node_that_ends_right_after_its_save_is_named_by_one_that_saves_later(train, until, caplog, tmp_path):
    first = train(linear())
    second = train(linear(1), seeds=[first.node.address])
    first.do(lambda node: node.save(tmp_path / "run"))
    first.stop()
    until(lambda: second.side.network.peer.membership.state(first.side.me) is MemberState.LEFT)
    second.do(lambda node: node.save(tmp_path / "run"))
    until(lambda: overwritten(caplog))


def test_a_node_may_save_over_its_own_checkpoint_and_those_of_dead_nodes_and_of_other_runs(train, caplog, tmp_path):
    first = train(linear())
    second = train(linear(1), seeds=[first.node.address])
    run = first.node._training.network.peer.view.run_id.hex()
    membership = second.side.network.peer.membership
    dead = MemberRecord(PeerId(b"d" * 16), b"k" * 32, 1, run_id=bytes.fromhex(run), ready=True)
    membership._table.add(dead, MemberState.DEAD, 0.0).was_contacted = True
    checkpoint_of = {"node": dead.id.hex(), "run_id": run}, {"node": first.node.id, "run_id": "cd" * 16}, {"node": 7}
    for meta in (*checkpoint_of, {}):
        saved(tmp_path / "run", **meta)
        second.do(lambda node: node.save(tmp_path / "run"))
        second.do(lambda node: node.save(tmp_path / "run"))
    (tmp_path / "run.json").write_text("[]")
    second.do(lambda node: node.save(tmp_path / "run"))
    assert overwritten(caplog) == []


def test_loaded_weights_have_the_mass_of_weights_of_which_nothing_was_pushed_away(quick, tmp_path):
    """Otherwise a node that had pushed its mass away would count for nothing with the loaded weights."""
    saved(tmp_path / "run", run_id=RUN_ID, swarm_samples=100, version=1.0)
    config = dataclasses.replace(quick, mixing="push-sum")
    with Node(linear(), config=config) as node:
        boundary = node._training.live.boundary
        boundary.mass = 0.125
        node.load(tmp_path / "run")
        assert boundary.mass == 1.0


@pytest.mark.parametrize(("uncounted", "sharers", "samples"), [(0, 3, 1_000), (16, 1, 1_016), (16, 3, 1_048)])
def test_a_checkpoint_counts_samples_since_the_last_report_for_every_member_of_the_run(uncounted, sharers, samples):
    run = SimpleNamespace(
        network=SimpleNamespace(
            peer=SimpleNamespace(
                view=SimpleNamespace(run_id=b"r", finished=False), local=SimpleNamespace(version=2.0)
            ),
            service=SimpleNamespace(identity=SimpleNamespace(id=b"i")),
        ),
        ranks=SimpleNamespace(uncounted_samples=uncounted),
        view=SimpleNamespace(sharers=sharers, owners=()),
        live=SimpleNamespace(state=SimpleNamespace(layout=SimpleNamespace(contents_fingerprint="f"))),
        samplers=SimpleNamespace(state=dict),
        swarm_samples=1_000, steps=10, samples=160,
    )  # fmt: skip
    state = HeldRun.state_dict(run)
    assert (state["samples"], state["swarm_samples"]) == (160 + uncounted, samples)


# -- states for checkpoints that the program writes -----------------------------------------------------------------
def test_a_run_goes_on_from_the_state_that_another_checkpoint_holds(quick):
    data = torch.zeros(8, 4)
    with Node(linear(), config=quick) as node:
        for _ in range(2):
            for batch in node.shard(data, 4):
                node.step(samples=len(batch))
        written = json.dumps(node.state_dict(), allow_nan=False)
        run_id = node._training.network.peer.view.run_id
    kept = linear(5)  # The program restores the weights itself.
    before = [value.clone() for value in kept.parameters()]
    node = Node(kept, config=quick)
    node.load_state_dict(json.loads(written))
    with node:
        assert node._training.network.peer.view.run_id == run_id
        assert node.swarm_samples == 16
        assert node._training.samplers.make(data).begin().number == 2, "the next pass divides the data in another way"
        assert node.state_dict()["version"] == json.loads(written)["version"]
        node.step(samples=4)
        assert node.swarm_samples == 20
    assert all(map(torch.equal, before, kept.parameters()))


@pytest.mark.parametrize("ours", [True, False], ids=["its own run", "another run"])
def test_where_a_swarm_lives_its_weights_are_taken_and_nothing_counts_twice(train, quick, ours):
    donor = train(linear(1))
    donor.do(lambda node: node.load_state_dict({"run_id": "cd" * 16, "swarm_samples": 10**6}))
    state = donor.do(lambda node: node.state_dict())
    if not ours:
        state |= {"run_id": "ab" * 16, "swarm_samples": 10**7}
    model = linear(2)
    node = Node(model, seeds=[donor.node.address], config=quick)
    node.load_state_dict(state)
    with node:
        assert node.state_dict()["run_id"] == "cd" * 16
        assert 10**6 <= node.swarm_samples < 2 * 10**6
        assert torch.equal(model.weight, donor.model.weight)


@pytest.mark.parametrize(
    ("state", "sentence"),
    [
        ({"fingerprint": "00" * 16}, "belongs to another model"),
        ({"run_id": "no run"}, "names a run that cannot be"),
        ([], "is a mapping"),
    ],
)
def test_a_state_that_cannot_be_is_refused_in_a_sentence(quick, state, sentence):
    with pytest.raises(CheckpointError, match=sentence):
        Node(linear(), config=quick).load_state_dict(state)
