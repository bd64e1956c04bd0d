"""torchtitan's own Trainer, of which each torchrun is a node: its ranks shard the model (FSDP, tensor parallelism), and
nodes mix weights, where the replicas of HSDP sum gradients. `--training.steps` is what one replica alone would take.

On each of several hosts, in the root of this repository; HOST0 leaves GOSSIP_SEEDS out:
    GOSSIP_LISTEN=0.0.0.0:7700 GOSSIP_SECRET_FILE=swarm.secret GOSSIP_SEEDS=HOST0:7700 \\
        torchrun --standalone --nproc-per-node gpu -m torchtitan.train \\
        --module examples.engines.titan --config llama3_debugmodel --hf_assets_path DIR --dump_folder DIR
"""

import json
from dataclasses import dataclass, fields
from random import SystemRandom

import torch.distributed as dist
from torchtitan.hf_datasets.text_datasets import DATASETS
from torchtitan.models.llama3 import config_registry
from torchtitan.trainer import Trainer

from gossip import Node


def in_own_order(load):
    """Return ``load`` with its dataset shuffled: alike on the ranks of a node, which divide it, and not on others."""

    def load_shuffled(path):
        seed = [SystemRandom().getrandbits(31)]
        dist.broadcast_object_list(seed)
        return load(path).shuffle(seed=seed[0])

    return load_shuffled


for dataset in DATASETS.values():
    dataset.loader = in_own_order(dataset.loader)


class GossipTrainer(Trainer):
    """A Trainer whose ranks are one node."""

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        """The options of torchtitan."""

    def __init__(self, config):
        super().__init__(config)
        self.node = Node(self.model_parts[0], list(self.optimizers), group=dist.group.WORLD)
        self.parts = self.parallel_dims.dp_replicate * self.parallel_dims.dp_shard  # Into which a batch is divided.
        self.samples = config.training.local_batch_size * self.gradient_accumulation_steps * self.parts
        self.total = config.training.steps * self.samples
        for scheduler in self.lr_schedulers:
            self.node.schedule(scheduler, self.total, config.training.steps)
        self.lr_schedulers.step = lambda: None  # They follow the swarm's steps, and not the node's own.

    def batch_generator(self, data_iterable):
        self.node.start()  # Trainer.train has loaded the checkpoint by now.
        return super().batch_generator(data_iterable)

    def state_dict(self):
        run = self.node.state_dict() if self.step else {}  # A checkpoint that is about to be loaded asks too.
        return super().state_dict() | {"gossip": json.dumps(run)}

    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict)
        self.node.load_state_dict(json.loads(state_dict["gossip"]))

    def should_continue_training(self):
        return not self.node.finished and self.node.swarm_samples < self.total

    def forward_backward_step(self, **batch):
        loss = super().forward_backward_step(**batch)
        self.loss = self.loss + loss.detach() * self.parts  # torchtitan divides it by all ranks' tokens.
        return loss

    def train_step(self, data_iterator):
        self.loss = 0.0
        super().train_step(data_iterator)
        self.node.step(self.loss, samples=self.samples if dist.get_rank() == 0 else 0)

    def train(self):
        try:
            super().train()
            self.checkpointer.maybe_wait_for_staging()
            self.node.settle(10, wait_s=60)
            self.checkpointer.save(self.step, last_step=True)
            self.node.finish()
        finally:
            self.node.close()


def llama3_debugmodel():
    """Return torchtitan's configuration of this name, for a GossipTrainer; do the same with any other."""
    config = config_registry.llama3_debugmodel()
    return GossipTrainer.Config(**{field.name: getattr(config, field.name) for field in fields(config)})
