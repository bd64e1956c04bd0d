"""A callback that adds a node to the Trainer of transformers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import Sampler
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import DefaultFlowCallback, ExportableState
from transformers.trainer_pt_utils import find_batch_size

from gossip.errors import ConfigError, LocalError
from node.adapters.adapter import ContextAdapter, EpochSampler, ScaleWatch
from node.node import Node

__all__ = ["TransformersGossip"]


class TransformersGossip(ContextAdapter, TrainerCallback, ExportableState):  # type: ignore[misc]
    """A callback for the Trainer of transformers.

    ``with TransformersGossip(trainer, samples=100_000, seeds=[...]): trainer.train()``. An optimizer step is one of the
    node, with the rows of its batches; steps that mixed precision skips do not count. Batches that do not show their
    samples, like batches that a collator joins to one row, count as full. :meth:`on_log` adds the node's figures to the
    trainer's logs, so that they reach every logger. The checkpoints hold the run, and
    ``train(resume_from_checkpoint=...)`` resumes it. The node leaves with the block, however it ends.

    With ``samples`` the trainer's learning rate schedule follows the swarm's progress, so that it ends when the swarm
    has these samples, and not after ``max_steps`` of this node.

    Args:
        trainer: The trainer.
        samples: As in :class:`node.adapters.adapter.Adapter`.
        settle_s: As in :class:`node.adapters.adapter.Adapter`, in seconds.
        divide: Divide the training data among the members; False for nodes with data of their own.
        **options: As in :class:`node.adapters.adapter.Adapter`.

    Raises:
        ConfigError: The trainer uses DeepSpeed, or restore_callback_states_from_checkpoint.
    """

    def __init__(
        self, trainer: Trainer, *, samples: int | None = None, settle_s: float = 5.0, divide: bool = True,
        **options: Any,
    ) -> None:  # fmt: skip
        super().__init__(samples=samples, settle_s=settle_s, **options)
        if trainer.is_deepspeed_enabled:
            raise ConfigError(
                "DeepSpeed keeps another part of the optimizer in each process: start this Trainer without it; several "
                "processes of torchrun are one node."
            )
        self.form_node(trainer.args.world_size)
        if trainer.args.restore_callback_states_from_checkpoint:
            raise ConfigError(
                "Leave restore_callback_states_from_checkpoint out: it would put another object in this callback's "
                "place, which reads what its checkpoint says by itself."
            )
        self.trainer = trainer
        self.model: Any = None  # The model of the node; None before it begins.
        self.scale = ScaleWatch(None)
        self.loss: float | None = None  # The last one logged: transformers passes callbacks no other.
        # Insert it after the callback that decides when to evaluate and save, and before the loggers.
        callbacks = trainer.callback_handler.callbacks
        flow_places = [place for place, callback in enumerate(callbacks) if isinstance(callback, DefaultFlowCallback)]
        callbacks.insert(flow_places[0] + 1 if flow_places else 0, self)
        self.shows_samples: bool | None = None  # The first dimension of a batch is its samples; None before the first.
        self.drawn = 0  # The samples in the batches of the current step.
        self.get_batches = trainer.get_batch_samples
        trainer.get_batch_samples = self.get_counted_batches
        if divide:
            trainer._get_train_sampler = self.train_sampler

    def __exit__(self, *args: Any) -> None:
        super().__exit__(*args)
        self.trainer.callback_handler.callbacks.remove(self)
        for name in ("_get_train_sampler", "get_batch_samples"):
            vars(self.trainer).pop(name, None)

    def get_counted_batches(self, *args: Any, **kwargs: Any) -> Any:
        """Return the batches of the next step, as the trainer does, and count their samples."""
        batches, items = self.get_batches(*args, **kwargs)
        most, dataset = self.trainer._train_batch_size, self.trainer.train_dataset
        rows = [find_batch_size(batch) for batch in batches]
        if self.shows_samples is None and rows:
            self.shows_samples = rows[0] == (min(most, len(dataset)) if hasattr(dataset, "__len__") else most)
        self.drawn = sum(rows) if self.shows_samples else most * len(rows)
        return batches, items

    def train_sampler(self, train_dataset: Any = None) -> Sampler[int] | None:
        dataset = self.trainer.train_dataset if train_dataset is None else train_dataset
        return WholeSampler(self, len(dataset)) if hasattr(dataset, "__len__") else None

    def ready(self) -> None:
        if self.is_in_swarm and self.model is not self.trainer.model:
            raise LocalError(
                "This block has trained another model, as model_init makes them: make a new TransformersGossip for it."
            )
        if not self.is_in_swarm:
            self.check_entered()
            self.model = self.trainer.model
            self.begin(self.trainer.model, self.trainer.optimizer)
            self.scale = ScaleWatch(self.trainer.accelerator.scaler)

    # -- the trainer's events ----------------------------------------------------------------------------------------
    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        stored = state.stateful_callbacks.setdefault(type(self).__name__, self.state())
        self.saved = stored["attributes"]["saved"] or self.saved
        self.ready()
        assert self.node is not None
        scheduler = self.trainer.lr_scheduler
        if self.samples is not None and not isinstance(scheduler, ReduceLROnPlateau):
            # The trainer makes a step of it for each step of its own, and the node adds those of the others.
            self.node.schedule(scheduler, self.samples, state.max_steps)
        control.should_training_stop = self.over

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        # accelerate's own answer is wrong for fused optimizers, like the default one.
        if not self.scale.take_skipped_step() and self.step(self.loss, self.drawn):
            control.should_training_stop = True
            # As when the trainer's own limit ends it; actions of an epoch's end follow by themselves.
            control.should_evaluate |= args.eval_strategy == "steps"
            control.should_save |= args.save_strategy == "steps"
        self.settle_before_use(control)

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.settle_before_use(control)

    def settle_before_use(self, control: TrainerControl) -> None:
        """Settle if an evaluation or a checkpoint follows."""
        if control.should_evaluate or control.should_save:
            self.settle()

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl,
        logs: dict[str, float] | None = None, **kwargs: Any,
    ) -> None:  # fmt: skip
        if logs is not None:
            self.loss = logs.get("loss", self.loss)
            logs.update(self.figures())

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if not args.load_best_model_at_end:  # Otherwise the trainer has loaded this node's best earlier weights.
            self.settle()

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": {"saved": self.node_state()}}


class WholeSampler(EpochSampler):
    """A sampler of the node's whole share, in the same order in every process of the node.

    accelerate's loaders give each process its batches of it, and would drop most of an already divided share.
    """

    def __len__(self) -> int:
        return self.length

    def share(self, node: Node) -> Iterable[Any]:
        return node._training.samplers.make(self.length, by_rank=False)
