"""A node that saves to stores."""

import pytest

from node import Node
from tests.node.storage.stores import linear


@pytest.fixture
def node(quick):
    with Node(linear(), config=quick) as running:
        yield running
