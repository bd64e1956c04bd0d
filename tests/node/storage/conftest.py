"""A node that saves to stores."""

from __future__ import annotations

import pytest

from node import Node
from tests.node.storage.stores import linear


@pytest.fixture
def node(quick):
    with Node(linear(), config=quick) as running:
        yield running
