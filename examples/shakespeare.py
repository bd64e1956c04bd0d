"""Shakespeare with a byte-level GPT of a million parameters, the text shared by the swarm or private to each node.

IID, each node training on its share of all windows:  gossip local -n 4 examples/shakespeare.py
Non-IID, each node keeping roles nobody else reads:   gossip run examples/shakespeare.py --by-speaker --part 0 --parts 4
"""

import argparse
import json
from collections.abc import Iterator

import torch
from torch.nn import functional as F

from node import Node
from sim.data import shakespeare
from sim.models import ByteGPT

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


def windows(text: bytes) -> torch.Tensor:
    """Cut a text into pieces of one byte more than a window, uint8 (windows, context + 1); the rest is left out."""
    count = len(text) // (args.context + 1)
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8)  # (bytes,)
    return tokens[: count * (args.context + 1)].view(count, args.context + 1)


def next_byte_loss(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean loss in nats a byte and share of bytes guessed right; x and y uint8 (batch, context), y one byte ahead."""
    x, y = x.to(args.device).long(), y.to(args.device).long()
    logits = model(x)  # (batch, context, 256)
    return F.cross_entropy(logits.flatten(0, 1), y.flatten()), (logits.argmax(2) == y).float().mean()


# The last tenth of every role is kept for the test, so that private and shared runs are judged on the same text.
texts = [text for _, text in sorted(shakespeare().items())]
mine = texts[args.part :: args.parts] if args.by_speaker else texts
train = torch.cat([windows(text[: len(text) * 9 // 10]) for text in mine])  # (windows, context + 1)
x_train, y_train = train[:, :-1], train[:, 1:]  # (windows, context) each
test = windows(b"\n".join(text[len(text) * 9 // 10 :] for text in texts))  # (windows, context + 1)
test = test[:: max(1, len(test) // args.test_windows)][: args.test_windows]

torch.manual_seed(args.seed)
model = ByteGPT(args.layers, args.heads, args.width, args.context).to(args.device)
optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95))


def private_batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """One pass over this node's own windows, in a new order each time."""
    for rows in torch.randperm(len(x_train)).split(args.batch_size):
        yield x_train[rows], y_train[rows]


with Node(model, optimizer) as node:
    if args.by_speaker:
        torch.manual_seed(args.seed + 1 + args.part)  # equal weights at the start, but an order of its own
    while not node.finished and node.swarm_samples < args.samples:
        for x, y in private_batches() if args.by_speaker else node.shard((x_train, y_train), args.batch_size):
            loss, _ = next_byte_loss(x, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            node.step(loss=loss, samples=len(x))
            # The swarm's own count drives the schedule: no node leads, and a newcomer is at once in step.
            optimizer.param_groups[0]["lr"] = args.lr * max(0.0, 1 - node.swarm_samples / args.samples)
            if node.finished or node.swarm_samples >= args.samples:
                break
    node.settle(args.settle)
    node.finish()  # whoever comes now gets these weights, and trains nothing
    with torch.no_grad():
        scores = torch.tensor([next_byte_loss(rows[:, :-1], rows[:, 1:]) for rows in test.split(32)])  # (batches, 2)
    loss, accuracy = scores.mean(0).tolist()
    done = node.metrics()
    result = {"node": str(node.id), "accuracy": accuracy, "loss": loss, "steps": done.steps, "samples": done.samples}
print(json.dumps(result), flush=True)
