"""Settings and fixtures for all tests."""

import gc
import subprocess
import sys

import pytest
from hypothesis import HealthCheck, settings

# The time for an example depends on the machine, so no test fails on a busy one.
patient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("quick", patient, max_examples=30)
settings.register_profile("thorough", patient, max_examples=300)  # The profile of make test-slow.
settings.load_profile("quick")


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Collect tests without garbage collections, which took 40 % of the time, then freeze the objects that exist.

    Later collections are rare too: each walks through torch and matplotlib, which the first tests load. With Python's
    own thresholds they took 5 % of the time of the simulator's tests.
    """
    gc.disable()
    result = yield
    gc.enable()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)
    return result


@pytest.fixture
def called(monkeypatch, capsys):
    """``called(*words)`` runs ``gossip`` with these words in this process; return its exit code and what it printed."""
    from gossip import __main__ as command

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["gossip", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            command.main()
        return subprocess.CompletedProcess(words, ended.value.code or 0, *capsys.readouterr())

    return run


@pytest.fixture(autouse=True)
def accelerator(request):
    """Run a test with the marker ``cuda`` on the real device (None), or on a simulated one, which is yielded."""
    if request.node.get_closest_marker("cuda") is None:
        yield None
        return
    import torch

    from tests.device.cuda import simulated

    if torch.cuda.is_available():
        yield None
    else:
        with simulated() as device:
            yield device
