"""The user's functions that a scenario names as "module:function": imported and called when needed."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gossip.errors import ConfigError

__all__ = ["call", "find"]


def call(named: str, key: str) -> Any:
    """Call a function that :func:`find` finds, and return its result; its exceptions pass unchanged."""
    return find(named, key)()


def find(named: str, key: str) -> Callable[..., Any]:
    """Import and return a function; modules in the current folder are found too.

    Raises ConfigError, which names the scenario's ``key``, if the module cannot be imported or has no such function.
    """
    module_name, _, function_name = named.partition(":")
    before = sys.path
    sys.path = [*before, str(Path.cwd())]  # Last, so that it hides no installed module.
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
