"""A rank's operations on a sharded model whose parts are on the device: few copies, and little memory for them."""

import mmap

import numpy as np
import pytest
import torch

from node.model.device.uploads import Uploads
from node.ranks.sharded.operation import Operation, Portion
from node.ranks.sharded.shards import LocalShard, ShardBox
from node.ranks.sharded.work import ShardWork, change_tensor

pytestmark = pytest.mark.cuda
ROWS, COLUMNS, PARTS = 8, 10, 5


class Work(ShardWork):
    """A rank that owns some whole tensors, and maps the memory of one operation."""

    def __init__(self) -> None:
        box = ShardBox((ROWS, COLUMNS), (0, 0), (ROWS, COLUMNS))
        size = ROWS * COLUMNS
        self.parts = [torch.ones(ROWS, COLUMNS, device="cuda") for _ in range(PARTS)]
        self.shards = [LocalShard(size * number, box, part) for number, part in enumerate(self.parts)]
        self.bytes = np.frombuffer(mmap.mmap(-1, 1 << 16), np.uint8)

    def portion(self, kind, elements):
        operation = Operation(kind, elements=elements)
        return Portion(operation, self.bytes[: operation.size], self.shards)


def test_a_read_says_whether_all_values_are_finite():
    work = Work()
    portion = work.portion("read", PARTS * ROWS * COLUMNS)
    with torch.no_grad():
        assert work._read(portion)
        work.parts[3][2, 5] = float("nan")
        assert not work._read(portion)


@pytest.mark.parametrize("is_full", [False, True])
@pytest.mark.parametrize("shape", [(40, 5), (200,), ()])
def test_a_part_is_changed_in_page_locked_portions_and_nothing_waits(
    simulated_device, costs, monkeypatch, shape, is_full
):
    monkeypatch.setattr(Uploads, "PORTION_ELEMENTS", 20)
    part, values = torch.ones(shape, device="cuda"), torch.arange(float(torch.empty(shape).numel())).view(shape)
    costs.reset()
    simulated_device.memory.limit_bytes = simulated_device.memory.bytes if is_full else float("inf")
    change_tensor(part, values, lambda live, added: live.add_(added, alpha=2.0))
    assert bool(simulated_device.waits) is is_full
    torch.cuda.synchronize()
    costs.check(peak=2 * 4 * 20)
    assert torch.equal(part.cpu(), 1.0 + 2.0 * values)
