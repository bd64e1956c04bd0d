"""A saved optimizer state is loaded by the optimizers that wrote it, whichever these are, and by no other."""

from __future__ import annotations

import pytest
import torch

from gossip.errors import CheckpointError
from node.model.optimizer.loaded import fitting_state
from tests.node.model.test_checkpoint import OPTIMIZERS, model_of, train


class Compressing(torch.optim.SGD):
    """An optimizer that keeps a further entry for its largest tensors, as 8-bit optimizers do."""

    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            largest = max(parameter.numel() for parameter in group["params"])
            for parameter in group["params"]:
                self.state[parameter]["state1"] = torch.zeros_like(parameter, dtype=torch.uint8)
                if parameter.numel() == largest:
                    self.state[parameter]["absmax1"] = torch.ones(4)


MAKERS = OPTIMIZERS | {"compressing": lambda p: Compressing(p, lr=0.1, momentum=0.9)}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())
@pytest.mark.parametrize("has_stepped", [False, True])
def test_the_state_of_an_equal_optimizer_fits(make, has_stepped):
    model, other = model_of(0), model_of(1)
    saved, loading = make(model.parameters()), make(other.parameters())
    train(model, saved, 2, seed=1)
    if has_stepped:
        train(other, loading, 1, seed=2)
    loading.load_state_dict(fitting_state(loading, saved.state_dict()))
    train(other, loading, 1, seed=3)


def test_a_state_that_lacks_an_entry_of_one_parameter_is_refused():
    model = model_of(0)
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, 2, seed=1)
    state = optimizer.state_dict()
    del state["state"][1]["exp_avg"]
    with pytest.raises(CheckpointError, match="is damaged, or of another kind of optimizer"):
        fitting_state(optimizer, state)
