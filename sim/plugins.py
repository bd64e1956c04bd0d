"""What a scenario names as "module:function": imported and called when it is needed."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gossip.errors import ConfigError

__all__ = ["call", "find"]


def call(named: str, key: str) -> Any:
    """What the function returns, as :func:`find` finds it; what it raises is its author's to read, and passes."""
    return find(named, key)()


def find(named: str, key: str) -> Callable[..., Any]:
    """The function. It is looked up in the current folder as well, as a script beside the scenario is.

    Raises ConfigError, naming the scenario's ``key``, for a module that cannot be imported and a function it lacks.
    """
    module_name, _, function_name = named.partition(":")
    before = sys.path
    sys.path = [*before, str(Path.cwd())]  # behind everything installed
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(
            f"{key} = {named!r} cannot be imported ({error}): install the module, or run where its file is."
        ) from error
    finally:
        sys.path = before
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ConfigError(f"{key} = {named!r}: {module_name} has no function {function_name}: name one that it has.")
    found: Callable[..., Any] = function
    return found
