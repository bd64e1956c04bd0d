"""Nodes whose models lie on the device never wait for it: counted on the simulated one."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gossip.config import Config
from tests.node.conftest import end, launch, quick, train, until  # noqa: F401 (fixtures)
from tests.node.conftest import until as wait_until

pytestmark = pytest.mark.cuda
QUICK = {"mix_every_steps": 2, "progress_period_s": 0.1, "join_timeout_s": 3.0}


def trainee(train, seed, config, seeds=(), dtype=torch.float32, fused=True, **options):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Linear(16, 4)).to("cuda", dtype)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=fused)
    batch = torch.ones(8, 16, dtype=dtype, device="cuda") * torch.arange(16, device="cuda").to(dtype)

    def work():
        optimizer.zero_grad()
        loss = model(batch).float().square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return train(model, optimizer, work, config=config, seeds=list(seeds), **options)


def pair(train, config, **options):
    first = trainee(train, 0, config, **options)
    return first, trainee(train, 1, config, [first.node.address], **options)


def mixes(trainees, count):
    before = [one.node.metrics().exchanges_done for one in trainees]
    wait_until(
        lambda: all(one.node.metrics().exchanges_done >= was + count for one, was in zip(trainees, before, strict=True))
    )


def our_waits(accelerator):
    """The waits of our code, in the loop's threads and in the network's."""
    return sorted({(wait.what, wait.ours) for wait in accelerator.waits if wait.ours})


@pytest.mark.parametrize(
    "options",
    [{}, {"filter": "none", "max_version_gap": 4}, {"mixing": "push-sum", "filter": "none"}, {"part": "fragments 2", "filter": "none"}],
    ids=["plain", "lockstep", "push", "parts"],
)  # fmt: skip
def test_no_step_and_no_mix_waits_for_the_device(accelerator, train, options):  # noqa: F811
    if accelerator is None:
        pytest.skip("counts on the simulated device only")
    trainees = pair(train, Config(**QUICK, **options))
    mixes(trainees, 2)
    accelerator.waits.clear()
    for one in trainees:
        one.made._training.optimizer_at = float("-inf")  # A report of the optimizer's state is due.
    mixes(trainees, 4)
    assert our_waits(accelerator) == []
