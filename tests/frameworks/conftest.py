"""Examples and callbacks of frameworks, which `make test-frameworks` installs."""

import pytest

from tests.frameworks.plays import Play
from tests.node.conftest import _plain_environment, _until, train  # noqa: F401, fixtures


@pytest.fixture
def play():
    """``play(script, folder, *args, seed=..., environment=...)`` starts an example; all of them end with the test."""
    started = []

    def start(*args, **options):
        started.append(Play(*args, **options))
        return started[-1]

    yield start
    for one in started:
        one.kill()
