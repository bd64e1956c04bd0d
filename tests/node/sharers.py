"""Members that share data, without nodes: a test sets the members and the trained samples."""

from hypothesis import strategies as st

from gossip.ids import PeerId
from node.data.division import Sharers
from node.data.files import FileShards
from node.data.sampler import Samplers

IDS = [PeerId(bytes([n]) * 16) for n in range(64)]
FILES = [f"part-{n:03}.txt" for n in range(100)]
groups = st.sets(st.sampled_from(IDS), min_size=1, max_size=6).map(sorted)


class Swarm:
    """Members that a test changes, and what their loops have trained on."""

    def __init__(self, *members):
        self.alive, self.epoch, self.trained, self.behind = list(members), 0, 0, 0

    def set(self, *members):
        self.alive, self.epoch = list(members), self.epoch + 1

    def sharers(self, me=IDS[0], rank=0, ranks=1):
        return Sharers(
            lambda: me, lambda: self.alive, lambda: self.epoch, lambda: self.trained + self.behind,
            lambda: self.trained, rank, ranks,
        )  # fmt: skip

    def samplers(self, me=IDS[0]):
        return Samplers(self.sharers(me))

    def sampler(self, *options, me=IDS[0], **more):
        return self.samplers(me).make(*options, **more)

    def shards(self, files=FILES, me=IDS[0], epochs=1, shuffle=True, samples=None, rank=0, ranks=1):
        return FileShards(files, epochs, shuffle, samples, self.sharers(me, rank, ranks))


def flat(batches):
    return [index for batch in batches for index in batch]
