"""One peer of hivemind 1.1.12 in ``benchmarks/wan.py``, in an environment of its own.

``hivemind.Optimizer`` as its documentation advises for peers that must not wait for each other: ``use_local_updates``,
every step is a local one and parameters are averaged in the background once all have taken ``--every`` steps together
(``target_batch_size``).
"""

import time

import hivemind
import torch
from wan_job import BATCH, Job

job = Job("hivemind")
options = job.options
address_file = options.folder / "first"  # the first peer writes its address there, which contains its key
while options.rank and not address_file.exists():
    time.sleep(0.05)
dht = hivemind.DHT(
    host_maddrs=[f"/ip4/{options.address}/tcp/7700"],
    initial_peers=[address_file.read_text()] if options.rank else [],
    start=True,
)
if not options.rank:
    unfinished = address_file.with_suffix(".new")
    unfinished.write_text(str(dht.get_visible_maddrs()[0]))
    unfinished.rename(address_file)
optimizer = hivemind.Optimizer(
    dht=dht, run_id="wan", params=job.model.parameters(),
    optimizer=lambda params: torch.optim.SGD(params, lr=options.rate),
    batch_size_per_step=BATCH, target_batch_size=BATCH * options.ranks * options.every, use_local_updates=True,
    delay_state_averaging=True, matchmaking_time=3.0, averaging_timeout=60.0, verbose=True,
    averager_opts={"request_timeout": 1.0},  # Hivemind warns unless the timeout is shorter than matchmaking.
)  # fmt: skip
job.train(job.model, optimizer)
