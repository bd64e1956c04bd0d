"""A sharded model is the same flat vector as a whole one. Here one process holds all shards, through the whole way."""

import contextlib
import queue
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.tensor import Replicate, distribute_tensor

from gossip.averaging.vectors import Moments, Vector
from gossip.config import Config
from gossip.errors import LayoutError, LocalError
from node import Node
from node.loop.live import Trained
from node.model import checkpoint
from node.model.backup import KeptWeights
from node.model.checkpoint import Archive
from node.model.inventory.items import Choices
from node.model.optimizers import Optimizers
from node.model.snapshot import ModelState
from node.ranks.channel import Channel
from node.ranks.part import ShardedPart
from node.ranks.ranks import Command, Ranks
from node.ranks.sharded.operation import Operation
from node.ranks.sharded.work import ShardWork
from tests.harness.configs import tuned
from tests.node.model.test_inventory import Custom
from tests.node.ranks.rank_loops import net, trained


def sharded(model):
    from torch.distributed.fsdp import fully_shard

    mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
    for module in model:
        fully_shard(module, mesh=mesh)
    return fully_shard(model, mesh=mesh)


class Pair:
    """An equal whole and sharded model, each with its optimizer, after a step."""

    def __init__(self, world, make=lambda p: torch.optim.AdamW(p, lr=0.01), dtype=torch.float32, steps=1):
        self.models = net(dtype=dtype), sharded(net(dtype=dtype))
        self.optimizers = [make(model.parameters()) for model in self.models]
        for model, optimizer in zip(self.models, self.optimizers, strict=True):
            for number in range(steps):
                trained(model, optimizer, number)
        self.ranks = Ranks(Channel(world))
        self.ranks.open()
        self.part = ShardedPart(Trained(self.models[1], Optimizers(self.optimizers[1])), self.ranks)
        self.sharded, self.many = self.part.state, self.part.optimizers
        self.whole = ModelState(self.models[0], self.optimizers[0])
        self.sharded.work.begin()
        self.ranks.is_standing = True

    def vectors(self):
        found = []
        for state in (self.whole, self.sharded):
            vector = state.buffer(state.optimizer_range().stop)
            state.read(vector[: state.layout.size])
            state.begin_read_optimizer(vector[state.layout.size :], state.layout.size)
            found.append(vector.copy())
        return found

    def check_same(self):
        assert np.allclose(*self.vectors(), atol=1e-6)

    def optimizer_vector(self):
        """Return what the sharded model's optimizer holds."""
        return self.vectors()[1][self.sharded.layout.size :]


@pytest.fixture(params=["shared", "of its own"])
def made(request):
    """Return a function that makes a vector: in memory that all ranks map, or in memory of this process."""
    if request.param == "shared":
        return lambda state, size: state.buffer(size)
    return lambda state, size: np.empty(size, np.float32)


def copies(parameters):
    return Custom(parameters, lambda weight: weight.detach().double())


@pytest.mark.parametrize(("make", "keys"), [(torch.optim.AdamW, ("exp_avg", "exp_avg_sq")), (copies, ("mine",))])
def test_every_operation_does_the_same_as_on_a_whole_model(world, made, make, keys):
    pair = Pair(world, make)
    assert pair.whole.layout.fingerprint == pair.sharded.layout.fingerprint
    assert pair.whole.optimizer_keys == pair.sharded.optimizer_keys == keys
    assert pair.whole.optimizer_scalars() == pair.sharded.optimizer_scalars()
    assert pair.whole.trained_elements == pair.sharded.trained_elements
    pair.check_same()
    size = pair.whole.layout.exchanged
    values = np.random.default_rng(1).standard_normal(size).astype(np.float32)
    positions = np.array([0, 3, 47, 48, 60, size - 1])
    for call in (
        lambda state, given: state.load({name: tensor + 1 for name, tensor in state.tensors().items()}),
        lambda state, given: state.adopt(np.append(given, np.float32([5, 0, 0, 0])), ("other",), {}),
        lambda state, given: state.add(given),
        lambda state, given: state.add_weighted(given, 0.25),
        lambda state, given: state.merge(given, 0.25),
        lambda state, given: state.add_at(given[:6].copy(), positions),
        lambda state, given: state.write(np.append(given, np.float32([5, 0, 0, 0]))),
    ):
        for state in (pair.whole, pair.sharded):
            given = made(state, size)
            given[:] = values
            call(state, given)
        pair.check_same()
    pieces = []
    for state in (pair.whole, pair.sharded):
        piece, spots = np.empty(17, np.float32), np.empty(6, np.float32)
        state.begin_read_piece(piece, 23)
        state.begin_read_at(spots, positions)
        pieces.append((piece.tolist(), spots.tolist()))
    assert pieces[0] == pieces[1]
    assert pair.sharded.sound()
    given = np.append(given, np.float32([5, 0, 0, 0]))
    given[7] = np.nan
    for expected in (True, False):
        pair.sharded.begin_read(pair.sharded.buffer(size))
        assert pair.sharded.finite is expected
        assert pair.sharded.begin_read_piece(piece, 4).finite is expected
        assert pair.sharded.begin_read_at(spots[:3], np.array([3, 7, 41])).finite is expected
        assert pair.sharded.begin_read_piece(piece, 8).finite
        pair.sharded.write(given)
    assert not pair.sharded.sound()


def test_rank_0_decides_what_follows(world):
    pair = Pair(world, copies)
    assert pair.sharded.optimizer_state.followed_keys() == (("Custom", "mine"),)
    pair.ranks.leads = False
    for follows in ((), (("Custom", "mine"),)):
        pair.part.obey(Command("operation", Operation("bound", follows=follows)))
        assert pair.sharded.optimizer_state.followed_keys() == follows


def test_no_other_thread_reads_the_weights_or_moves_them(world):
    pair = Pair(world)
    spots, positions = np.zeros(2, np.float32), np.array([0, 3])
    with ThreadPoolExecutor(1) as network:
        network.submit(pair.sharded.enter_thread).result()
        network.submit(pair.sharded.begin_read_at, spots, positions).result()
        assert np.isnan(spots).all()
        with pytest.raises(AssertionError, match="the training thread alone"):
            network.submit(pair.sharded.read, pair.sharded.buffer(4)).result()
        pair.sharded.begin_read_at(spots, positions)  # Any other thread may be the one that trains.
        assert np.isfinite(spots).all()


def test_moments_are_read_and_mixed_as_those_of_a_whole_model(world, made):
    pair = Pair(world, steps=3)
    for state, optimizer in zip((pair.whole, pair.sharded), pair.optimizers, strict=True):
        assert state.moment_form() is None  # Nothing is mixed unless the node says so.
        state.mix_state = "auto"
        optimizer.state.pop(optimizer.param_groups[0]["params"][1])  # A layer without a gradient so far has no state.
    form = pair.whole.moment_form()
    assert form == pair.sharded.moment_form()
    start, stop = 7, form.elements - 2
    mixed = []
    for state in (pair.whole, pair.sharded):
        size = form.vector_elements(stop - start)
        vector = Vector(made(state, size))
        vector.array[:] = 0.0
        rows, _ = form.split(vector.array)
        state.begin_read_moments(rows, form, start, stop)
        mixed.append(rows[:, : stop - start].copy())
        rows *= 0.5
        state.mix_moments(Moments(vector, form, start, stop))
        rows.fill(np.nan)
        state.begin_read_moments(rows, replace(form, names=("exp_avg", "other")), start, stop)
        assert np.isnan(rows).all()
    assert np.allclose(mixed[0], mixed[1], atol=1e-7)
    assert np.abs(mixed[0]).max() > 0.0
    now = pair.optimizer_vector().reshape(2, -1)[:, start:stop]
    assert np.allclose(now, 0.75 * mixed[1], atol=1e-7)
    pair.check_same()


def test_a_partners_moments_move_each_part_of_a_sharded_model_by_a_bounded_factor(world):
    pair = Pair(world, steps=3)
    pair.sharded.mix_state = "auto"
    form = pair.sharded.moment_form()
    before = pair.optimizer_vector()
    vector = Vector(np.full(form.vector_elements(form.elements), 1e30, np.float32))
    pair.sharded.mix_moments(Moments(vector, form, 0, form.elements))
    assert np.abs(pair.optimizer_vector()).max() <= 1.5 * np.abs(before).max()


def test_a_newcomer_takes_over_weights_and_the_optimizers_state(world):
    donor, pair = Pair(world, steps=3), Pair(world, steps=0)
    vector, _ = donor.vectors()
    pair.sharded.adopt(vector, donor.whole.optimizer_keys, donor.whole.optimizer_scalars())
    assert np.array_equal(pair.vectors()[1], vector)
    assert pair.sharded.optimizer_scalars() == {"step": 3.0}
    trained(donor.models[0], donor.optimizers[0], 4)
    trained(pair.models[1], pair.optimizers[1], 4)
    for one, other in zip(donor.models[0].parameters(), pair.models[1].parameters(), strict=True):
        assert torch.allclose(one, other.full_tensor(), atol=1e-6)


def test_a_newcomer_drops_spoiled_state_and_leaves_that_of_another_optimizer(world):
    pair = Pair(world, steps=1)
    weight = pair.models[1][0].weight
    with torch.no_grad():
        pair.optimizers[1].state[weight]["exp_avg"].to_local()[0, 0] = torch.nan
    vector = np.zeros(pair.sharded.layout.size + pair.sharded.trained_elements, np.float32)
    pair.sharded.adopt(vector, ("momentum_buffer",), {})
    assert pair.optimizers[1].state[weight] == {}
    assert pair.optimizers[1].state[pair.models[1][0].bias]["step"] == 1
    assert not weight.full_tensor().any()


def momenta(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


@pytest.mark.parametrize("make", [torch.optim.AdamW, momenta])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_checkpoint_of_a_sharded_model_loads_into_a_whole_one_and_back(world, tmp_path, make, dtype):
    pair = Pair(world, make, dtype, steps=3)
    archives = Archive(pair.whole, Optimizers(pair.optimizers[0])), Archive(pair.sharded, pair.many)
    files = [tmp_path / name for name in ("whole", "sharded")]
    for archive, path in zip(archives, files, strict=True):
        archive.save(path, {"samples": 3})
    one, other = map(checkpoint.load, files)
    assert [*one.tensors] == [*other.tensors]
    assert str(one.optimizer_state)[:40] == str(other.optimizer_state)[:40]
    for name, tensor in one.tensors.items():
        assert tensor.dtype == other.tensors[name].dtype
        assert torch.allclose(tensor, other.tensors[name], rtol=1e-2 if dtype == torch.bfloat16 else 1e-6)
    for path, model, optimizer, archive in zip(reversed(files), pair.models, pair.optimizers, archives, strict=True):
        for number in range(5, 7):
            trained(model, optimizer, number)
        archive.restore(archive.load(path), path)
        found = archive.state.tensors()
        saved = checkpoint.load(path)
        assert all(torch.equal(found[name], tensor) for name, tensor in saved.tensors.items())
        state = archive.optimizers.state_dict()
        assert state.keys() == saved.optimizer_state.keys()
        for number, row in saved.optimizer_state["state"].items():
            for key, value in row.items():
                assert torch.equal(torch.as_tensor(state["state"][number][key]), torch.as_tensor(value)), (number, key)


def test_weights_that_gave_way_to_others_on_trial_come_back_with_the_optimizers_state(world):
    pair = Pair(world, steps=2)
    kept = KeptWeights(pair.sharded, pair.many)
    before = pair.vectors()[1]
    assert kept.keep()
    theirs = np.ones(pair.sharded.layout.size, np.float32)
    pair.sharded.adopt(theirs, (), {})
    trained(pair.models[1], pair.optimizers[1], 8)
    weights = kept.put_back()
    assert np.array_equal(pair.vectors()[1], before)
    assert np.array_equal(weights, before[: weights.size])
    assert pair.sharded.optimizer_scalars() == {"step": 2.0}


def test_a_forward_pass_that_left_whole_parameters_does_not_hide_a_change(world):
    pair = Pair(world)
    model = pair.models[1].eval()
    inputs = torch.ones(2, 6)
    before = model(inputs)  # The last module keeps its whole parameters for a backward pass.
    pair.sharded.write(np.zeros(pair.sharded.layout.size, np.float32))
    assert before.any()
    assert not model(inputs).any()


def test_a_sharded_model_that_no_step_changes_is_told_so(world):
    model = sharded(net())
    with Node(model, torch.optim.SGD(model.parameters(), lr=0.0), config=Config(), group=world) as node:
        for _ in range(40):
            node.step(samples=5)
        told = [event.kind for event in node.history()]
    assert (told.count("unchanged"), told.count("inventory")) == (1, 1)


def test_a_hook_that_divides_a_tensor_in_the_state_dict_and_a_buffer_of_the_mesh_do_not_matter(world, tmp_path):
    """torchtitan's fused projections have such a hook, and under tensor parallelism its tables are DTensors."""
    model = sharded(net())
    table = distribute_tensor(torch.arange(6.0), model[0].weight.device_mesh, [Replicate()])
    model[0].register_buffer("table", table, persistent=False)
    model.register_state_dict_post_hook(lambda _, state, *args: state.update(half=state.pop("0.weight") / 2))
    with Node(model, torch.optim.SGD(model.parameters(), lr=0.1), group=world) as node:
        node.step(samples=5)
        node.save(tmp_path / "run")
    saved = model[0].weight.full_tensor().clone()
    model[0].weight.data.zero_()
    with Node(model, torch.optim.SGD(model.parameters(), lr=0.1), group=world) as node:
        node.load(tmp_path / "run")
    assert torch.equal(model[0].weight.full_tensor(), saved)


def test_a_node_of_a_sharded_model_trains_saves_and_loads(world, tmp_path):
    model = sharded(net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with Node(model, optimizer, config=Config(), group=world) as node:
        for number in range(3):
            trained(model, optimizer, number)
            node.step(samples=5)
        assert node.settle(0.0) is None
        assert node.swarm_samples == 15
        node.save(tmp_path / "run")
        assert node.load(tmp_path / "run")["swarm_samples"] == 15
        node.export(tmp_path / "weights")
        node.finish(0.0)
    whole = net(1)
    whole.load_state_dict(load_file(tmp_path / "weights.safetensors"))
    assert torch.equal(whole[0].weight, model[0].weight.full_tensor())


@contextlib.contextmanager
def joined(world, train, whole, model, parameters=lambda model: model.parameters(), **changes):
    """Run a node of a sharded model in the swarm of a whole one.

    Yield the trainee of the whole model, the node, and a function that takes a step with the sharded model.
    """
    config = tuned(mix_every_steps=2, join_timeout_s=3.0, bench_s=0.2, **changes)
    optimizers = [torch.optim.SGD(parameters(one), lr=0.01) for one in (whole, model)]
    other = train(whole, optimizers[0], lambda: trained(whole, optimizers[0], 0), config=config)
    with Node(model, optimizers[1], config=config, group=world, seeds=[other.node.address]) as node:
        yield other, node, lambda: (trained(model, optimizers[1], 0), node.step(samples=4))


@pytest.mark.parametrize("base", ["the same", "another"])
def test_a_sharded_newcomer_has_the_frozen_base_of_its_swarm(world, train, base):
    whole, model = net(3), net(3 if base == "the same" else 4)
    for one in (whole, model):
        one[0].requires_grad_(False)
    with torch.no_grad():
        model[2].weight.zero_()
    model = sharded(model)
    with joined(world, train, whole, model, lambda model: model[2].parameters()) as (_, _, step):
        assert torch.equal(model[0].weight.full_tensor(), whole[0].weight)
        assert model[2].weight.full_tensor().any()
        step()


WAYS = {
    "outer step": {}, "plain mean": {"outer_momentum": 0.0}, "some elements": {"part": "mask 0.3"},
    "push-sum": {"mixing": "push-sum"}, "lockstep": {"max_version_gap": 0.0}, "a step behind": {"max_version_gap": 2.0},
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_a_sharded_and_a_whole_node_mix(world, train, until, way):
    model = sharded(net(4))
    with joined(world, train, net(3), model, **WAYS[way]) as (other, node, step):
        assert all(one.full_tensor().isfinite().all() for one in model.parameters())
        end = time.monotonic() + 30
        while node.metrics()["exchanges_done"] < 4:
            step()
            time.sleep(0.01)
            assert time.monotonic() < end, "no exchanges"
        settled = queue.SimpleQueue()
        other.tasks.put((lambda node: node.settle(10, wait_s=20), settled))
        assert (node.settle(10, wait_s=20), settled.get(timeout=30)) == (0.0, 0.0)

        def ends():  # Events come from the networking thread.
            return [event.digest for each in (node, other.node) for event in each.history() if event.kind == "settled"]

        until(lambda: len(ends()) >= 2)
        assert len(set(ends())) == 1


def test_a_sharded_model_without_its_processes_is_refused(world):
    with pytest.raises(LayoutError, match=r"'0.weight' is sharded over several processes: give Node these processes"):
        Node(sharded(net()))


def test_frozen_parameters_are_not_exchanged_and_newcomers_get_them(world, tmp_path):
    def half(seed):
        model = net(seed)
        model[0].weight.requires_grad_(False)
        return model

    whole = ModelState(half(0))
    work = ShardWork(sharded(half(0)), Optimizers(), Choices(), Ranks(Channel(world)))
    assert work.layout.fingerprint == whole.layout.fingerprint
    model = sharded(half(1))
    with Node(model, config=Config(), group=world) as node:
        state = node._training.live.state
        exchanged = state.layout.exchanged
        assert state.layout.frozen_stop - exchanged == model[0].weight.numel()

        def frozen(state):
            found = np.empty(20, np.float32)
            state.read_frozen(found, exchanged + 4)
            return found.tolist()

        def held():
            return model[0].weight.full_tensor().flatten()[4:24].tolist()

        assert frozen(state) == held()
        before = held()
        checkpoint.save(tmp_path / "run", whole.tensors(), None, {})
        node.load(tmp_path / "run")
        assert frozen(state) == frozen(whole) == held() != before


def test_an_operation_that_no_rank_0_sends_is_refused(world):
    pair = Pair(world)
    pair.sharded.read(pair.sharded.buffer(4))
    vector = pair.sharded.buffer(4)
    pair.sharded.read(vector)
    number, _ = pair.sharded.work.memory.locate(vector)
    assert Operation("read", 0, 4, number).fits(pair.sharded.work.memory.size_of(number))
    for operation in (
        Operation("explode"),
        Operation("read", 0, 4, 99),
        Operation("read", 0, 5, number),
        Operation("read", 0, 4, number, offset=8),
        Operation("read", 0, 4, number, offset=-4),
        Operation("read", 0, 4, number, wide=True),
        Operation("add_at", 0, 2, number),
        Operation("read", -1, 4, number),
        Operation("read", 0, -1, number),
    ):
        with pytest.raises(LocalError, match="is no message of this version"):
            pair.part.obey(Command("operation", operation))
    with pytest.raises(LocalError, match="a command 'change'"):
        pair.part.obey(Command("change"))


def test_placements_that_are_no_boxes_are_refused(world):
    from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor

    mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
    partial = DTensor.from_local(torch.ones(4), mesh, [Partial()])
    with pytest.raises(LayoutError, match="'w' is divided among the processes in a way that a Node does not take"):
        Node({"w": partial}, group=world)
    numbers = distribute_tensor(torch.arange(4), mesh, [Shard(0)])
    given = {"w": distribute_tensor(torch.ones(4), mesh, [Shard(0)]), "n": numbers}
    with pytest.raises(LayoutError, match="'n' is sharded and no floating-point tensor"):
        Node(given, group=world)


def test_tensor_parallel_mappings_are_nodes_too(world):
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = dist.device_mesh.init_device_mesh("cpu", (1, 1))
    given = {
        "columns": distribute_tensor(torch.ones(4, 3), mesh, [Shard(1), Replicate()]),
        "both": distribute_tensor(torch.ones(4, 3), mesh, [Shard(0), Shard(1)]),
        "whole": torch.ones(3),
    }
    with Node(given, config=Config(), group=world) as node:
        for _ in range(3):
            node.step(samples=5)
        node.settle(0.0)
        assert node.swarm_samples == 15


def test_two_nodes_over_one_sharded_model_end_the_first(world):
    model = sharded(net())
    with Node(model, config=Config(), group=world) as first, Node(model, config=Config(), group=world) as second:
        second.step(samples=1)
        with pytest.raises(Exception, match="This Node is closed, and what is trained reaches no member"):
            first.step(samples=1)


@pytest.mark.parametrize("options", [{}, {"fused": True}, {"capturable": True}, {"fused": True, "capturable": True}])
def test_step_counts_go_where_the_optimizer_keeps_them(options, world, monkeypatch):
    """Fused and capturable optimizers read them on the device, others on the host."""
    pair = Pair(world)
    saved = pair.many.state_dict()
    for group in pair.optimizers[1].param_groups:
        group.update(options)
    commands, send = [], pair.ranks.send_command
    monkeypatch.setattr(pair.ranks, "send_command", lambda *words: (commands.append(words), send(*words)))
    pair.many.load([saved])
    described = next(payload for kind, payload in commands if kind == "optimizers")
    places = [state["step"] for _, states in described for state in states]
    assert len(places) == len(list(pair.models[1].parameters()))
    assert {place.on_device for place in places} == {bool(options)}
