"""A node of several ranks: all hold the same weights at the same step, and report the same of the swarm."""

import dataclasses
import threading
import time
from functools import partial

import msgpack
import numpy as np
import pytest
import torch
import trio
from safetensors.torch import load_file

from gossip import Config
from gossip.arithmetic.layout import Layout, Segment
from gossip.averaging.visit import Update
from gossip.ids import parse_address
from gossip.wire.frames import encode
from gossip.wire.messages import Ping
from node.identity.keys import Identity
from node.model import flat as vectors
from node.model.backup import KeptWeights
from node.model.pool import VectorPool
from node.model.snapshot import ModelState
from node.model.state import State
from node.ranks.boundary import RanksBoundary, UpdateTold
from node.ranks.part import WholePart
from tests.harness.configs import tuned
from tests.node.links.test_named import speak
from tests.node.loop.test_last_mixes import RARELY, STEP, STEPS, counter, learned_of
from tests.node.ranks.rank_loops import (
    QUICK,
    flat,
    looked,
    model_of,
    momenta_of,
    net,
    no_errors,
    ranks,
    results,
    run,
    same,
    trained,
    trained_by,
)
from tests.node.ranks.rank_threads import MemoryGroup, RankThread, play
from tests.node.trainees import pull, step_of

pytestmark = pytest.mark.usefixtures("memory_groups")


def group_of(make, loop, **options):
    """Run a loop on two ranks, whose models and optimizers ``make(rank)`` returns."""
    channels = MemoryGroup(2).channels
    return no_errors(play([RankThread(one, *make(one.rank), loop, {"config": QUICK} | options) for one in channels]))


def test_ranks_begin_with_the_weights_and_the_optimizer_of_rank_0():
    _, pair = ranks(lambda node, rank: (flat(model_of(node)), *momenta_of(node)))
    trained(pair[0].model, pair[0].optimizer, 0)  # Rank 0's optimizer has momentum, the other's has none.
    no_errors(play(pair))
    assert all(map(torch.equal, pair[0].result, pair[1].result))


def test_a_partly_frozen_model_with_two_optimizers_is_the_same_on_all_ranks():
    def make(rank):
        model = net(20 + rank)
        model[0].requires_grad_(False)
        return model, [torch.optim.SGD(model[1].parameters(), 0.1 + rank), torch.optim.Adam(model[2].parameters())]

    def loop(node, rank):
        model, optimizers = model_of(node), trained_by(node).optimizers.all
        for step in range(5):
            inputs = torch.full((4, 6), float(step))
            node.step(step_of(lambda inputs=inputs: model(inputs).square().mean(), *optimizers)(), 4)
        return [flat(model)] + [state for one in optimizers for kept in one.state.values() for state in kept.values()]

    pair = group_of(make, loop)
    assert all(map(torch.equal, pair[0].result, pair[1].result))
    assert len(pair[0].result) == 1 + 2 * 3
    assert pair[1].optimizer[0].param_groups[0]["lr"] == 0.1, "rank 0's options too"


def test_a_model_that_brings_its_own_state_is_the_same_on_all_ranks():
    class Doubles(State):
        """A state of more precision than its vectors of float32."""

        def __init__(self, value):
            self.weights = np.full(5, value)
            self.layout = Layout([Segment("weights", (5,), "float32", "parameter")])

        def read(self, out):
            out[:] = self.weights

        def add(self, shift):
            self.weights = self.weights + shift

        def write(self, vector):
            self.weights = vector.astype(np.float64)

    def loop(node, rank):
        for _ in range(5):
            node.step(samples=4)
        return trained_by(node).state.weights.tolist()

    pair = group_of(lambda rank: (Doubles(0.1 + rank), None), loop)
    assert pair[0].result == pair[1].result == [float(np.float32(0.1))] * 5


def beside(config, loop, train, other_make=lambda p: torch.optim.SGD(p, lr=0.01), **options):
    """Run the ranks of one node next to another node of the same swarm, whose weights move them."""
    model = net(99)
    optimizer = other_make(model.parameters())
    other = train(model, optimizer, lambda: trained(model, optimizer, 10**6), config=config)
    _, pair = ranks(loop, config=config, seeds=[other.node.address], **options)
    no_errors(play(pair))
    return pair


SGD = {"make": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9)}
WAYS = {
    "outer step": ({"make": lambda p: torch.optim.AdamW(p, lr=1e-3)}, {}),
    "some elements": (SGD, {"part": "mask 0.3"}),
    "push-sum": (SGD, {"mixing": "push-sum"}),
    "lockstep": (SGD, {"max_version_gap": 0.0}),
    "plain mean": (SGD, {"outer_momentum": 0.0}),
}


@pytest.mark.parametrize("way", WAYS)
def test_all_ranks_hold_the_same_after_every_step_beside_another_node(train, way, monkeypatch):
    monkeypatch.setattr(vectors, "MIN_KERNEL_ELEMENTS", 1)  # Copy and add as for large models.
    changed = []
    obeys = UpdateTold, lambda part, told: (changed.append(told), part.change(told))
    monkeypatch.setitem(WholePart.commands, "change", obeys)
    options, changes = WAYS[way]
    config = tuned(mix_every_steps=2, join_timeout_s=3.0, bench_s=0.2, **changes)

    def loop(node, rank):
        seen = run(node, 60, pause_s=0.01)
        distance = node.settle(0.1)
        return [*seen, looked(node)], distance, node.metrics()["exchanges_done"], node.state_dict()

    one, other = beside(config, loop, train, **options)
    assert [same(*rows) for rows in zip(one.result[0], other.result[0], strict=True)] == [True] * 61
    assert one.result[1:3] == other.result[1:3]
    assert min(one.result[2], len(changed)) > 3, "exchanges moved them"
    assert any(told.has_positions for told in changed) == (way == "some elements")
    assert {told.ratio is None for told in changed} == {way != "push-sum"}
    assert {**one.result[3], "samplers": []} == {**other.result[3], "samplers": []}


def test_all_ranks_mix_the_moments_of_their_optimizers(train):
    def make(parameters):
        return torch.optim.Adam(parameters, lr=1e-4)

    def loop(node, rank):
        run(node, 100, pause_s=0.01)
        treatments = {item.treatment for item in node.inventory() if item.dtype == "state"}
        return [state for state in trained_by(node).optimizers.all[0].state.values()], treatments

    config = tuned(mix_every_steps=2, join_timeout_s=3.0, bench_s=0.2)
    pair = beside(config, loop, train, make=make, other_make=make)
    (states, treatments), (other_states, other_treatments) = (rank.result for rank in pair)
    assert pair[0].node._training.network.peer.moments.mixed_count > 3
    for state, other in zip(states, other_states, strict=True):
        assert all(torch.equal(state[name], other[name]) for name in ("step", "exp_avg", "exp_avg_sq"))
    assert treatments == other_treatments == {"give", "mix"}


def test_a_member_keeps_half_of_what_a_node_of_several_ranks_has_learned_since_its_last_mix(train):
    def loop(node, rank):
        for _ in range(STEPS):
            models[rank]["w"][1] += STEP
            node.step(samples=4)

    other = train(*counter(0), config=Config(**RARELY))
    models = [counter(1)[0] for _ in range(2)]
    group_of(lambda rank: (models[rank], None), loop, config=Config(**RARELY), seeds=[other.node.address])
    assert learned_of(other, 1) == pytest.approx(STEPS * STEP / 2, rel=0.03)
    assert torch.equal(*(model["w"] for model in models))


@pytest.mark.parametrize(("seconds", "sums"), [(0.0, 64), (10.0, 5)], ids=["long steps", "short steps"])
def test_steps_at_which_nothing_changes_cost_at_most_a_sum_for_which_no_rank_waits(monkeypatch, seconds, sums):
    """Two sums at first, until the length of a step is known; then one in 16 steps, if these are short."""
    monkeypatch.setattr("node.ranks.leader.SUM_S", seconds)

    def loop(node, rank):
        node.settle(0.0)
        node_ranks = node._training.ranks
        before = node_ranks.channel.made
        for _ in range(64):
            node.step(samples=1)
        kinds = [kind for kind, _ in group.calls[before : node_ranks.channel.made]]
        return kinds, node_ranks.pending_sum is not None

    group, pair = ranks(loop)
    no_errors(play(pair))
    assert pair[0].result == pair[1].result == (["sum"] * sums, seconds == 0.0), "the last is still under way"


def test_samples_of_all_ranks_are_summed_and_the_last_step_is_in_a_checkpoint(tmp_path, monkeypatch):
    monkeypatch.setattr("node.ranks.leader.SUM_S", 0.0)

    def loop(node, rank):
        for _step in range(5):
            node.step(samples=3 + rank)
        late, state = node.swarm_samples, node.state_dict()
        node.save(tmp_path / "run")  # Rank 0 writes, and no rank waits for it.
        node.settle(0.0)
        return late, state["swarm_samples"], node.swarm_samples

    assert results(loop) == [(4 * 7, 4 * 7 + 2 * 3, 5 * 7), (4 * 7, 4 * 7 + 2 * 4, 5 * 7)]
    assert (tmp_path / "run.safetensors").exists()


def test_all_ranks_hold_in_its_own_type_what_one_of_them_loads(tmp_path):
    def save(node, rank):
        trained_by(node).optimizers.all[0].param_groups[0]["lr"] = 0.25
        run(node, 3)
        node.save(tmp_path / "run")
        node.export(tmp_path / "weights")  # As in a save, rank 0 writes.
        return flat(model_of(node)), model_of(node).state_dict().keys()

    def load(node, rank):
        figures = node.load(tmp_path / "run" if rank == 0 else "read by rank 0 alone")
        rate = trained_by(node).optimizers.all[0].param_groups[0]["lr"]
        return flat(model_of(node)), (figures["swarm_samples"], rate, node.swarm_samples), momenta_of(node)

    saved, names = results(save, dtype=torch.float64)[0]
    assert load_file(tmp_path / "weights.safetensors").keys() == names
    loaded = results(load, dtype=torch.float64)
    for weights, figures, momenta in loaded:
        assert torch.equal(weights, saved)
        assert figures == (24, 0.25, 24)
        assert all(map(torch.equal, momenta, loaded[0][2]))


def test_weights_on_trial_come_and_go_on_all_ranks(train, until):
    """The weights of another run prove worse. Each rank returns to the old weights and its optimizer's state."""
    bad = net(1)
    larger = train(bad, work=pull(bad, 30.0), config=dataclasses.replace(QUICK, merge="never"))
    until(lambda: larger.node.swarm_samples > 2000)
    stop_at = [10**9]  # a step that no rank has reached yet

    def loop(node, rank):
        model, seen = model_of(node), []
        while len(seen) < stop_at[0]:
            loss = pull(model, 1.0)()
            node.step(loss, 4)
            seen.append(flat(model).sum().item())
            time.sleep(0.002)
        return seen

    _, pair = ranks(loop)
    for rank in pair:
        rank.start()
    until(lambda: pair[0].node is not None and len(pair[0].node._training.network.peer.own_run.trial.own_losses) >= 4)
    side = pair[0].node._training
    larger.do(lambda node: node.step(samples=10**6))
    address = parse_address(larger.node.address)
    side.network.call(lambda: side.network.runtime.connector.dial(address, None))
    until(lambda: side.run.before_merge_path is not None and side.network.peer.joining.failed_trials, seconds=60.0)
    stop_at[0] = side.run.steps + 100
    for rank in pair:
        rank.join(30)
    no_errors(pair)
    assert pair[0].result == pair[1].result
    sums, size = pair[0].result, flat(pair[0].model).numel()
    assert max(sums) > 10 * size, "they had the other run's weights"
    assert sums[-1] < 2 * size, "they have their own weights again"


def test_all_ranks_see_the_same_of_a_member_that_states_extremes():
    """tests/node/observe/test_reduced.py has the malformed figures, of which no rank sees any."""
    most = 2**53 - 1
    figures = {"\x1b[2J\n": 1e308, "accuracy": -1e308, "loss": 1e308, "": 1.0, "a" * 100: 5e-324}
    packed = msgpack.packb({name: [value, most] for name, value in figures.items()})
    stated = {"ready": True, "steps": most, "samples": most, "loss": 1.7e308, "extra": (packed,)}

    def loop(node, rank):
        if rank == 0:
            join = partial(speak, node, Identity.fresh(), encode(Ping(1, ())), **stated)
            threading.Thread(target=trio.run, args=(join,)).start()
        seen = []
        for _ in range(20):
            node.step(loss=1.0, samples=4)
            time.sleep(0.1)
            seen.append((node.members, node.reduce({"loss": 1.0})))
        return seen

    one, other = results(loop)
    assert one == other
    assert any(member.samples == most and member.loss == 1.7e308 for members, _ in one for member in members)
    assert any(found["loss"].max == 1e308 and "\x1b[2J\n" in found for _, found in one)


def test_changes_of_the_model_wait_for_an_open_boundary_and_copies_wait_for_them():
    class Silent:
        def relays(self, size):
            return False

        def send_command(self, *what):
            told.append(what)

        def broadcast_array(self, array):
            told.append(array.copy())

    told, vector = [], np.zeros(10, np.float32)
    state = ModelState({"x": vector})
    pool = VectorPool(state)
    meeting = RanksBoundary(Silent(), state, pool, KeptWeights(state))

    def update(value):
        one = pool.take()
        one.array.fill(value)
        meeting.begin_update()
        meeting.deliver_update(Update(one))

    update(1.0)
    meeting.request_snapshot(7)
    seen = meeting.visit(lambda weights: None)
    assert not seen.updates
    assert not seen.snapshots, "it would count twice what is owed"
    assert not told
    assert (vector == 0.0).all()
    meeting.open()
    seen = meeting.visit(lambda weights: None)
    assert (vector == 1.0).all()
    assert [session for session, _, _ in seen.snapshots] == [7]
    assert told[0] == ("change", UpdateTold(10, False, None))
    assert (told[1] == 1.0).all()
    update(2.0)  # This update comes too late for a visit.
    meeting.shut()
    assert not meeting.has_requests
    assert not meeting.visit(lambda weights: None).updates
    meeting.open()
    assert len(meeting.visit(lambda weights: None).updates) == 1
    assert (vector == 3.0).all()
    assert meeting.pending_updates == 0
