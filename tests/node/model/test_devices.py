"""Nodes with models on an accelerator and on the host: the same tests for both."""

from __future__ import annotations

import math
import threading

import numpy as np
import pytest
import torch
from torch import nn

from gossip.arithmetic.mixing import is_finite
from gossip.averaging import averager
from gossip.averaging.boundary import Boundary
from gossip.config import Config
from node.model.pool import VectorPool
from node.model.quasi_global import QuasiGlobal
from node.model.snapshot import ModelState
from node.network.transfers import streams

CUDA = pytest.param("cuda", marks=pytest.mark.cuda)
QUICK = {"mix_every_steps": 2, "join_timeout_s": 3.0}
PLAIN = Config(filter="none", **QUICK)
WIDTH = 256


@pytest.fixture(params=["cpu", CUDA])
def device(request):
    if request.param == "cuda":
        torch.zeros(1, device="cuda")  # Create the context before nodes measure their time.
    return request.param


def model(device, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 4)).to(device)


def flat(module):
    return torch.cat([parameter.detach().flatten().cpu() for parameter in module.parameters()])


def fill(module, value):
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(value)


def descending(module, device, make, target=0.0):
    """A training step towards a number, its optimizer made by ``make``; with the loss still on the device."""
    optimizer = make(module.parameters())

    def work():
        optimizer.zero_grad()
        loss = sum(((parameter - target) ** 2).sum() for parameter in module.parameters()) / 2
        loss.backward()
        optimizer.step()
        return loss

    return optimizer, work


def exchanges(trainee):
    return trainee.node.metrics().exchanges_done


def after(until, trainees, count=5):
    before = [exchanges(trainee) for trainee in trainees]
    until(lambda: all(exchanges(t) >= b + count for t, b in zip(trainees, before, strict=True)))


# -- exchanges -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("codec", ["fp32", "bf16", "int8"])
def test_two_models_meet_at_their_mean(device, codec, train, until):
    models = [model(device), model(device, 1)]
    config = Config(codec=codec, filter="none", **QUICK)
    trainees = [train(models[0], config=config)]
    trainees.append(train(models[1], config=config, seeds=[trainees[0].node.address]))
    trainees[0].do(lambda node: fill(models[0], 0.0))
    trainees[1].do(lambda node: fill(models[1], 1.0))
    after(until, trainees, 8)
    means = torch.stack(
        [trainee.do(lambda node, which=module: flat(which)) for trainee, module in zip(trainees, models, strict=True)]
    )
    assert torch.allclose(means[0], means[1], atol=0.02)  # int8's noise; they were 1 apart
    assert means.min() > 0.0
    assert means.max() < 1.0
    assert all(parameter.device.type == device for module in models for parameter in module.parameters())


@pytest.mark.cuda
def test_one_on_the_accelerator_and_one_beside_it_are_one_swarm(train, until):
    models = [model("cuda"), model("cpu", 1)]
    trainees = [train(models[0], config=PLAIN)]
    trainees.append(train(models[1], config=PLAIN, seeds=[trainees[0].node.address]))
    assert torch.equal(trainees[1].at_entry["0.weight"], models[0][0].weight.detach().cpu())
    trainees[1].do(lambda node: fill(models[1], 1.0))
    after(until, trainees)
    until(lambda: float((flat(models[0]) - flat(models[1])).abs().max()) < 1e-5)


def test_the_exchange_that_is_due_has_its_snapshot_from_the_boundary_where_it_began(device, train, until, monkeypatch):
    """The boundary's spare copy serves the exchange, and on an accelerator the loop does not wait for its end."""
    models = [model(device), model(device, 1)]
    trainees = [train(models[0], config=PLAIN)]
    trainees.append(train(models[1], config=PLAIN, seeds=[trainees[0].node.address]))
    served = []

    plain = Boundary.take_matching_requests

    def take_matching_requests(boundary, here):
        found = plain(boundary, here)
        served.extend(found)
        return found

    monkeypatch.setattr(Boundary, "take_matching_requests", take_matching_requests)
    until(lambda: len(served) > 10)
    after(until, trainees)
    pool = trainees[0].side.live.pool
    # No vector is lost: all come back.
    assert sum(len(kept) for kept in pool.free_arrays.values()) <= 2 * VectorPool.MAX_FREE


def test_what_was_pushed_is_merged(device, train, until):
    config = Config(mixing="push-sum", filter="none", **QUICK)
    models = [model(device), model(device, 1)]
    trainees = [train(models[0], config=config)]
    trainees.append(train(models[1], config=config, seeds=[trainees[0].node.address]))
    trainees[0].do(lambda node: fill(models[0], 0.0))
    trainees[1].do(lambda node: fill(models[1], 1.0))
    until(lambda: float((flat(models[0]) - flat(models[1])).abs().max()) < 0.05)
    assert 0.0 < float(flat(models[0]).mean()) < 1.0


@pytest.mark.parametrize("part", ["mask 0.5", "fragments 2"])
def test_parts_land_where_they_belong(device, part, train, until):
    config = Config(part=part, filter="none", **QUICK)
    models = [model(device), model(device, 1)]
    trainees = [train(models[0], config=config)]
    trainees.append(train(models[1], config=config, seeds=[trainees[0].node.address]))
    trainees[1].do(lambda node: fill(models[1], 1.0))
    until(lambda: float((flat(models[0]) - flat(models[1])).abs().max()) < 1e-4)


def test_large_copies_that_do_not_say_whether_they_are_finite_are_checked_in_a_worker(train, until, monkeypatch):
    trainees = [train(model("cpu"), config=Config(part="fragments 2", filter="none", **QUICK))]
    seeds = [trainees[0].node.address]
    trainees.append(train(model("cpu", 1), config=Config(part="fragments 2", filter="none", **QUICK), seeds=seeds))
    after(until, trainees, 1)
    threads = []

    def check(array):
        threads.append(threading.current_thread().name)
        return is_finite(array)

    for module in (averager, streams):
        monkeypatch.setattr(module, "CHECKED_BY_DRIVER_ELEMENTS", 0)
        monkeypatch.setattr(module, "is_finite", check)
    after(until, trainees, 3)
    assert len(threads) > 3
    assert all(" from " in name for name in threads), "as trio names its workers"


# -- beside training -------------------------------------------------------------------------------------------------
@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")  # torch warns once in a process.
def test_the_loss_is_read_without_waiting_for_the_device(device, train, until):
    trainee = train(model(device), config=PLAIN)

    def report(node):
        loss = torch.full((), 0.625, device=device)
        if device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(4):
                node.reported_at = -math.inf
                node.step(loss=loss)
        finally:
            if device == "cuda":
                torch.cuda.set_sync_debug_mode("default")

    def told():
        trainee.do(report)
        return trainee.side.network.peer.membership.me.loss == 0.625

    until(told)


def test_a_loss_that_is_no_number_is_told_to_nobody(device, train, until):
    trainee = train(model(device), config=PLAIN)
    reported = []

    def report(node):
        node.reported_at = -math.inf
        node.step(loss=torch.full((), math.nan, device=device))
        reported.append(node._training.loss.read())

    for _ in range(5):
        trainee.do(report)
    assert reported == [None] * 5


@pytest.mark.parametrize("outer", ["default", "momentum 0.5"])
def test_the_outer_step_brings_training_nodes_to_one_model(device, outer, train, until):
    momentum = {} if outer == "default" else {"outer_momentum": 0.5, "outer_rate": 0.7}
    config = Config(**QUICK, **momentum)
    trainees, models = [], [model(device), model(device, 1)]
    for number, module in enumerate(models):
        optimizer, work = descending(module, device, lambda p: torch.optim.SGD(p, lr=0.04), target=float(number))
        seeds = [trainees[0].node.address] if trainees else []
        trainees.append(train(module, optimizer, work, config=config, seeds=seeds))
    assert not trainees[0].side.live.outer.is_plain
    after(until, trainees, 10)
    found = torch.stack([flat(module) for module in models])
    assert torch.isfinite(found).all()
    assert float((found[0] - found[1]).abs().max()) < 0.5  # alone they would be 1 apart
    assert 0.1 < float(found.mean()) < 0.9


def test_quasi_global_momentum_goes_with_the_mixes(device, train, until):
    trainees, models = [], [model(device), model(device, 1)]
    for number, module in enumerate(models):
        optimizer, work = descending(module, device, lambda p: QuasiGlobal(p, lr=0.02, momentum=0.9), float(number))
        seeds = [trainees[0].node.address] if trainees else []
        trainees.append(train(module, optimizer, work, config=PLAIN, seeds=seeds))
    after(until, trainees, 10)
    found = torch.stack([flat(module) for module in models])
    assert torch.isfinite(found).all()
    assert float((found[0] - found[1]).abs().max()) < 0.5


# -- joining ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("fused", [False, True])
def test_a_newcomer_takes_weights_and_the_optimizers_state(device, fused, train, until):
    first, second = model(device), model(device, 1)
    optimizer, work = descending(first, device, lambda p: torch.optim.AdamW(p, lr=0.01, fused=fused), target=0.5)
    for _ in range(3):
        work()  # The model stays as it is from here on.
    before = {name: value.clone() for name, value in first.state_dict().items()}
    founder = train(first, optimizer, config=PLAIN)
    until(lambda: bool(founder.side.network.peer.local.optimizer_keys))
    fresh = torch.optim.AdamW(second.parameters(), lr=0.01, fused=fused)
    joined = train(second, fresh, config=PLAIN, seeds=[founder.node.address])
    assert all(torch.equal(joined.at_entry[name], before[name]) for name in before if before[name].is_floating_point())
    for mine, theirs in zip(second.parameters(), first.parameters(), strict=True):
        assert torch.equal(fresh.state[mine]["exp_avg_sq"], optimizer.state[theirs]["exp_avg_sq"])
        assert fresh.state[mine]["exp_avg_sq"].device.type == device
        assert float(fresh.state[mine]["step"]) == 3.0
    joined.do(lambda node: work_once(second, fresh))


def work_once(module, optimizer):
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert torch.isfinite(flat(module)).all()


def test_a_checkpoint_is_the_model_and_comes_back(device, train, tmp_path):
    module = model(device)
    trainee = train(module, config=PLAIN)
    trainee.do(lambda node: (fill(module, 0.25), node.save(tmp_path / "c.safetensors"), fill(module, 9.0)))
    other = model(device, 1)
    resumed = train(other, config=PLAIN)
    resumed.do(lambda node: node.load(tmp_path / "c.safetensors"))
    assert (flat(other) == 0.25).all()


# -- memory ----------------------------------------------------------------------------------------------------------
def test_host_vectors_are_page_locked_where_copies_are_to_overlap(device):
    state = ModelState(model(device))
    pool = VectorPool(state)
    taken = pool.take()
    assert torch.from_numpy(taken.array).is_pinned() == (device == "cuda")
    pool.give(taken)
    assert pool.take().array is taken.array


def test_a_vector_may_be_written_again_once_its_copies_are_done(device):
    """The sum has the values of each vector at its addition, whatever is written to it after the copy."""
    module = model(device)
    state = ModelState(module)
    vector = state.buffer(state.size())
    fill(module, 0.0)
    for value in (1.0, 2.0, 3.0):
        vector.fill(value)
        state.add(vector).wait()
    vector.fill(100.0)
    out = np.empty_like(vector)
    state.read(out)
    assert (flat(module) == 6.0).all()
