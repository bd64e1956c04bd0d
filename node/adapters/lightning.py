"""A callback that adds a node to Lightning's Trainer."""

from __future__ import annotations

from collections.abc import Callable, Sized
from functools import partial
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy
from lightning.pytorch.utilities.data import extract_batch_size
from torch.utils.data import DistributedSampler

from gossip.errors import ConfigError, LocalError
from node.adapters.adapter import Adapter, EpochSampler, ScaleWatch

__all__ = ["LightningGossip"]


class LightningGossip(Adapter, Callback):  # type: ignore[misc]
    """A Lightning callback, for automatic and manual optimization, with one optimizer or several.

    ``Trainer(callbacks=[LightningGossip(samples=100_000, seeds=[...])])``. A batch after which ``trainer.global_step``
    has moved is a step of the node; its samples are those of the batches since the last such batch. Divide the data
    with ``DataLoader(dataset, sampler=gossip.sampler(dataset))``. Lightning's checkpoints hold the run, and ``fit(...,
    ckpt_path=...)`` resumes it. The nodes settle before a checkpoint is written, unless a validation has just used
    these weights. Processes of DDP are one node. The node leaves when ``fit`` ends, however it ends.

    Args:
        samples: As in :class:`Adapter`.
        settle_s: As in :class:`Adapter`, in seconds.
        batch_size: The samples of one batch, if they cannot be derived from the batch's tensors.
        **options: As in :class:`Adapter`.

    Raises:
        ConfigError: The strategy does not hold the whole model in each process.
    """

    def __init__(
        self, *, samples: int | None = None, settle_s: float = 5.0, batch_size: int | None = None, **options: Any
    ) -> None:
        super().__init__(samples=samples, settle_s=settle_s, **options)
        self.batch_size = batch_size
        self.trainer: Any = None  # None before :meth:`setup`.
        self.is_fitting = False  # From `setup` to `close`.
        self.steps = 0  # Steps over all of the trainer's optimizers that the node has counted.
        self.new_samples = 0  # Samples since the last counted step.
        self.settled_at = -1  # The trainer's global_step at the last settling; -1 before the first.
        self.scale = ScaleWatch(None)

    def sampler(self, dataset: Sized) -> RankSampler:
        return RankSampler(self, len(dataset))

    # -- begin and end -----------------------------------------------------------------------------------------------
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Prepare for ``fit``: form one node of all processes, and settle before each checkpoint."""
        if stage != "fit":
            return
        strategy = trainer.strategy
        if trainer.world_size > 1 and (
            not isinstance(strategy, DDPStrategy) or isinstance(strategy, DeepSpeedStrategy)
        ):
            raise ConfigError(
                f"{type(strategy).__name__} does not hold the whole model in each of its {trainer.world_size} "
                'processes: give the Trainer strategy="ddp", whose processes are one node.'
            )
        self.form_node(trainer.world_size)
        self.trainer, self.is_fitting = trainer, True
        trainer.save_checkpoint = partial(self.agree_and_save, trainer.save_checkpoint)

    def ready(self) -> None:
        if not self.is_in_swarm:
            if not self.is_fitting:
                raise LocalError("This loader divides its data among the swarm: use it in trainer.fit alone.")
            optimizers = self.trainer.optimizers
            self.begin(self.trainer.lightning_module, optimizers[0] if len(optimizers) == 1 else optimizers)
            self.steps, self.new_samples = self.trainer.global_step, 0
            self.scale = ScaleWatch(getattr(self.trainer.precision_plugin, "scaler", None))
            self.trainer.should_stop = self.over or self.trainer.should_stop

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.ready()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.settle()

    def settle(self) -> None:
        super().settle()
        if self.is_in_swarm:
            self.settled_at = self.trainer.global_step

    def agree_and_save(self, save: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """Save a checkpoint of weights on which the nodes agree; after a validation, of the weights that it used."""
        if self.is_in_swarm and self.settled_at != self.trainer.global_step:
            self.settle()
        save(*args, **kwargs)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self.close()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.close()

    def close(self) -> None:
        self.is_fitting = False
        if self.trainer is not None:
            vars(self.trainer).pop("save_checkpoint", None)
        super().close()

    # -- steps -------------------------------------------------------------------------------------------------------
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.new_samples += extract_batch_size(batch) if self.batch_size is None else self.batch_size
        if trainer.global_step == self.steps:
            return  # Gradients are being accumulated.
        self.steps = trainer.global_step
        samples, self.new_samples = self.new_samples, 0
        if self.scale.take_skipped_step():
            return
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if loss is not None and pl_module.automatic_optimization:
            loss = loss * trainer.accumulate_grad_batches  # Lightning has divided it.
        if self.step(loss, samples):
            trainer.should_stop = True
        if trainer.log_every_n_steps and self.steps % trainer.log_every_n_steps == 0:
            for logger in trainer.loggers:
                logger.log_metrics(self.figures(), step=trainer.global_step)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.settle()  # Does nothing before training begins, when Lightning runs its sanity check.

    # -- checkpoints -------------------------------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        return {"node": self.node_state()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.saved = state_dict["node"]


class RankSampler(EpochSampler, DistributedSampler[int]):
    """An EpochSampler that Lightning keeps.

    With several processes Lightning replaces samplers of other classes by one that draws a whole epoch at its beginning
    and divides it again.
    """
