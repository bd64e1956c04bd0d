"""torchft 0.2.0: torchft_lighthouse runs somewhere, and torchrun starts each group."""

import os
from datetime import timedelta

import torch
from task import EPOCHS, net, right, train, x_test
from torch.nn import functional as F
from torch.utils.data import DataLoader
from torchft import DistributedDataParallel, DistributedSampler, Manager, Optimizer, ProcessGroupGloo

group, groups = int(os.environ["REPLICA_GROUP_ID"]), int(os.environ["NUM_REPLICA_GROUPS"])
manager = Manager(
    pg=ProcessGroupGloo(timeout=timedelta(seconds=5)),
    min_replica_size=1,
    load_state_dict=lambda state: (model.load_state_dict(state["model"]), optimizer.load_state_dict(state["optim"])),
    state_dict=lambda: {"model": model.state_dict(), "optim": optimizer.state_dict()},
    replica_id=f"digits_{group}",
)
model = DistributedDataParallel(manager, net())
optimizer = Optimizer(manager, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
sampler = DistributedSampler(
    train, replica_rank=group, num_replica_groups=groups, group_rank=0, num_replicas=1, shuffle=True
)
loader = DataLoader(train, batch_size=16, sampler=sampler)

while manager.batches_committed() < EPOCHS * len(train) // 16:
    for x, y in loader:
        optimizer.zero_grad()  # begins a quorum
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()  # perhaps not, if a group failed meanwhile
print(f"accuracy {right(model) / len(x_test):.3f}")
torch.save({"model": model.state_dict(), "optim": optimizer.state_dict(), "torchft": manager.state_dict()}, "digits.pt")
manager.shutdown()
