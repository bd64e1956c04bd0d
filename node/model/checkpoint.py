"""Checkpoints: one safetensors file that holds everything, and a small JSON file that describes it.

Weights keep their own names, so that any tool that reads safetensors can read them.

Optimizer tensors are stored under ``optimizer/``. The optimizer's structure and the metadata are JSON in the file's
header: a rename replaces one file, so all that `load` needs is in one file. Nothing is ever pickled or unpickled. The
JSON file next to it, its *description*, is for readers alone.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import json
import math
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from gossip.errors import CheckpointError
from gossip.ids import from_hex
from gossip.wire.records import clamp_field
from node.model.device import file
from node.model.optimizers import Optimizers
from node.model.state import State
from node.storage.older import keep_older
from node.storage.urls import is_url

__all__ = ["Archive", "Checkpoint", "load", "run_progress", "save"]

_SUFFIX: Final = ".safetensors"
_VERSION: Final = 1
_KEY: Final = "gossip"  # The entry of the header's __metadata__ that holds our JSON document.
_OPTIMIZER: Final = "optimizer/"
# The document of a file without one, which another tool has written.
_EMPTY_DOCUMENT: Final = '{"version": 1, "optimizer": null, "tied": {}, "meta": {}}'
_NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # Errors of a disk, a quota or a file that is full.


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The contents of a checkpoint. Tensors are on the CPU; tied tensors are one object under several names.

    Attributes:
        tensors: The weights by name.
        optimizer_state: What `optimizer.load_state_dict` takes, or None.
        meta: The metadata that was given to :func:`save`.
    """

    tensors: dict[str, Tensor]
    optimizer_state: dict[str, Any] | None
    meta: dict[str, Any]


def run_progress(meta: Mapping[str, Any], path: str | os.PathLike[str]) -> tuple[bytes | None, int, float]:
    """Return the run id, the swarm's sample count and the version in a checkpoint's metadata.

    The run id is None for weights that belong to no run. Both numbers are clamped to the bounds of a wire record. A
    peer that lied may have pushed them beyond these bounds, but the weights are still usable.

    Raises:
        CheckpointError: The run id is malformed. Replacing it would silently make this another run.
    """
    run_text = meta.get("run_id", meta.get("genesis"))  # Files of earlier versions say genesis.
    run_id = from_hex(run_text)
    if run_id is None and run_text is not None:
        raise CheckpointError(
            f"{path} names a run that cannot be: run_id should be 32 hexadecimal digits. The file was altered; use "
            "another one."
        )
    return run_id, clamp_field("progress", meta.get("swarm_samples", 0)), clamp_field("version", meta.get("version", 0))


def save(
    path: str | os.PathLike[str],
    tensors: Mapping[str, Tensor],
    optimizer_state: Mapping[str, Any] | None,
    meta: Mapping[str, Any],
    keep: int = 1,
) -> None:
    """Write ``path`` and a ``.json`` file next to it that describes it.

    Both files are written to a temporary directory, synced and renamed. A process that is killed, or that runs out of
    disk space, leaves the previous checkpoint readable. Several processes may save to one path at once; the last one
    wins.

    Args:
        path: A name without a suffix gets ``.safetensors``. Missing directories are created.
        tensors: The model's tensors by name, on any device.
        optimizer_state: An optimizer's ``state_dict()``.
        meta: Names mapped to numbers, strings, None, and lists, tuples and mappings of them.
        keep: The number of checkpoints to keep under this name; older ones become run.1.safetensors and so on.

    Raises:
        CheckpointError: The file could not be written. The message says whether the previous checkpoint is intact.
    """
    target = _with_suffix(path)
    # Keep any other suffix in the name: otherwise "run.1" and "run.2" would share one description.
    description = target.with_suffix(".json") if target.suffix == _SUFFIX else target.with_name(target.name + ".json")
    stored, document = _plan(tensors, optimizer_state, meta)
    elements = sum(tensor.numel() for name, tensor in stored.items() if name in tensors)
    described = {
        "checkpoint": target.name, "version": document["version"], "elements": elements, "meta": document["meta"],
    }  # fmt: skip
    try:
        for path_to_replace in (target, description):
            if path_to_replace.exists() and not path_to_replace.is_file():
                raise CheckpointError(
                    f"Could not save to {path_to_replace}: it is no regular file; choose another path."
                )
        target.parent.mkdir(parents=True, exist_ok=True)
        with _folder_beside(target) as folder:
            text, weights = folder / "text", folder / "weights"
            text.write_text(json.dumps(described, indent=2, allow_nan=False) + "\n")
            write = save_file if all(tensor.device.type == "cpu" for tensor in stored.values()) else file.write
            write(stored, weights, {"format": "pt", _KEY: json.dumps(document, allow_nan=False)})
            # Apply the umask's permissions: the library makes the file readable by its owner alone.
            shutil.copymode(text, weights)
            for written in (text, weights):
                with written.open("rb") as opened:
                    os.fsync(opened.fileno())
            keep_older((target, description), keep, folder)
            os.replace(text, description)
            os.replace(weights, target)  # Comes last: until here the previous checkpoint stays valid.
    except KeyError as error:  # safetensors raises it for a dtype that it does not have.
        refused_names = [name for name, tensor in stored.items() if tensor.dtype in error.args]
        raise _cannot_hold(refused_names[0], stored[refused_names[0]]) from error
    except (OSError, SafetensorError) as error:
        outcome = "the previous checkpoint is intact" if os.path.exists(target) else "nothing was written"
        number, reason = _reason(error)
        advice = "free room or choose another path" if number in _NO_ROOM else "choose another path"
        raise CheckpointError(f"Could not save to {target}: {reason}; {outcome}; {advice}.") from error


def load(path: str | os.PathLike[str]) -> Checkpoint:
    """Read a checkpoint, or any safetensors file of weights (without optimizer state and metadata).

    The file's structure is checked; flipped bits within a tensor are not detected.

    Raises:
        CheckpointError: The file is missing, truncated, corrupt, a pickle, or of a newer format.
    """
    place = _with_suffix(path)
    if not os.path.exists(place) and os.path.exists(path):
        place = Path(path)  # A file without a suffix comes from elsewhere, and is read or refused as it is.
    try:
        if place.exists() and not place.is_file():
            raise CheckpointError(f"Could not read {place}: it is no regular file; give a checkpoint's path.")
        with safe_open(place, framework="pt", device="cpu") as opened:
            stored = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 (it is no mapping)
            document = json.loads((opened.metadata() or {}).get(_KEY, _EMPTY_DOCUMENT))
        if document["version"] != _VERSION:
            version = document["version"]
            raise CheckpointError(f"{place} has format {version}, this version reads {_VERSION}; upgrade it.")
        for key, kind in (("optimizer", dict | None), ("tied", dict), ("meta", dict)):
            if not isinstance(document[key], kind):
                raise TypeError(key)
        for alias, stored_name in document["tied"].items():
            stored[alias] = stored[stored_name]
        weights = {name: tensor for name, tensor in stored.items() if not name.startswith(_OPTIMIZER)}
        return Checkpoint(weights, _decode(document["optimizer"], stored), _decode(document["meta"], {}))
    except FileNotFoundError as error:
        raise CheckpointError(f"There is no checkpoint at {place}; check the path.") from error
    except OSError as error:
        raise CheckpointError(
            f"Could not read {place}: {_reason(error)[1]}; check the path and its permissions."
        ) from error
    except (SafetensorError, KeyError, ValueError, TypeError, AttributeError, RecursionError) as error:
        sentence = "is cut off, corrupt, or no checkpoint; use another one."
        if _looks_like_a_pickle(place):
            sentence = (
                "is a pickle, which may run code when it is opened; convert it to safetensors where you trust it."
            )
        raise CheckpointError(f"{place} {sentence}") from error


# Contents -------------------------------------------------------------------------------------------------------------


def _plan(
    tensors: Mapping[str, Tensor],
    optimizer_state: Mapping[str, Any] | None,
    meta: Mapping[str, Any],
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return all tensors to store, each once, and the JSON document that describes them.

    Tensors of a device stay there until they are written.
    """
    for name in tensors:
        if name == "__metadata__" or name.startswith(_OPTIMIZER):
            raise CheckpointError(f"Could not save: a tensor may not be called {name!r} in a checkpoint; rename it.")
    by_name = dict(tensors)
    optimizer = _encode(optimizer_state, "the optimizer's state", "", by_name)
    stored: dict[str, Tensor] = {}
    tied: dict[str, str] = {}  # For each name whose tensor is stored under another name: that name.
    first_names: dict[tuple[Any, ...], str] = {}  # The first name of each view of a memory.
    storages: set[int] = set()  # Addresses of the memory of stored tensors.
    for name, tensor in by_name.items():
        if tensor.layout != torch.strided or tensor.is_meta:
            raise _cannot_hold(name, tensor)
        view = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.is_conj())
        if tensor.numel() and first_names.setdefault(view, name) != name:
            tied[name] = first_names[view]
            continue
        if tensor.device.type != "cpu":
            stored[name] = tensor.detach()
            continue
        host = tensor.detach().resolve_conj().resolve_neg().contiguous()
        if host.untyped_storage().data_ptr() in storages:  # Copy overlapping views, so that each is written separately.
            host = host.clone()
        storages.add(host.untyped_storage().data_ptr())
        stored[name] = host
    encoded_meta = _encode(meta, "meta", "", None)
    return stored, {"version": _VERSION, "optimizer": optimizer, "tied": tied, "meta": encoded_meta}


def _add_tensor(name: str, tensor: Tensor, tensors: dict[str, Tensor]) -> str:
    """Add a tensor under this name, or under a similar free one, and return that name."""
    while name in tensors:  # A state may have both keys 0 and "0".
        name += "'"
    tensors[name] = tensor
    return name


def _encode(value: Any, whole: str, path: str, tensors: dict[str, Tensor] | None) -> Any:
    """Convert ``value`` to strict JSON. Tensors go into ``tensors`` as ``optimizer/<path>``; None allows no tensors.

    ``path`` is the value's place in the ``whole``, keys and indices with dots between; empty for the whole itself. A
    value that JSON lacks becomes an object with one key: ``$tensor``, ``$tuple``, ``$float`` (nan, inf) or ``$map``.
    """
    if isinstance(value, np.generic):  # A schedule computed in numpy gives such numbers.
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return {"$float": repr(value)}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Tensor) and tensors is not None:
        return {"$tensor": _add_tensor(_OPTIMIZER + path, value, tensors)}
    if isinstance(value, tuple | list):
        items = [_encode(item, whole, f"{path}.{index}".lstrip("."), tensors) for index, item in enumerate(value)]
        return {"$tuple": items} if isinstance(value, tuple) else items
    if isinstance(value, Mapping) and all(isinstance(key, str | int) for key in value):
        pairs = [[key, _encode(item, whole, f"{path}.{key}".lstrip("."), tensors)] for key, item in value.items()]
        is_plain = all(isinstance(key, str) and not key.startswith("$") for key in value)
        return dict(pairs) if is_plain else {"$map": pairs}
    place = f"{path!r} in {whole}" if path else whole
    allowed = "plain data" if tensors is None else "a tensor or plain data"
    raise CheckpointError(f"Could not save: {place} is {type(value).__name__}, not {allowed}; remove or convert it.")


def _decode(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Reverse :func:`_encode`; raise KeyError, ValueError or TypeError for values that it never writes."""
    if isinstance(value, list):
        return [_decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    match value:
        case {"$tensor": name}:
            return tensors[name]
        case {"$tuple": items}:
            return tuple(_decode(item, tensors) for item in items)
        case {"$float": text}:
            return float(text)
        case {"$map": pairs}:
            return {key: _decode(item, tensors) for key, item in pairs}
    return {key: _decode(item, tensors) for key, item in value.items()}


def _cannot_hold(name: str, tensor: Tensor) -> CheckpointError:
    kind = f"{tensor.dtype} on {tensor.device} with layout {tensor.layout}"
    return CheckpointError(f"Could not save: {name} is {kind}, which safetensors cannot hold; convert it first.")


# Files ----------------------------------------------------------------------------------------------------------------


def _with_suffix(path: str | os.PathLike[str]) -> Path:
    place = Path(path)
    if is_url(path):
        raise CheckpointError(f"{path} is a URL, which only node.save and node.load take: give a path here.")
    # os.path.isdir returns False where Path.is_dir raises PermissionError.
    if os.path.isdir(place) or not place.name:
        raise CheckpointError(f"{place} is a directory; give a file name, as in {place / 'run.safetensors'}.")
    return place if place.suffix else place.with_name(place.name + _SUFFIX)


@contextlib.contextmanager
def _folder_beside(target: Path) -> Iterator[Path]:
    """Yield a temporary directory next to ``target``, and delete it at the end. Renames out of it are then synced.

    Each writer holds a shared lock on the parent directory. A writer that first gets the exclusive lock knows that all
    leftover directories belong to killed writers. It removes them, so that kills do not fill the disk.
    """
    directory = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        # With other writers at work, or without file locks, nothing is removed.
        with contextlib.suppress(OSError):
            fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for leftover in target.parent.glob(f".{glob.escape(target.name)}.*.tmp"):
                shutil.rmtree(leftover, ignore_errors=True)
        with contextlib.suppress(OSError):
            fcntl.flock(directory, fcntl.LOCK_SH)
        with tempfile.TemporaryDirectory(".tmp", f".{target.name}.", target.parent, True) as folder:
            yield Path(folder)
            with contextlib.suppress(OSError):  # Some network filesystems refuse it; the renames have happened.
                os.fsync(directory)
    finally:
        os.close(directory)


def _looks_like_a_pickle(place: Path) -> bool:
    """Return True if a refused file is probably a pickle.

    torch's archives are zip files, and plain pickles start with 0x80.
    """
    try:
        with place.open("rb") as opened:
            return opened.read(4).startswith((b"PK\x03\x04", b"\x80"))
    except OSError:
        return False


def _reason(error: OSError | SafetensorError) -> tuple[int | None, str]:
    """Return the system's error number and its text, lower-case.

    safetensors hides the number in its message: ``(os error 28)``, in older versions ``Os { code: 28, ...``.
    """
    in_message = re.search(r"(?:\(os error |Os \{ code: )(\d+)", str(error))
    number = error.errno if isinstance(error, OSError) else int(in_message[1]) if in_message else None
    text = os.strerror(number) if number is not None else str(error)
    return number, text[:1].lower() + text[1:]


class Archive:
    """Checkpoints of a model's ``state`` and the ``optimizers`` that train it."""

    def __init__(self, state: State, optimizers: Optimizers) -> None:
        self.state, self.optimizers = state, optimizers

    def save(self, path: str | os.PathLike[str], meta: Mapping[str, Any], keep: int = 1) -> None:
        """Write the model, the optimizers and this metadata to ``path``.

        Args:
            path: As in :func:`save`.
            meta: The metadata.
            keep: As in :func:`save`.

        Raises:
            CheckpointError: As in :func:`save`.
        """
        meta = {"format": 1, "fingerprint": self.state.layout.contents_fingerprint, **meta}
        save(path, self.state.tensors(), self.optimizers.state_dict(), meta, keep)

    def load(self, path: str | os.PathLike[str]) -> Checkpoint:
        """Return the contents of a file. Raise CheckpointError, also if its fingerprint names another model."""
        saved, ours = load(path), self.state.layout.contents_fingerprint
        if saved.meta.get("fingerprint", ours) != ours:
            raise CheckpointError(
                f"{path} holds another model than this node's: load it into the model it was saved from."
            )
        return saved

    def restore(self, saved: Checkpoint, path: str | os.PathLike[str]) -> None:
        """Overwrite the live model, and the optimizers' state if the file has one.

        Raises:
            CheckpointError: The checkpoint does not fit. Nothing has changed then.
        """
        try:
            states = self.optimizers.split_state(saved.optimizer_state)
            self.state.load(saved.tensors)
        except CheckpointError as error:
            raise CheckpointError(f"{path} is not loaded: {error}") from error
        self.optimizers.on_replaced()
        # This comes after on_replaced(), which resets momentum: the file's momentum belongs to these weights.
        self.optimizers.load(states)
