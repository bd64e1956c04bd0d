"""A node that is alone, for loops that draw its data."""

import pytest
from torch import nn

from node import Node


@pytest.fixture
def node(quick):
    with Node(nn.Linear(4, 2), config=quick) as made:
        yield made
