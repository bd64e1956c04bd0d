"""Two nodes on a device without streams, like Apple's, mix with the default settings."""

import torch
from torch import nn

from gossip.config import Config
from tests.device.cuda import simulated
from tests.node.conftest import _plain_environment, train, until  # noqa: F401, fixtures
from tests.node.trainees import step_of


def trainee(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)).to("mps")
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, foreach=False, fused=False)
    batch = torch.arange(32.0).view(4, 8).to("mps")
    return model, optimizer, step_of(lambda: model(batch).square().mean(), optimizer)


def test_two_nodes_with_the_default_settings_mix_and_stay_on_their_device(train):  # noqa: F811
    with simulated("mps"):
        first = train(*trainee(0), config=Config())
        second = train(*trainee(1), config=Config(), seeds=[first.node.address])
        until(lambda: all(one.node.metrics().exchanges_done >= 2 for one in (first, second)))
        for one in (first, second):
            one.stop()  # Its threads use the device until then.
            assert one.error is None
            assert all(part.device.type == "mps" for part in one.model.parameters())
            assert all(bool(part.detach().cpu().isfinite().all()) for part in one.model.parameters())
