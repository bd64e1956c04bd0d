"""Fixtures for nodes of several ranks."""

from datetime import timedelta

import pytest
import torch.distributed as dist


@pytest.fixture
def world():
    """Yield a process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=30))
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture
def memory_groups(monkeypatch):
    """Let the channels of a MemoryGroup stand for process groups."""
    monkeypatch.setattr("node.node.Channel", lambda group: group)
