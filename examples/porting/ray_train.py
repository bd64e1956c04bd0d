"""Ray Train of Ray 2.60: python ray_train.py."""

import tempfile
from pathlib import Path

import ray.train
import ray.train.torch
import torch
from ray.train import Checkpoint, CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from task import EPOCHS, net, right, train, x_test
from torch.nn import functional as F
from torch.utils.data import DataLoader


def learn():
    model = ray.train.torch.prepare_model(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = ray.train.torch.prepare_data_loader(DataLoader(train, batch_size=16, shuffle=True))
    first = 0
    if checkpoint := ray.train.get_checkpoint():
        with checkpoint.as_directory() as folder:
            saved = torch.load(Path(folder) / "model.pt")
            model.module.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optim"])
            first = saved["epoch"] + 1
    for epoch in range(first, EPOCHS):
        if ray.train.get_context().get_world_size() > 1:
            loader.sampler.set_epoch(epoch)
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        with tempfile.TemporaryDirectory() as folder:
            checkpoint = None
            if ray.train.get_context().get_world_rank() == 0:
                state = {"model": model.module.state_dict(), "optim": optimizer.state_dict(), "epoch": epoch}
                torch.save(state, Path(folder) / "model.pt")
                checkpoint = Checkpoint.from_directory(folder)
            ray.train.report({"accuracy": right(model) / len(x_test)}, checkpoint=checkpoint)


trainer = TorchTrainer(
    learn,
    scaling_config=ScalingConfig(num_workers=2),
    run_config=RunConfig(
        failure_config=FailureConfig(max_failures=3),
        checkpoint_config=CheckpointConfig(num_to_keep=1, checkpoint_score_attribute="accuracy"),
    ),
)
print(trainer.fit().metrics)
