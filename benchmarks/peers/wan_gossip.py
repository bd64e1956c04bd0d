"""One of our nodes in ``benchmarks/wan.py``: the settings for wide areas, in fp32 as all peers are.

With ``--every 1`` a mix is wanted whenever there can be one. The diary has each exchange's beginning and end.
"""

import os
import time

os.environ |= {"GOSSIP_INSECURE": "1", "GOSSIP_PROGRESS": "off"}  # the links are the benchmark's alone

import torch
from wan_job import BATCH, Job

from node import Config, Node

job = Job("gossip-trainer")
options = job.options
optimizer = torch.optim.SGD(job.model.parameters(), lr=options.rate)
node = Node(
    job.model, optimizer, seeds=[f"{options.first}:7700"] if options.rank else (), listen=f"{options.address}:7700",
    state_dir=options.folder / f"state-{options.rank}", config=Config.wan(codec="fp32", mix_every_steps=options.every),
)  # fmt: skip


def note_exchange(event) -> None:
    """Write an exchange's beginning or end into the diary, at its time by the monotonic clock."""
    at = event.at_s - time.time() + time.monotonic()
    job.note(event.kind, at=at, session=event.session, received=event.bytes_received)


node.on("exchange", note_exchange)
with node:
    job.train(job.model, optimizer, lambda loss: node.step(loss=loss, samples=BATCH))
