"""What a scenario names as "module:function": imported and called when it is needed."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

from gossip.errors import ConfigError

__all__ = ["call"]


def call(named: str, key: str) -> Any:
    """What the function returns. It is looked up in the current folder as well, as a script beside the scenario is.

    Raises ConfigError, naming the scenario's ``key``, for a module that cannot be imported and a function it lacks;
    what the function itself raises is its author's to read, and passes.
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
    return function()
