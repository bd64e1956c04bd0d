"""A node beside Lightning's Trainer, as a callback."""

from __future__ import annotations

from collections.abc import Callable, Sized
from functools import partial
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy
from lightning.pytorch.utilities.data import extract_batch_size
from torch.utils.data import DistributedSampler

from gossip.errors import ConfigError
from node.adapters.adapter import Adapter, EpochSampler, ScaleWatch

__all__ = ["LightningGossip"]


class LightningGossip(Adapter, Callback):  # type: ignore[misc]
    """``Trainer(callbacks=[LightningGossip(samples=100_000, seeds=[...])])``: automatic and manual optimization, with
    one optimizer or several.

    A batch after which ``trainer.global_step`` has moved is a step of the node; the batches since the last one are its
    samples. ``batch_size``: of one batch, where it cannot be told from the batch's tensors. The data are divided by
    ``DataLoader(dataset, sampler=gossip.sampler(dataset))``. Checkpoints of Lightning hold the run, and ``fit(...,
    ckpt_path=...)`` goes on with it; before one is written the nodes agree, unless a validation has just seen these
    weights. Processes of DDP are one node. The node leaves when ``fit`` ends, however it ends. :class:`Adapter` has
    the other arguments.
    """

    def __init__(
        self, *, samples: int | None = None, settle_s: float = 5.0, batch_size: int | None = None, **options: Any
    ) -> None:
        super().__init__(samples=samples, settle_s=settle_s, **options)
        self.batch_size = batch_size
        self.trainer: Any = None
        self.steps = 0  # of the trainer's optimizers, all of them, that the node knows of
        self.seen = 0  # samples since then
        self.settled_at = -1  # global_step: what was agreed on then is not mixed again before the next step
        self.scale = ScaleWatch(None)

    def sampler(self, dataset: Sized) -> RankSampler:
        return RankSampler(self, len(dataset))

    # -- begin and end -----------------------------------------------------------------------------------------------
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
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
        self.share_model(trainer.world_size)
        self.trainer = trainer
        trainer.save_checkpoint = partial(self.agree_and_save, trainer.save_checkpoint)

    def ready(self) -> None:
        if not self.running:
            optimizers = self.trainer.optimizers
            self.begin(self.trainer.lightning_module, optimizers[0] if len(optimizers) == 1 else optimizers)
            self.steps, self.seen = self.trainer.global_step, 0
            self.scale = ScaleWatch(getattr(self.trainer.precision_plugin, "scaler", None))
            self.trainer.should_stop = self.over or self.trainer.should_stop

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.ready()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.settle()

    def settle(self) -> None:
        super().settle()
        if self.running:
            self.settled_at = self.trainer.global_step

    def agree_and_save(self, save: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """A checkpoint holds what the nodes agree on; that of a validation what the validation has seen."""
        if self.running and self.settled_at != self.trainer.global_step:
            self.settle()
        save(*args, **kwargs)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self.close()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.close()

    def close(self) -> None:
        if self.trainer is not None:
            vars(self.trainer).pop("save_checkpoint", None)
        super().close()

    # -- between -----------------------------------------------------------------------------------------------------
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.seen += extract_batch_size(batch) if self.batch_size is None else self.batch_size
        if trainer.global_step == self.steps:
            return  # gradients are being accumulated
        self.steps = trainer.global_step
        samples, self.seen = self.seen, 0
        if self.scale.left_out():
            return
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if loss is not None and pl_module.automatic_optimization:
            loss = loss * trainer.accumulate_grad_batches  # Lightning divided it
        if self.step(loss, samples):
            trainer.should_stop = True
        if self.steps % trainer.log_every_n_steps == 0:
            for logger in trainer.loggers:
                logger.log_metrics(self.figures(), step=trainer.global_step)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.settle()  # nothing before training begins, when Lightning tries whether validation works

    # -- checkpoints -------------------------------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        return {"node": self.kept()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.saved = state_dict["node"]


class RankSampler(EpochSampler, DistributedSampler[int]):
    """Lightning puts another sampler in the place of each that is not of this class, where there are several processes:
    it would draw a whole epoch at its beginning, and divide it again."""
