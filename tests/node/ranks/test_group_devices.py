"""A node of several ranks on devices: the changes of its exchanges go from device to device."""

import time

import pytest
import torch
from torch import nn

from gossip.errors import LayoutError, LocalError
from node.loop.live import Trained
from node.model.device.uploads import Uploads
from node.model.optimizers import Optimizers
from node.ranks.boundary import UpdateTold
from node.ranks.part import WholePart
from node.ranks.ranks import Ranks
from tests.harness.configs import tuned
from tests.node.ranks.rank_loops import no_errors
from tests.node.ranks.rank_threads import MemoryChannel, MemoryGroup, RankThread, play
from tests.node.trainees import pull

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("memory_groups")]


class DeviceChannel(MemoryChannel):
    """A channel that relays like NCCL, in the order of each rank's current stream. No host waits for a device."""

    def relays(self, size):
        return True

    def relay(self, values):
        group = self.group
        with group.changed:
            number = self.call("relay", values.numel())
            if self.rank == 0:
                group.sent[number] = values.clone(), torch.cuda.current_stream().record_event()
                group.changed.notify_all()
                return
            assert group.changed.wait_for(lambda: number in group.sent or group.closed, 30)
            copy, event = group.sent[number]
        torch.cuda.current_stream().wait_event(event)
        values.copy_(copy)
        copy.record_stream(torch.cuda.current_stream())


class DeviceRank(RankThread):
    """A rank whose training has a stream of its own."""

    def run(self):
        with torch.cuda.stream(torch.cuda.Stream()):
            super().run()


def layers(seed, device):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3)).to(device)


@pytest.mark.parametrize("mixing", ["pair", "push-sum"])
def test_all_ranks_hold_the_same_and_no_change_goes_over_the_hosts(train, monkeypatch, mixing):
    monkeypatch.setattr(Uploads, "PORTION_ELEMENTS", 32)
    told = []
    obeys = UpdateTold, lambda part, what: (told.append(what), part.change(what))
    monkeypatch.setitem(WholePart.commands, "change", obeys)
    config = tuned(mix_every_steps=2, join_timeout_s=3.0, bench_s=0.2, mixing=mixing)
    model = layers(99, "cpu")
    other = train(model, work=pull(model, 1.0), config=config)
    group = MemoryGroup(2)
    group.channels = [DeviceChannel(group, rank) for rank in range(2)]

    def loop(node, rank):
        seen, mine = [], pair[rank].model
        for _ in range(40):
            with torch.no_grad():
                for value in mine.parameters():
                    value.mul_(0.99)
            node.step(1.0, 4)
            time.sleep(0.01)
            seen.append(torch.cat([value.detach().reshape(-1) for value in mine.parameters()]).cpu())
        return seen

    options = {"config": config, "seeds": [other.node.address]}
    pair = [DeviceRank(one, layers(one.rank, "cuda"), None, loop, options) for one in group.channels]
    no_errors(play(pair))
    assert all(map(torch.equal, *(rank.result for rank in pair)))
    assert len(told) > 3, "exchanges moved them"
    assert all(len(one.portions) > 1 and sum(one.portions) == one.elements for one in told)
    assert {one.ratio is None for one in told} == {mixing != "push-sum"}


def test_a_rank_that_cannot_take_part_says_why(accelerator):
    def apply(device, portions):
        ranks = Ranks(MemoryGroup(2).channels[1])
        part = WholePart(Trained(layers(0, device), Optimizers(None)), ranks)
        part.change(UpdateTold(part.state.layout.exchanged, False, None, portions))

    with pytest.raises(LayoutError, match=r"Rank 1 .* lays out its tensors in another way than rank 0"):
        apply("cuda", (40, 43))
    with pytest.raises(LocalError, match=r"Rank 1 .* has no memory on its device for a portion"):
        apply("cpu", (83,))
