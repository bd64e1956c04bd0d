"""Shares of data without nodes, as a loop draws them."""

from torch.utils.data import Dataset

from node.data.sampler import Samplers
from node.data.share import Share
from tests.node.sharers import IDS


class Squares(Dataset):
    """A dataset whose items are their index and its square."""

    def __init__(self, length=20):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return index, index**2


def share(swarm, me=IDS[0], rank=0, ranks=1):
    return Share(Samplers(swarm.sharers(me, rank, ranks)))


def shard(swarm, dataset, batch_size=4, shuffle=True, epochs=1, me=IDS[0]):
    return share(swarm, me).shard(dataset, batch_size, shuffle, epochs, None, False)
