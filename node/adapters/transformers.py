"""A node beside the Trainer of transformers, as a callback."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch.utils.data import Sampler
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import DefaultFlowCallback, ExportableState

from gossip.errors import ConfigError, LocalError
from node.adapters.adapter import Block, EpochSampler, ScaleWatch
from node.node import Node

__all__ = ["TransformersGossip"]


class TransformersGossip(Block, TrainerCallback, ExportableState):  # type: ignore[misc]
    """``with TransformersGossip(trainer, samples=100_000, seeds=[...]): trainer.train()``.

    A step of the optimizer is one of the node, with as many samples as its batches were to hold; steps that half
    precision left out are none. The trainer's own callbacks are told by :meth:`on_log`, so that the node's figures
    reach every logger. The training data are divided among the members, unless ``divide`` is False, for nodes with data
    of their own. Its checkpoints hold the run, and ``train(resume_from_checkpoint=...)`` goes on with it. The node
    leaves with the block, whatever ends it. :class:`node.adapters.adapter.Adapter` has the other arguments.
    """

    def __init__(
        self,
        trainer: Trainer,
        *,
        samples: int | None = None,
        settle_s: float = 5.0,
        divide: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(samples=samples, settle_s=settle_s, **options)
        if trainer.is_deepspeed_enabled:
            raise ConfigError(
                "DeepSpeed keeps another part of the optimizer in each process: start this Trainer without it; several "
                "processes of torchrun are one node."
            )
        self.share_model(trainer.args.world_size)
        if trainer.args.restore_callback_states_from_checkpoint:
            raise ConfigError(
                "Leave restore_callback_states_from_checkpoint out: it would put another object in this callback's "
                "place, which reads what its checkpoint says by itself."
            )
        self.trainer = trainer
        self.model: Any = None
        self.scale = ScaleWatch(None)
        self.loss: float | None = None  # transformers tells its callbacks no other than the logs'
        # Behind the callback that decides when to evaluate and save, and before the loggers.
        callbacks = trainer.callback_handler.callbacks
        flow = [number for number, callback in enumerate(callbacks) if isinstance(callback, DefaultFlowCallback)]
        callbacks.insert(flow[0] + 1 if flow else 0, self)
        if divide:
            trainer._get_train_sampler = self.train_sampler

    def __exit__(self, *args: Any) -> None:
        super().__exit__(*args)
        self.trainer.callback_handler.callbacks.remove(self)
        vars(self.trainer).pop("_get_train_sampler", None)

    def train_sampler(self, train_dataset: Any = None) -> Sampler[int] | None:
        dataset = self.trainer.train_dataset if train_dataset is None else train_dataset
        return WholeSampler(self, len(dataset)) if hasattr(dataset, "__len__") else None

    def ready(self) -> None:
        if self.running and self.model is not self.trainer.model:
            raise LocalError(
                "This block has trained another model, as model_init makes them: make a new TransformersGossip for it."
            )
        if not self.running:
            self.check_entered()
            self.model = self.trainer.model
            self.begin(self.trainer.model, self.trainer.optimizer)
            self.scale = ScaleWatch(self.trainer.accelerator.scaler)

    # -- the trainer's events ----------------------------------------------------------------------------------------
    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        found = state.stateful_callbacks.setdefault(type(self).__name__, self.state())
        self.saved = found["attributes"]["saved"] or self.saved
        self.ready()
        control.should_training_stop = self.over

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        trainer = self.trainer
        if not self.scale.left_out():  # accelerate's own answer is wrong for fused optimizers, as the default one is
            samples = trainer._train_batch_size * trainer.current_gradient_accumulation_steps
            if self.step(self.loss, samples):
                control.should_training_stop = True
                # As where its own limit ends it; what is done once an epoch follows by itself.
                control.should_evaluate |= args.eval_strategy == "steps"
                control.should_save |= args.save_strategy == "steps"
        self.before_use(control)

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.before_use(control)

    def before_use(self, control: TrainerControl) -> None:
        if control.should_evaluate or control.should_save:
            self.settle()

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        if logs is not None:
            self.loss = logs.get("loss", self.loss)
            logs.update(self.figures())

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if not args.load_best_model_at_end:  # those of an earlier step, of this node's choosing, are here then
            self.settle()

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": {"saved": self.kept()}}


class WholeSampler(EpochSampler):
    """Every process of a node draws the node's whole share, in one order: accelerate's loaders give each its batches of
    it, and would leave out most of one that was divided before."""

    def __len__(self) -> int:
        return self.length

    def share(self, node: Node) -> Iterable[Any]:
        return node._training.samplers.make(self.length, by_rank=False)
