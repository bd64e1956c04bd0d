"""Loops that stand until their test has ended."""

import threading

import pytest


@pytest.fixture(autouse=True)
def _release(train, launch):
    """Let every loop that stands go on before the first node leaves, since a node mixes once more as it leaves."""
    yield
    for thread in threading.enumerate():
        if leave := getattr(thread, "leave", None):
            leave.set()
