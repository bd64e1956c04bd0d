"""Nodes that a launcher starts, on this machine and over loopback: run by `make test-engines`."""

import shutil

import pytest

from node.identity.keys import new_secret
from tests.engines.hosts import Host
from tests.engines.launched import Launched
from tests.reliability.namespaces import switched


@pytest.fixture
def launch():
    """``launch(name, folder, *command, **variables)`` starts a command; all of them end with the test."""
    started = []

    def start(*args, **variables):
        started.append(Launched(*args, **variables))
        return started[-1]

    def end():
        while started:
            started.pop().end()

    start.end = end
    yield start
    end()


@pytest.fixture
def needs():
    """``needs("mpirun", "apt-get install openmpi-bin")`` skips if a program is missing, and says how to install it."""

    def check(program, how):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not here: {how}")

    return check


@pytest.fixture
def hosts(launch, tmp_path):
    """``hosts(2)`` returns so many machines."""
    with switched(4) as spaces:
        secret = new_secret()
        yield lambda count: [
            Host(space, number, tmp_path / str(number), secret, launch) for number, space in enumerate(spaces[:count])
        ]
        launch.end()  # The processes end before their networks are removed.
