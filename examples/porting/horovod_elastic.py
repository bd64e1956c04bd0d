"""Horovod 0.28.1, elastic: horovodrun -np 2 --min-np 1 python horovod_elastic.py."""

import horovod.torch as hvd
import torch
from task import EPOCHS, net, right, train, x_test
from torch.nn import functional as F
from torch.utils.data import DataLoader

hvd.init()
model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.02 * hvd.size(), momentum=0.9)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
sampler = hvd.elastic.ElasticSampler(train)
loader = DataLoader(train, batch_size=16, sampler=sampler)


@hvd.elastic.run
def learn(state):
    for state.epoch in range(state.epoch, EPOCHS):  # noqa: B020  # Horovod's manual does the same.
        for number, (x, y) in enumerate(loader):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.synchronize()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            with optimizer.skip_synchronize():
                optimizer.step()
            state.sampler.record_batch(number, 16)
            if number % 10 == 0:
                state.commit()
        state.sampler.set_epoch(state.epoch + 1)
        state.commit()


def rescale():
    for group in optimizer.param_groups:
        group["lr"] = 0.02 * hvd.size()


state = hvd.elastic.TorchState(model=model, optimizer=optimizer, sampler=sampler, epoch=0)
state.register_reset_callbacks([rescale])
learn(state)
accuracy = hvd.allreduce(torch.tensor(right(model) / len(x_test)), name="accuracy").item()
if hvd.rank() == 0:
    print(f"accuracy {accuracy:.3f}")
    torch.save(model.state_dict(), "digits.pt")
