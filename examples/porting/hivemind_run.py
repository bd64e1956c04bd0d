"""hivemind 1.1.12: INITIAL_PEERS=ADDRESS python hivemind_run.py for each peer but the first."""

import os

import hivemind
import torch
from task import EPOCHS, net, right, train, x_test
from torch.nn import functional as F
from torch.utils.data import DataLoader, RandomSampler

peers = os.environ.get("INITIAL_PEERS")
dht = hivemind.DHT(initial_peers=[peers] if peers else None, start=True)
print("others start with INITIAL_PEERS =", dht.get_visible_maddrs()[0])
model = net()
optimizer = hivemind.Optimizer(
    dht=dht, run_id="digits", batch_size_per_step=16, target_batch_size=len(train), use_local_updates=True,
    optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    matchmaking_time=3.0, averaging_timeout=10.0, verbose=True,
)  # fmt: skip
if peers:
    optimizer.load_state_from_peers()

loader = DataLoader(train, batch_size=16, sampler=RandomSampler(train))  # every peer draws from all of the data
while optimizer.local_epoch < EPOCHS:
    for x, y in loader:
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if optimizer.local_epoch >= EPOCHS:
            break
print(f"accuracy {right(model) / len(x_test):.3f}")
optimizer.shutdown()
dht.shutdown()
