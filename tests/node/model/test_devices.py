"""Nodes with models on an accelerator and on the host: the same tests for both."""

import math
import threading

import pytest
import torch
from torch import nn

from gossip.arithmetic.mixing import is_finite
from gossip.averaging import averager
from gossip.averaging.boundary import Boundary
from gossip.config import Config
from node.model.pool import VectorPool
from node.network.transfers import streams
from tests.node.trainees import filled, mixed, spread, step_towards

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


@pytest.fixture
def pair(device, train):
    """``pair(config)`` starts two nodes with models on the device."""

    def start(config=PLAIN):
        first = train(model(device), config=config)
        return first, train(model(device, 1), config=config, seeds=[first.node.address])

    return start


# -- exchanges -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("options", "bound"),
    [
        *[({"codec": codec}, 0.02) for codec in ("fp32", "bf16", "int8")],  # int8 is noisy.
        ({"mixing": "push-sum"}, 0.05),
        *[({"part": part}, 1e-4) for part in ("mask 0.5", "fragments 2")],
    ],
    ids=str,
)
def test_two_models_meet_between_them(device, options, bound, pair, until):
    trainees = pair(Config(filter="none", **QUICK, **options))
    models = [trainee.model for trainee in trainees]
    for value, trainee in enumerate(trainees):
        trainee.do(lambda node, value=value: filled(models[value], float(value)))
    until(lambda: spread(*models) < bound)
    for module in models:
        assert flat(module).min() > 0.0
        assert flat(module).max() < 1.0
        assert all(parameter.device.type == device for parameter in module.parameters())


@pytest.mark.cuda
def test_one_on_the_accelerator_and_one_beside_it_are_one_swarm(train, until):
    models = [model("cuda"), model("cpu", 1)]
    trainees = [train(models[0], config=PLAIN)]
    trainees.append(train(models[1], config=PLAIN, seeds=[trainees[0].node.address]))
    assert torch.equal(trainees[1].at_entry["0.weight"], models[0][0].weight.detach().cpu())
    trainees[1].do(lambda node: filled(models[1], 1.0))
    until(mixed(*trainees))
    until(lambda: float((flat(models[0]) - flat(models[1])).abs().max()) < 1e-5)


def test_the_exchange_that_is_due_has_its_snapshot_from_the_boundary_where_it_began(pair, until, monkeypatch):
    """The boundary's spare copy serves the exchange, and on an accelerator the loop does not wait for its end."""
    trainees, served = pair(), []
    plain = Boundary.take_matching_requests

    def take_matching_requests(boundary, here):
        found = plain(boundary, here)
        served.extend(found)
        return found

    monkeypatch.setattr(Boundary, "take_matching_requests", take_matching_requests)
    until(lambda: len(served) > 10)
    until(mixed(*trainees))
    pool = trainees[0].side.live.pool
    # No vector is lost: all come back.
    assert sum(len(kept) for kept in pool.free_arrays.values()) <= 2 * VectorPool.MAX_FREE


@pytest.mark.parametrize("device", ["cpu"])
def test_large_copies_that_do_not_say_whether_they_are_finite_are_checked_in_a_worker(pair, until, monkeypatch):
    trainees = pair(Config(part="fragments 2", filter="none", **QUICK))
    until(mixed(*trainees, times=1))
    threads = []

    def check(array):
        threads.append(threading.current_thread().name)
        return is_finite(array)

    for module in (averager, streams):
        monkeypatch.setattr(module, "CHECKED_BY_DRIVER_ELEMENTS", 0)
        monkeypatch.setattr(module, "is_finite", check)
    until(mixed(*trainees, times=3))
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


# -- joining ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("fused", [False, True])
def test_a_newcomer_takes_weights_and_the_optimizers_state(device, fused, train, until):
    first, second = model(device), model(device, 1)
    optimizer = torch.optim.AdamW(first.parameters(), lr=0.01, fused=fused)
    work = step_towards(first, [optimizer], 0.5)
    for _ in range(3):
        work()  # The model stays as it is from here on.
    before = {name: value.clone() for name, value in first.state_dict().items()}
    founder = train(first, optimizer, config=PLAIN)
    until(lambda: bool(founder.side.network.peer.local.optimizer_keys))
    fresh = torch.optim.AdamW(second.parameters(), lr=0.01, fused=fused)
    joined = train(second, fresh, config=PLAIN, seeds=[founder.node.address])
    assert all(torch.equal(joined.at_entry[name], before[name]) for name in before)
    for mine, theirs in zip(second.parameters(), first.parameters(), strict=True):
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(fresh.state[mine][key], optimizer.state[theirs][key])
            assert fresh.state[mine][key].device.type == device
        assert float(fresh.state[mine]["step"]) == 3.0
    for parameter in second.parameters():
        parameter.grad = torch.ones_like(parameter)
    joined.do(lambda node: fresh.step())
    assert torch.isfinite(flat(second)).all()
