"""Nodes whose models lie on the device: they wait for nothing, and no lack of memory there ends them."""

from __future__ import annotations

import math
import threading

import pytest
import torch
from torch import nn

from gossip.config import Config
from node.adapters.adapter import Adapter, ScaleWatch
from node.model.device.downloads import Downloads
from node.model.device.halves import HalfPart
from node.model.device.uploads import Uploads
from tests.harness.marks import slow
from tests.node.ranks.rank_threads import MemoryGroup, RankThread, play

pytestmark = pytest.mark.cuda
QUICK = {"mix_every_steps": 2, "join_timeout_s": 3.0}
PLAIN = Config(filter="none", **QUICK)


@pytest.fixture
def pair(train):
    """Return a function that starts two training nodes on the device."""

    def start(config=PLAIN, **options):
        first = train(*trainee(0, **options), config=config)
        return first, train(*trainee(1, **options), config=config, seeds=[first.node.address])

    return start


def trainee(seed, dtype=torch.float32, scaled=False, width=16):
    """Return a small model on the device, its optimizer, and a training step that never waits."""
    torch.manual_seed(seed)
    between = nn.BatchNorm1d(width) if dtype == torch.float32 else nn.Tanh()
    model = nn.Sequential(nn.Linear(width, width), between, nn.Linear(width, 4)).to("cuda", dtype)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=True)
    batch = torch.arange(16, device="cuda").to(dtype).repeat(8, width // 16)
    scaler = torch.amp.GradScaler("cuda", enabled=scaled, init_scale=4.0)

    def work():
        optimizer.zero_grad()
        loss = model(batch).float().square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    return model, optimizer, work


@pytest.fixture
def mixes(until):
    """Return a function that waits for ``count`` exchanges of each node."""

    def wait(trainees, count):
        before = [one.node.metrics().exchanges_done for one in trainees]
        until(lambda: all(one.node.metrics().exchanges_done >= was + count for one, was in zip(trainees, before)))  # noqa: B905

    return wait


def weights(one):
    return one.do(lambda node: torch.cat([value.detach().float().cpu().flatten() for value in one.model.parameters()]))


# -- waits -----------------------------------------------------------------------------------------------------------
PARTS = {"part": "fragments 2", "filter": "none"}
PUSH, LOCKSTEP = {"mixing": "push-sum", "filter": "none"}, {"filter": "none", "max_version_gap": 4}


@pytest.mark.parametrize(
    ("options", "width"),
    [
        pytest.param({}, 512, id="plain"), pytest.param(PARTS, 512, id="parts"),
        slow({}, 16, id="plain, small"), slow(PARTS, 16, id="parts, small"),
        slow(PUSH, 16, id="push"), slow(LOCKSTEP, 16, id="lockstep"),
    ],
)  # fmt: skip
def test_no_step_and_no_mix_waits_for_the_device_or_locks_pages(accelerator, pair, mixes, options, width):
    """Neither the loop's nor the network's thread does so: workers lock pages, also before the first mix.

    Width 512 gives 260,000 parameters, so that each vector is larger than 256 KB.
    """
    if accelerator is None:
        pytest.skip("waits are counted on the simulated device only")
    trainees = pair(Config(**QUICK, **options), width=width)
    accelerator.waits.clear()
    mixes(trainees, 3)
    for one in trainees:
        one.side.optimizer_reported_at = -math.inf  # A report of the optimizer's state is due.
    mixes(trainees, 2)
    assert {(wait.what, wait.ours, wait.thread) for wait in accelerator.waits if wait.ours} == set()


def test_a_large_model_is_copied_in_place_and_changed_in_portions(accelerator, pair, mixes, monkeypatch):
    monkeypatch.setattr(Downloads, "MAX_STAGED_ELEMENTS", 0)
    monkeypatch.setattr(Downloads, "MIN_DIRECT_ELEMENTS", 16)
    monkeypatch.setattr(Uploads, "AHEAD_ELEMENTS", 100)
    monkeypatch.setattr(Uploads, "PORTION_ELEMENTS", 50)
    trainees = pair()
    if accelerator is not None:
        accelerator.waits.clear()
    mixes(trainees, 4)
    if accelerator is not None:
        assert {(wait.what, wait.ours) for wait in accelerator.waits if wait.ours} == set()
    found = [weights(one) for one in trainees]
    assert torch.isfinite(found[0]).all()
    assert float((found[0] - found[1]).abs().max()) < 0.05


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)])
@pytest.mark.parametrize("options", [{}, {"part": "fragments 2"}], ids=["whole", "parts"])
def test_half_precision_models_mix_and_workers_widen_what_they_send(pair, mixes, monkeypatch, dtype, options):
    trainees, plain = pair(Config(filter="none", **QUICK, **options), dtype=dtype), HalfPart.widen
    mixes(trainees, 1)
    threads = []
    monkeypatch.setattr(HalfPart, "widen", lambda part: (threads.append(threading.current_thread().name), plain(part)))
    mixes(trainees, 2)
    assert threads
    assert all(" from " in name for name in threads), "names that trio gives its workers"
    assert all(one.model[0].weight.dtype == dtype for one in trainees)
    assert all(bool(torch.isfinite(weights(one)).all()) for one in trainees)


def test_a_gradient_scaler_beside_a_node(accelerator, pair, mixes):
    trainees = pair(scaled=True)
    mixes(trainees, 2)
    assert all(bool(torch.isfinite(weights(one)).all()) for one in trainees)


# -- memory ----------------------------------------------------------------------------------------------------------
def test_training_goes_on_while_the_device_has_no_memory_for_mixes(accelerator, pair, mixes, until, caplog):
    """Conversions to float32 get no memory; the loop's own allocations do."""
    if accelerator is None:
        pytest.skip("fills a simulated device only")
    trainees = pair(dtype=torch.float64, width=32)
    mixes(trainees, 1)
    layer, others = 32 * 32, 32 + 4 * 32 + 4
    accelerator.memory.refuse = lambda size: size in (4 * layer, 4 * (layer + others))
    until(lambda: any(getattr(record, "kind", "") == "device" for record in caplog.records))
    before = [one.node.metrics().steps for one in trainees]
    until(lambda: all(one.node.metrics().steps > was + 5 for one, was in zip(trainees, before, strict=True)))
    accelerator.memory.refuse = lambda size: False
    mixes(trainees, 1)


def test_a_loop_that_writes_weights_elsewhere_is_noticed_and_copied_first_from_then_on(
    train, mixes, until, monkeypatch
):
    """An exchange with a pending copy is abandoned with a notice; one with a finished copy is not."""
    monkeypatch.setattr(Downloads, "MAX_STAGED_ELEMENTS", 0)
    monkeypatch.setattr(Downloads, "MIN_DIRECT_ELEMENTS", 16)
    trainees = []
    for seed in range(2):
        model, optimizer, work = trainee(seed)

        def clipped(model=model, work=work):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.clamp_(-1.0, 1.0)
            return work()

        seeds = [trainees[0].node.address] if trainees else []
        trainees.append(train(model, optimizer, clipped, config=PLAIN, seeds=seeds))
    until(lambda: all(one.side.live.state._guard.is_blind for one in trainees))
    mixes(trainees, 3)


# -- joining and trials ----------------------------------------------------------------------------------------------
def test_the_network_thread_uses_the_models_device(accelerator, pair, monkeypatch):
    used = []
    plain = torch.cuda.set_device
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: (used.append(str(device)), plain(device)))
    pair()
    assert used == ["cuda:0", "cuda:0"]


def test_an_adapter_on_the_device(train, until):
    founder = train(*trainee(0), config=PLAIN)
    adapter = Adapter(settle_s=0.2, config=PLAIN, seeds=[founder.node.address])
    model, optimizer, work = trainee(1)
    adapter.begin(model, optimizer)
    try:
        until(lambda: adapter.step(work(), 4) or adapter.node.metrics().exchanges_done > 1)
        adapter.settle()
    finally:
        adapter.close()
    assert model[0].weight.is_cuda
    assert all(bool(torch.isfinite(value).all()) for value in model.parameters())


def test_ranks_on_the_device_hold_the_same_weights(train, monkeypatch):
    monkeypatch.setattr("node.node.GroupChannel", lambda group: group)
    founder = train(*trainee(0), config=PLAIN)
    group = MemoryGroup(2)
    options = {"config": PLAIN, "seeds": [founder.node.address]}

    def loop(node, rank):
        for _ in range(30):
            node.step(ranks[rank].work(), 4)
        node.settle(0.1)
        return torch.cat([value.detach().cpu().flatten() for value in ranks[rank].model.parameters()])

    ranks = []
    for channel in group.channels:
        model, optimizer, work = trainee(1 + channel.rank)
        ranks.append(RankThread(channel, model, optimizer, loop, options))
        ranks[-1].work = work
    play(ranks)
    assert [rank.error for rank in ranks] == [None, None]
    assert torch.equal(ranks[0].result, ranks[1].result)
    assert str(group.channels[1].device) == "cuda:0"


def test_a_skipped_step_is_seen_without_a_wait(accelerator):
    weight = nn.Parameter(torch.ones(4, device="cuda"))
    optimizer, scaler = torch.optim.SGD([weight], 0.5), torch.amp.GradScaler("cuda", init_scale=4.0)
    scaler.scale(weight.sum())  # It lies on the device from the first use on.
    watch = ScaleWatch(scaler)
    torch.cuda.synchronize()
    skips = 0
    for factor in (1.0, math.inf, 1.0, math.inf, 1.0, 1.0):
        optimizer.zero_grad()
        scaler.scale((weight * factor).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        before = 0 if accelerator is None else len(accelerator.waits)
        skips += watch.take_skipped_step()
        assert accelerator is None or len(accelerator.waits) == before
    torch.cuda.synchronize()
    skips += sum(watch.take_skipped_step() for _ in range(3))
    assert skips == 2
