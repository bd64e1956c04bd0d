"""The packages gossip, node and sim below the name of their distribution.

``from gossip_trainer import Node`` and ``from gossip_trainer.node.adapters.keras import ...`` give the same modules as
without the name in front, and say in a sentence which file of that name is in their way.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

HOME = Path(__file__).resolve().parent
PACKAGES = ("gossip", "node", "sim")
__path__: list[str] = []  # This module has submodules, which Names finds.


class Names(MetaPathFinder, Loader):
    """Finds each module of the packages below this name: the module itself, with its own name and spec."""

    def __init__(self) -> None:
        self.specs: dict[str, ModuleSpec | None] = {}  # Each module's own, which importing it again would replace.

    def find_spec(self, name: str, _path: Sequence[str] | None, _target: ModuleType | None = None) -> ModuleSpec | None:
        first, _, rest = name.partition(".")
        is_ours = first == __name__ and rest.partition(".")[0] in PACKAGES
        return ModuleSpec(name, self) if is_ours else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = import_module(spec.name.partition(".")[2])
        self.specs[spec.name] = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        spec = module.__spec__
        assert spec is not None
        module.__spec__ = self.specs.pop(spec.name)


def check_packages() -> None:
    """Raise ImportError if the name of a package leads elsewhere."""
    for name in PACKAGES:
        spec = find_spec(name)
        places = [] if spec is None else [Path(place).resolve() for place in spec.submodule_search_locations or ()]
        if HOME / name not in places:
            where = (spec and spec.origin) or ", ".join(map(str, places)) or "A finder of modules"
            raise ImportError(f"{where} hides the package {name!r} of gossip-trainer: rename that file or folder.")


def __getattr__(name: str) -> Any:
    if name in PACKAGES:
        return import_module(name)
    return getattr(import_module("gossip"), name)


sys.meta_path.insert(0, Names())
check_packages()
