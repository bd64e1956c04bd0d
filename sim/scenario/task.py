"""The task of a scenario: the data set and its division, the model, and the optimizer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from gossip.errors import did_you_mean
from sim.scenario import tables
from sim.scenario.tables import KeyFault, require

DATASETS = ("digits", "fashion-mnist", "mnist", "shakespeare", "averaging")
MODELS = ("linear", "mlp", "cnn", "gpt")
LOSSES = ("cross-entropy", "mse")
USUAL_RATES = {"adamw": 0.001, "muon": 0.02}  # Examples for an error: optimizers whose rate a scenario must give.
ADAM_BETAS = (0.9, 0.999)
LARGEST = 1_000_000  # Peers, and sizes of a task: a typing error is found before memory runs out.


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition(tables.KeyTable):
    """The division of the data set.

    Attributes:
        kind: "iid"; "dirichlet", classes in shares of Dirichlet(alpha) (T. Hsu et al., arXiv:1909.06335); or "natural",
            by author (a speaker of the plays).
        alpha: The evenness of "dirichlet": 0.1 is very uneven, 100 nearly even.

    Raises:
        ConfigError: A value cannot work.
    """

    kind: Literal["iid", "dirichlet", "natural"] = "iid"
    alpha: float | None = None

    def __post_init__(self) -> None:
        tables.settle(self)
        if self.kind == "dirichlet":
            is_valid = self.alpha is not None and 0 < self.alpha < math.inf
            require(is_valid, "alpha", self.alpha, "a positive number for dirichlet, as 0.1")
        else:
            require(self.alpha is None, "alpha", self.alpha, f"left out: {self.kind} has none")

    @classmethod
    def parse(cls, value: object) -> Partition:
        """Parse a table, or a kind alone."""
        return tables.record(cls, {"kind": value} if isinstance(value, str) else value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimizer(tables.KeyTable):
    """The optimizer of the peers, with the arithmetic of torch's.

    "sgd" is torch.optim.SGD (lr, momentum, weight_decay). "adamw" is torch.optim.AdamW (lr, betas, weight_decay).
    "muon" is :class:`sim.learning.optimizer.steppers.Muon`, with AdamW (betas) at the rate ``adam_lr`` for embeddings
    and for parameters that are no matrix.

    ``clip_norm`` limits the norm of a gradient, as torch.nn.utils.clip_grad_norm_ does. With ``schedule`` "cosine" the
    rate rises to ``lr`` over ``warmup_steps``, falls to ``min_lr`` until ``schedule_steps``, and stays there. It counts
    each peer's own steps, in all its lives.

    Raises:
        ConfigError: A value cannot work.
    """

    name: Literal["sgd", "adamw", "muon"] = "sgd"
    lr: float = 0.1
    momentum: float = 0.0
    weight_decay: float = 0.0
    betas: tuple[float, float] = ADAM_BETAS
    adam_lr: float | None = None
    clip_norm: float | None = None
    schedule: Literal["constant", "cosine"] = "constant"
    schedule_steps: int | None = None
    warmup_steps: int = 0
    min_lr: float = 0.0

    def __post_init__(self) -> None:
        tables.settle(self)
        require(0 < self.lr < math.inf, "lr", self.lr, "a positive number")
        require(0 <= self.momentum < 1, "momentum", self.momentum, "from 0 to below 1")
        require(0 <= self.weight_decay < math.inf, "weight_decay", self.weight_decay, "a number from 0 up")
        require(all(0 <= beta < 1 for beta in self.betas), "betas", self.betas, "two numbers from 0 to below 1")
        if self.name != "sgd":
            reason = {"adamw": "adamw has betas", "muon": "muon has a momentum of 0.95"}[self.name]
            require(self.momentum == 0, "momentum", self.momentum, f"left out: {reason}")
        has_betas = self.name == "sgd" and self.betas != ADAM_BETAS
        require(not has_betas, "betas", self.betas, "left out: sgd has a momentum")
        adam, clip = self.adam_lr, self.clip_norm
        if self.name == "muon":
            is_valid = adam is not None and 0 < adam < math.inf
            require(is_valid, "adam_lr", adam, "a positive number for muon, the rate of AdamW beside it, as 0.01")
        else:
            require(adam is None, "adam_lr", adam, "left out: only muon has AdamW beside it")
        require(clip is None or 0 < clip < math.inf, "clip_norm", clip, "a positive number, as 1.0")
        self.check_schedule()

    def check_schedule(self) -> None:
        steps, warmup = self.schedule_steps, self.warmup_steps
        if self.schedule == "constant":
            for key, value in (("schedule_steps", steps), ("warmup_steps", warmup), ("min_lr", self.min_lr)):
                is_unset = value is None or (value == 0 and key != "schedule_steps")
                require(is_unset, key, value, "left out, or schedule = 'cosine': a constant rate has none")
            return
        is_valid = steps is not None and 1 <= steps <= LARGEST
        wanted = f"the steps of a peer until the rate is at its lowest, 1 to {LARGEST:,}, as 3000"
        require(is_valid, "schedule_steps", steps, wanted)
        assert steps is not None
        require(
            0 <= warmup < steps, "warmup_steps", warmup, f"from 0 to below schedule_steps = {steps}, which counts them"
        )
        require(0 <= self.min_lr <= self.lr, "min_lr", self.min_lr, f"from 0 to lr = {self.lr:g}")

    @classmethod
    def parse(cls, value: object) -> Optimizer:
        """Parse a table, or a name alone. adamw and muon must name their lr: sgd's default would make them diverge."""
        table: Any = {"name": value} if isinstance(value, str) else value
        name = table.get("name") if isinstance(table, Mapping) else None
        if isinstance(name, str) and name in USUAL_RATES and "lr" not in table:
            raise KeyFault("lr", f"is missing: {name} needs one of its own, as {USUAL_RATES[name]}.")
        return tables.record(cls, table)

    def plain(self) -> dict[str, Any]:
        """Return the table that :meth:`parse` reads."""
        table = tables.fields_of(self)
        del table["betas" if self.name == "sgd" else "momentum"]
        for key in ("warmup_steps", "min_lr") if self.schedule == "constant" else ():
            del table[key]
        return table


@dataclass(frozen=True, slots=True, kw_only=True)
class Task(tables.KeyTable):
    """The task that is learned.

    Attributes:
        dataset: A data set's name, or "module:function", which returns (x_train, y_train, x_test, y_test). "averaging"
            trains nothing: the peers average vectors drawn from N(0, 1).
        model: A model's name, or "module:function", which returns a torch.nn.Module.
        loss: A loss's name, or "module:function" of (output, y). None: cross-entropy or mse, depending on y.
        metric: "module:function" of (output, y), reported with the loss.
        partition: How the data set is divided.
        batch_size: Samples per step.
        optimizer: The optimizer.
        samples_per_peer: None divides the data set among the peers. A number gives each its own draw of this many
            samples, which may overlap with others'. If there are fewer than 8 samples per peer (1,437 digits among
            10,000 peers), None means 16 drawn with overlap.
        hidden: The width of the mlp; None: 64.
        elements: The length of a vector of "averaging".
        model_mb: The size in MB of float32 of the model that this one stands for. Links carry vectors of that size, and
            nothing else changes: a small model shows in seconds how a large one mixes. None: it stands for itself.

    Raises:
        ConfigError: A value cannot work.
    """

    dataset: str = "digits"
    model: str = "mlp"
    loss: str | None = None
    metric: str | None = None
    partition: Partition = Partition()
    batch_size: int = 8
    optimizer: Optimizer = Optimizer()
    samples_per_peer: int | None = None
    hidden: int | None = None
    elements: int = 1
    model_mb: float | None = None

    def __post_init__(self) -> None:
        tables.settle(self)
        for key, value, known in (
            ("dataset", self.dataset, DATASETS), ("model", self.model, MODELS), ("loss", self.loss, LOSSES),
            ("metric", self.metric, ()),
        ):  # fmt: skip
            if value is None:
                continue
            if not self.trains and key in ("loss", "metric"):
                require(False, key, value, "left out: averaging trains nothing")
            module, colon, function = value.partition(":")
            words = (*module.split("."), function)
            is_valid = value in known or (colon == ":" and all(word.isidentifier() for word in words))
            names = ", ".join(known) + " or " if known else ""
            require(is_valid, key, value, f"{names}'module:function'{did_you_mean(value, known)}")
        for key in ("batch_size", "samples_per_peer", "hidden", "elements"):
            value = getattr(self, key)
            require(value is None or value >= 1, key, value, "1 or more")
            require(value is None or value <= LARGEST, key, value, f"{LARGEST:,} at most")
        require(self.hidden is None or self.model == "mlp", "hidden", self.hidden, "left out: only mlp has a width")
        is_used = self.elements == 1 or not self.trains
        require(is_used, "elements", self.elements, "left out: it is the length of the vectors of averaging")
        is_valid = self.model_mb is None or 0 < self.model_mb <= LARGEST
        require(is_valid, "model_mb", self.model_mb, f"a size in MB above 0, {LARGEST:,} at most")

    @property
    def trains(self) -> bool:
        """Return True if models are trained, and not only averaged."""
        return self.dataset != "averaging"

    def weight(self, elements: int) -> float:
        """Return the weight of a byte of ``elements`` on a link: 1, or more if they stand for a larger model."""
        return 1.0 if self.model_mb is None else self.model_mb * 1e6 / (4 * elements)
