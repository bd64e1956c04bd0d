"""The names of a checkpoint's files, and older checkpoints, which a save may keep under numbered names."""

import os
import shutil
from pathlib import Path
from typing import Any, Final

from node.storage.urls import SUFFIX

MAX_KEPT: Final = 100  # Each save renames all older ones.
OPTIMIZER: Final = ".optimizer"
DESCRIPTION: Final = ".json"


def companion(name: str, ending: str = OPTIMIZER) -> str:
    """Return the name of a file next to a checkpoint: run.optimizer for run.safetensors, run.bin.optimizer for run.bin.

    Without any other suffix in it, "run.a" and "run.b" would share one file.
    """
    return name.removesuffix(SUFFIX) + ending


def files_of(name: str) -> tuple[str, str, str]:
    """Return the names of a checkpoint's files in the order in which they are replaced: the weights come last."""
    return companion(name), companion(name, DESCRIPTION), name


def numbered_name(name: str, older: int) -> str:
    """Return the name of the checkpoint ``older`` saves before the newest: run.1.safetensors for 1, the same for 0."""
    stem, dot, suffix = name.rpartition(".")
    return f"{stem}.{older}{dot}{suffix}" if older else name


def keep_older(target: Path, keep: int, folder: Path) -> None:
    """Give the files of a checkpoint that is about to be replaced the names of an older one. The files stay.

    Args:
        target: The checkpoint.
        keep: The number of checkpoints to keep, the coming one included.
        folder: A folder for temporary files, on the same disk.

    Raises:
        OSError: A file could not be renamed.
    """
    for older in range(keep - 1, 0, -1):
        for newer_name, older_name in renames(target.name, older):
            newer = target.with_name(newer_name)
            if not newer.exists():
                continue
            if older == 1:  # A second name: a kill from here on leaves the newest checkpoint in its place.
                link = folder / "older"
                try:
                    os.link(newer, link)
                except OSError:  # Some file systems have no links.
                    shutil.copyfile(newer, link)
                newer = link
            os.replace(newer, target.with_name(older_name))
            (folder / "older").unlink(missing_ok=True)  # A replacement by another name of the same file does nothing.


def keep_older_in_store(store: Any, path: str, keep: int) -> None:
    """Do as :func:`keep_older` for a checkpoint's path in a store, which copies its own files."""
    folder, slash, name = path.rpartition("/")
    for older in range(keep - 1, 0, -1):
        for newer_name, older_name in renames(name, older):
            if store.exists(folder + slash + newer_name):
                store.cp_file(folder + slash + newer_name, folder + slash + older_name)


def renames(name: str, older: int) -> list[tuple[str, str]]:
    """Return the present and the next name of each file of the checkpoint ``older - 1`` saves before the newest."""
    return list(zip(files_of(numbered_name(name, older - 1)), files_of(numbered_name(name, older)), strict=True))
