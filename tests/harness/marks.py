"""Marks for slow test cases, which `make test-slow` runs and `make test` leaves out."""

from collections.abc import Iterable
from typing import Any

import pytest


def rest_is_slow(values: Iterable[Any], quick: int) -> list[Any]:
    """Return the values as parameters, all beyond the first ``quick`` marked as slow."""
    return [pytest.param(value, marks=[pytest.mark.slow] * (at >= quick)) for at, value in enumerate(values)]


def slow(*values: Any, **named: Any) -> Any:
    """Return one case as a parameter that is marked as slow."""
    return pytest.param(*values, marks=pytest.mark.slow, **named)
