"""Older checkpoints, which a save may keep under numbered names."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from gossip.errors import CheckpointError

__all__ = ["checked_keep", "keep_older", "keep_older_in_store", "numbered_name"]

MAX_KEPT: Final = 100  # Each save renames all older ones.


def numbered_name(name: str, older: int) -> str:
    """Return the name of the checkpoint ``older`` saves before the newest: run.1.safetensors for 1, the same for 0."""
    stem, dot, suffix = name.rpartition(".")
    return f"{stem}.{older}{dot}{suffix}" if older else name


def checked_keep(keep: object) -> int:
    """Return the number of checkpoints to keep under one name. Raise CheckpointError if it is none."""
    if not isinstance(keep, int) or isinstance(keep, bool) or not 1 <= keep <= MAX_KEPT:
        raise CheckpointError(f"keep is {keep!r}: give how many checkpoints to keep, from 1 to {MAX_KEPT}.")
    return keep


def keep_older(files: Sequence[Path], keep: int, folder: Path) -> None:
    """Give local files that are about to be replaced the names of older ones. The files themselves stay.

    Args:
        files: The checkpoint and its description.
        keep: The number of checkpoints to keep, the coming one included.
        folder: A folder for temporary files, on the same disk.

    Raises:
        OSError: A file could not be renamed.
    """
    for older in range(keep - 1, 0, -1):
        for file in files:
            newer = file.with_name(numbered_name(file.name, older - 1))
            if not newer.exists():
                continue
            if older == 1:  # A second name: a kill from here on leaves the newest checkpoint in its place.
                link = folder / "older"
                try:
                    os.link(newer, link)
                except OSError:  # Some file systems have no links.
                    shutil.copyfile(newer, link)
                newer = link
            os.replace(newer, file.with_name(numbered_name(file.name, older)))


def keep_older_in_store(store: Any, paths: Sequence[str], keep: int) -> None:
    """Do as :func:`keep_older` in a store, which copies its own files."""
    for older in range(keep - 1, 0, -1):
        for path in paths:
            folder, slash, name = path.rpartition("/")
            newer = folder + slash + numbered_name(name, older - 1)
            if store.exists(newer):
                store.cp_file(newer, folder + slash + numbered_name(name, older))
