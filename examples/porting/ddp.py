"""PyTorch DDP: torchrun --nproc-per-node=2 ddp.py."""

import torch
import torch.distributed as dist
from task import EPOCHS, net, right, train, x_test
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

dist.init_process_group("gloo")
model = DistributedDataParallel(net())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1 - epoch / EPOCHS)
sampler = DistributedSampler(train)
loader = DataLoader(train, batch_size=16, sampler=sampler)

for epoch in range(EPOCHS):
    sampler.set_epoch(epoch)
    for x, y in loader:
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    schedule.step()

found = torch.tensor(right(model, dist.get_rank(), dist.get_world_size()))
dist.all_reduce(found)
accuracy = found.item() / len(x_test)
if dist.get_rank() == 0:
    print(f"accuracy {accuracy:.3f}")
    torch.save(model.module.state_dict(), "digits.pt")
dist.destroy_process_group()
