"""A Node with Accelerate, which wraps optimizers and writes its own checkpoints."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from gossip.config import Config
from node import Node
from node.model.optimizers import Optimizers

accelerate = pytest.importorskip("accelerate", reason="make test-frameworks")
from accelerate.data_loader import prepare_data_loader  # noqa: E402

pytestmark = [pytest.mark.frameworks, pytest.mark.filterwarnings("default")]
QUICK = Config(mix_every_steps=2, join_timeout_s=3.0)


def prepared():
    accelerator = accelerate.Accelerator(cpu=True)
    model = nn.Linear(4, 3)
    return accelerator, *accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))


def one_step(model, optimizer):
    loss = model(torch.ones(2, 4)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def test_a_newcomer_takes_the_momentum_into_the_optimizer_that_was_wrapped_and_leaves_its_groups_alone(train, until):
    _, theirs, their_optimizer = prepared()
    other = train(theirs, their_optimizer, lambda: one_step(theirs, their_optimizer))
    until(lambda: other.node.metrics().steps > 10)
    _, model, optimizer = prepared()
    with Node(model, optimizer, seeds=[other.node.address], config=QUICK):
        assert [id(one) for one in optimizer.param_groups[0]["params"]] == [id(one) for one in model.parameters()]
        assert "momentum_buffer" in optimizer.state[model.weight]
        one_step(model, optimizer)
    assert len(optimizer.state_dict()["param_groups"][0]["params"]) == 2


def test_accelerates_checkpoint_holds_the_run(tmp_path):
    accelerator, model, optimizer = prepared()
    node = Node(model, optimizer, config=QUICK)
    accelerator.register_for_checkpointing(node)
    with node:
        for _ in range(4):
            one_step(model, optimizer)
            node.step(samples=2)
        accelerator.save_state(tmp_path / "last")
    weight = model.weight.detach().clone()
    accelerator, model, optimizer = prepared()
    node = Node(model, optimizer, config=QUICK)
    accelerator.register_for_checkpointing(node)
    accelerator.load_state(tmp_path / "last")
    with node:
        assert node.swarm_samples == 8
        assert torch.equal(model.weight, weight)


def test_a_prepared_loader_of_several_processes_leaves_out_what_other_ranks_draw():
    """So the node's loader must not be passed to ``prepare``: each rank's sampler already has only that rank's part."""
    with Node(nn.Linear(4, 3), config=QUICK) as node:
        loader = DataLoader(range(64), batch_sampler=node.sampler(64, 8))
        parts = [
            prepare_data_loader(loader, num_processes=2, process_index=rank, put_on_device=False) for rank in range(2)
        ]
        assert [sum(len(batch) for batch in part) for part in parts] == [32, 32]
        assert sum(len(batch) for batch in loader) == 64


def test_an_optimizer_that_frameworks_wrap_is_seen_for_what_it_is():
    lightning = pytest.importorskip("lightning.pytorch.core.optimizer")
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    accelerated = accelerate.Accelerator(cpu=True).prepare(optimizer)
    for wrapped in (accelerated, lightning.LightningOptimizer(optimizer), lightning.LightningOptimizer(accelerated)):
        assert wrapped is not optimizer
        assert Optimizers([wrapped]).all == (optimizer,)
