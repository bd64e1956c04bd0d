"""The user's functions that a scenario names as "module:function": imported and called when needed."""

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gossip.errors import ConfigError


def find(path: str, key: str) -> Callable[..., Any]:
    """Import and return the function that ``path`` names, "module:function"; the current folder is searched too.

    Raises ConfigError, which names the scenario's ``key``, if the module cannot be imported or has no such function.
    """
    module_name, _, function_name = path.partition(":")
    usual_path = sys.path
    sys.path = [*usual_path, str(Path.cwd())]  # Last, so that it hides no installed module.
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(
            f"{key} = {path!r} cannot be imported ({error}): install the module, or run where its file is."
        ) from error
    finally:
        sys.path = usual_path
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ConfigError(f"{key} = {path!r}: {module_name} has no function {function_name}: name one that it has.")
    checked: Callable[..., Any] = function
    return checked
