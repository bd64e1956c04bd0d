"""The wrapped optimizers of accelerate and Lightning are recognised as the optimizers inside."""

import pytest
import torch
from torch import nn

from node.model.optimizers import Optimizers

pytestmark = pytest.mark.frameworks


def test_an_optimizer_that_frameworks_wrap_is_seen_for_what_it_is():
    accelerate = pytest.importorskip("accelerate")
    lightning = pytest.importorskip("lightning.pytorch.core.optimizer")
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    accelerated = accelerate.Accelerator(cpu=True).prepare(optimizer)
    for wrapped in (accelerated, lightning.LightningOptimizer(optimizer), lightning.LightningOptimizer(accelerated)):
        assert wrapped is not optimizer
        assert Optimizers([wrapped]).all == (optimizer,)
