"""Two nodes on a device without streams, like Apple's, mix with the default settings."""

from __future__ import annotations

import torch
from torch import nn

from gossip.config import Config
from tests.device.cuda import simulated
from tests.node.conftest import _plain_environment, train, until  # noqa: F401, fixtures


def trainee(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)).to("mps")
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, foreach=False, fused=False)
    batch = torch.ones(4, 8).to("mps")

    def work():
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return model, optimizer, work


def test_two_nodes_with_the_default_settings_mix_and_agree(train):  # noqa: F811
    with simulated("mps"):
        first = train(*trainee(0), config=Config())
        second = train(*trainee(1), config=Config(), seeds=[first.node.address])
        trainees = first, second
        until(lambda: all(one.node.metrics().exchanges_done >= 2 for one in trainees))
        for one in trainees:
            assert one.error is None
            assert one.model[0].weight.device.type == "mps"
        found = [torch.cat([part.detach().cpu().flatten() for part in one.model.parameters()]) for one in trainees]
        assert all(bool(one.isfinite().all()) for one in found)
        assert float((found[0] - found[1]).abs().max()) < 0.2
        for one in trainees:
            one.stop()
