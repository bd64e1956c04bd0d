"""One process of a framework's DDP training, as torchrun starts it.

`ranks_child.py FRAMEWORK FOLDER SEED` writes its samples, and its weights after each step, to FOLDER/RANK.json.
"""

import hashlib
import json
import os
import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

from gossip.config import Config

framework, folder, seed = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
rank = int(os.environ["RANK"])
torch.set_num_threads(1)
torch.manual_seed(rank)  # Each rank starts from another model, and gets the swarm's through rank 0.
SAMPLES, BATCH = 480, 8
X = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(0))
held, agreed, drawn, kept = [], [], [], {}
options = {
    "seeds": [seed], "settle_s": 0.5, "config": Config(mix_every_steps=2, join_timeout_s=20.0),
}  # fmt: skip


def weights(model):
    flat = torch.cat([value.detach().reshape(-1) for value in model.parameters()])
    return hashlib.sha256(flat.numpy().tobytes()).hexdigest()


class Points(torch.utils.data.Dataset):
    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        drawn.append(index)
        return {"x": X[index], "labels": torch.tensor(index % 3)}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x, labels):
        logits = self.layer(x)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def with_lightning():
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint
    from torch.utils.data import DataLoader

    from node.adapters.lightning import LightningGossip

    class Module(LightningModule):
        def __init__(self):
            super().__init__()
            self.net = Net()

        def training_step(self, batch, number):
            return self.net(**batch)["loss"]

        def validation_step(self, batch, number):
            self.log("loss", self.net(**batch)["loss"], sync_dist=True)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    class Watch(Callback):
        def on_train_batch_end(self, trainer, module, *args):
            held.append(weights(module))

        def on_validation_start(self, trainer, module):
            agreed.append(weights(module))

    gossip = LightningGossip(**options)
    loader = DataLoader(Points(), BATCH, sampler=gossip.sampler(Points()))
    trainer = Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_epochs=2, logger=False, enable_progress_bar=False,
        enable_model_summary=False, num_sanity_val_steps=0,
        callbacks=[gossip, Watch(), ModelCheckpoint(folder, save_last=True, every_n_train_steps=20)],
    )  # fmt: skip
    trainer.fit(Module(), loader, DataLoader(tests(), BATCH))
    kept["saved"] = torch.load(folder / "last.ckpt", weights_only=False)["callbacks"]["LightningGossip"]["node"]
    return gossip, trainer.global_step


def tests():
    return [{"x": x, "labels": torch.tensor(0)} for x in X[:16]]


def with_transformers():
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from node.adapters.transformers import TransformersGossip

    class Watch(TrainerCallback):
        def on_step_end(self, args, state, control, model=None, **kwargs):
            held.append(weights(model))

        def on_evaluate(self, args, state, control, model=None, **kwargs):
            agreed.append(weights(model))

    arguments = TrainingArguments(
        str(folder), per_device_train_batch_size=BATCH, num_train_epochs=2, use_cpu=True, report_to="none",
        disable_tqdm=True, log_level="error", save_strategy="steps", save_steps=20, eval_strategy="epoch",
        dataloader_pin_memory=False, optim="sgd", learning_rate=0.1, ddp_backend="gloo",
    )  # fmt: skip
    trainer = Trainer(Net(), arguments, train_dataset=Points(), eval_dataset=tests(), callbacks=[Watch()])
    gossip = TransformersGossip(trainer, **options)
    callbacks = trainer.callback_handler.callbacks
    callbacks.append(callbacks.pop(callbacks.index(next(one for one in callbacks if isinstance(one, Watch)))))
    with gossip:
        trainer.train()
    state = json.loads((folder / "checkpoint-60" / "trainer_state.json").read_text())
    kept["saved"] = state["stateful_callbacks"]["TransformersGossip"]["attributes"]["saved"]
    return gossip, trainer.state.global_step


gossip, steps = {"lightning": with_lightning, "transformers": with_transformers}[framework]()
figures = gossip.node.metrics()
result = {
    "drawn": drawn, "steps": steps, "saved_samples": kept["saved"]["swarm_samples"], "counted": figures.samples,
    "same": {"held": held, "agreed": agreed, "exchanges": figures.exchanges_done, "id": gossip.node.id},
}  # fmt: skip
(folder / f"{rank}.json").write_text(json.dumps(result))
