"""The built-in models of scenarios, each small enough to train on one core."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional as F

from gossip.errors import ConfigError
from sim import plugins

if TYPE_CHECKING:
    from sim.learning.datasets import Dataset
    from sim.scenario.task import Task

HIDDEN = 64  # Default width of the mlp.


def build(task: Task, dataset: Dataset, seed: int) -> nn.Module:
    """Build the model of a scenario, sized to its data.

    The weights depend only on the seed, and torch's global generator is left unchanged. Raises ConfigError for a model
    that cannot take such data, or a function that returns no model.
    """
    name = task.model
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if ":" in name:
            module = plugins.find(name, "task.model")()
            if not isinstance(module, nn.Module):
                raise ConfigError(f"task.model = {name!r} returned {type(module).__name__}: return a torch.nn.Module.")
            return module
        if dataset.text != (name == "gpt"):
            mistake = "cannot read text: use gpt"
            if name == "gpt":
                mistake = "reads text: use linear, mlp or cnn, or the data set shakespeare"
            raise ConfigError(f"task.model = {name!r} {mistake} ({dataset.name} was given).")
        if name == "gpt":
            if max(dataset.outputs, 1 + int(dataset.x_train.max()), 1 + int(dataset.x_test.max())) > 256:
                raise ConfigError(
                    f"task.model = 'gpt' reads bytes, and {dataset.name} has tokens of 256 and more: name a model of "
                    "your own, as 'module:function'."
                )
            return ByteGPT(layers=2, heads=2, width=32, context=dataset.x_train.shape[1])
        if name == "cnn":
            if dataset.picture is None or min(dataset.picture[1:]) < 4:
                raise ConfigError(
                    f"task.model = 'cnn' needs pictures of 4 x 4 pixels or more, samples of (channels, height, width), "
                    f"and those of {dataset.name} are {list(dataset.x_train.shape[1:])}: use linear or mlp."
                )
            return cnn(dataset.picture, dataset.outputs)
        inputs, outputs = dataset.x_train[0].numel(), dataset.outputs
        return linear(inputs, outputs) if name == "linear" else mlp(inputs, task.hidden or HIDDEN, outputs)


def linear(inputs: int, classes: int) -> nn.Module:
    """Build multinomial logistic regression: (batch, ...) with ``inputs`` numbers -> logits (batch, classes)."""
    return nn.Sequential(nn.Flatten(), nn.Linear(inputs, classes))


def mlp(inputs: int, hidden: int, classes: int) -> nn.Module:
    """Build a perceptron with one hidden layer: (batch, ...) with ``inputs`` numbers -> logits (batch, classes)."""
    return nn.Sequential(nn.Flatten(), nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, classes))


def cnn(picture: tuple[int, int, int], classes: int) -> nn.Module:
    """Build a convolutional network: (batch, channels x height x width in any shape) -> logits (batch, classes).

    It is half as wide for pictures of less than 16 x 16 pixels. With ten classes, 28 x 28 pixels take 105,866
    parameters and 8 x 8 digits 3,658. It has no BatchNorm, whose statistics fail on non-IID data (arXiv:1910.00189).
    """
    channels, height, width = picture
    first, second, hidden = (16, 32, 64) if height * width >= 256 else (8, 16, 32)
    return nn.Sequential(
        nn.Flatten(),
        nn.Unflatten(1, picture),
        nn.Conv2d(channels, first, 3, padding=1),
        nn.MaxPool2d(2),  # Placed before the ReLU: the result is the same with four times less work.
        nn.ReLU(),
        nn.Conv2d(first, second, 3, padding=1),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(second * (height // 4) * (width // 4), hidden),
        nn.ReLU(),
        nn.Linear(hidden, classes),
    )


class ByteGPT(nn.Module):
    """A decoder-only transformer over bytes: int64 (batch, time) -> logits (batch, time, 256), time <= context.

    It has about 12 layers width^2 parameters, one million by default. It uses pre-norm, learned positions, and an
    output tied to the embedding, as in GPT-2 (Radford et al., 2019) and Andrej Karpathy's nanoGPT.
    """

    def __init__(self, layers: int = 5, heads: int = 4, width: int = 128, context: int = 128) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(_Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                # As in GPT-2, outputs into the residual stream start smaller, because 2 x layers of them add up.
                nn.init.normal_(weight, std=0.02 / (2 * layers) ** 0.5 if name.endswith("out.weight") else 0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        time = torch.arange(tokens.shape[1], device=tokens.device)  # (time,)
        x = self.bytes(tokens) + self.positions(time)  # (batch, time, width)
        return F.linear(self.norm(self.blocks(x)), self.bytes.weight)  # (batch, time, 256)


class _Block(nn.Module):
    """A transformer block: attention, then a perceptron, each with a residual connection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.queries_keys_values = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp_in = nn.Linear(width, 4 * width, bias=False)
        self.mlp_out = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, time, width = x.shape
        qkv = self.queries_keys_values(self.attention_norm(x))  # (batch, time, 3 width)
        q, k, v = qkv.view(batch, time, 3 * self.heads, -1).transpose(1, 2).chunk(3, 1)  # (batch, heads, time, head)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # (batch, heads, time, head)
        x = x + self.attention_out(attended.transpose(1, 2).reshape(batch, time, width))
        added: torch.Tensor = self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x))))
        return x + added
