"""Nodes whose models lie on the device: no step and no mix of theirs waits for it."""

import itertools
import math
import threading

import pytest
import torch
from torch import nn

from gossip.config import Config
from node.adapters.adapter import ScaleWatch
from node.model.device.copies import HalfPart
from node.model.device.downloads import Downloads
from tests.harness.marks import slow
from tests.node.model.test_devices import PLAIN, QUICK
from tests.node.trainees import mixed, step_of, step_towards

pytestmark = pytest.mark.cuda


@pytest.fixture
def pair(train):
    """Return a function that starts two training nodes on the device."""

    def start(config=PLAIN, **options):
        first = train(*trainee(0, **options), config=config)
        return first, train(*trainee(1, **options), config=config, seeds=[first.node.address])

    return start


def trainee(seed, dtype=torch.float32, width=16):
    """Return a small model on the device, its optimizer, and a training step that never waits."""
    torch.manual_seed(seed)
    between = nn.BatchNorm1d(width) if dtype == torch.float32 else nn.Tanh()
    model = nn.Sequential(nn.Linear(width, width), between, nn.Linear(width, 4)).to("cuda", dtype)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=True)
    batch = torch.arange(16, device="cuda").to(dtype).repeat(8, width // 16)
    return model, optimizer, step_of(lambda: model(batch).float().square().mean(), optimizer)


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
def test_no_step_and_no_mix_waits_for_the_device_or_locks_pages(accelerator, pair, until, options, width):
    """Neither the loop's nor the network's thread does so: workers lock pages, also before the first mix.

    Width 512 gives 260,000 parameters, so that each vector is larger than 256 KB.
    """
    if accelerator is None:
        pytest.skip("waits are counted on the simulated device only")
    trainees = pair(Config(**QUICK, **options), width=width)
    accelerator.waits.clear()
    until(mixed(*trainees, times=3))
    for one in trainees:
        one.side.optimizer_reported_at = -math.inf  # A report of the optimizer's state is due.
    until(mixed(*trainees, times=2))
    assert {(wait.what, wait.ours, wait.thread) for wait in accelerator.waits if wait.ours} == set()


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)])
@pytest.mark.parametrize("options", [{}, {"part": "fragments 2"}], ids=["whole", "parts"])
def test_half_precision_models_mix_and_workers_widen_what_they_send(pair, until, monkeypatch, dtype, options):
    trainees, plain = pair(Config(filter="none", **QUICK, **options), dtype=dtype), HalfPart.widen
    until(mixed(*trainees, times=1))
    threads = []
    monkeypatch.setattr(HalfPart, "widen", lambda part: (threads.append(threading.current_thread().name), plain(part)))
    until(mixed(*trainees, times=2))
    assert threads
    assert all(" from " in name for name in threads), "names that trio gives its workers"
    assert all(one.model[0].weight.dtype == dtype for one in trainees)
    assert all(one.do(lambda node: node._training.live.state.sound()) for one in trainees)


def test_a_loop_that_writes_weights_elsewhere_is_noticed_and_copied_first_from_then_on(train, until, monkeypatch):
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
    until(mixed(*trainees, times=3))


def test_a_model_that_moves_to_the_device_and_back_in_the_block_is_mixed_and_watched_on(train, until, monkeypatch):
    monkeypatch.setattr("node.loop.training.OPTIMIZER_S", 0.05)
    trainees = []
    for rate in (0.0, 0.01):
        torch.manual_seed(len(trainees))
        model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 4).requires_grad_(False))
        model.register_buffer("mask", torch.ones(4, dtype=torch.bool))
        optimizer, devices = torch.optim.SGD(model[0].parameters(), rate), itertools.cycle(["cuda"] * 3 + ["cpu"] * 3)
        step = step_towards(model, [optimizer], 1.0)
        work = lambda model=model, step=step, devices=devices: (model.to(next(devices)), step())[1]  # noqa: E731
        seeds = [trainees[0].node.address] if trainees else []
        trainees.append(train(model, optimizer, work, config=PLAIN, seeds=seeds))
    enough = mixed(*trainees, times=5)
    until(lambda: enough() and "unchanged" in [event.kind for event in trainees[0].node.history()], 60)
    kinds = {event.kind for trainee in trainees for event in trainee.node.history()}
    assert not {"teacher", "ranges", "replaced", "undone"} & kinds


def test_the_network_thread_uses_the_models_device(accelerator, pair, monkeypatch):
    used = []
    plain = torch.cuda.set_device
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: (used.append(str(device)), plain(device)))
    pair()
    assert used == ["cuda:0", "cuda:0"]


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
