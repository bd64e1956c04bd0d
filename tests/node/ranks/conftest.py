"""Fixtures for nodes of several ranks."""

import pytest


@pytest.fixture
def memory_groups(monkeypatch):
    """Let the channels of a MemoryGroup stand for process groups."""
    monkeypatch.setattr("node.node.Channel", lambda group: group)
