"""Checkpoints: a safetensors file of weights that any tool reads, another of the optimizer's state, and a description.

The weights keep the model's own names and are alone in their file, so that
``model.load_state_dict(safetensors.torch.load_file(path))`` works. The run's metadata are JSON in the file's header.
The optimizer's state is in a second file: its tensors, and its structure as JSON in the header. Both headers name the
save that wrote them. So a kill between the two renames never pairs weights with the state of another step. Nothing
is ever pickled or unpickled. The JSON file next to them, the *description*, is for readers alone.
"""

import contextlib
import errno
import fcntl
import glob
import json
import math
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
from safetensors import SafetensorError, safe_open
from torch import Tensor

from gossip.errors import CheckpointError
from gossip.ids import from_hex
from gossip.wire.records import clamp_field
from node.model.optimizers import Optimizers
from node.model.state import State
from node.storage import tensor_file
from node.storage.older import DESCRIPTION, OPTIMIZER, companion, keep_older
from node.storage.urls import SUFFIX, is_url

_VERSION: Final = 3
_KEY: Final = "gossip"  # The entry of the header's __metadata__ that holds our JSON document.
# The document of a file without one, which another tool has written.
_EMPTY_DOCUMENT: Final = f'{{"version": {_VERSION}, "save": null, "meta": {{}}}}'
_NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # Errors of a disk, a quota or a file that is full.


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The contents of a checkpoint. Tensors are on the CPU, and none shares memory with the file.

    Attributes:
        tensors: The weights by name.
        optimizer_state: What `optimizer.load_state_dict` takes, or None.
        meta: The metadata that was given to :func:`save`.
        lack: Why the optimizer's state that was saved is not here, as a clause; otherwise empty.
    """

    tensors: dict[str, Tensor]
    optimizer_state: dict[str, Any] | None
    meta: dict[str, Any]
    lack: str = ""


def run_progress(meta: Mapping[str, Any], path: str | os.PathLike[str]) -> tuple[bytes | None, int, float]:
    """Return the run id, the swarm's sample count and the version in a checkpoint's metadata.

    The run id is None for weights that belong to no run. Both numbers are clamped to the bounds of a wire record. A
    peer that lied may have pushed them beyond these bounds, but the weights are still usable.

    Raises:
        CheckpointError: The run id is malformed. Replacing it would silently make this another run.
    """
    run_text = meta.get("run_id", meta.get("genesis"))  # Files of earlier versions have the second key.
    run_id = from_hex(run_text)
    if run_id is None and run_text is not None:
        raise CheckpointError(
            f"{path} names a run that cannot be: run_id should be 32 hexadecimal digits. The file was altered; use "
            "another one."
        )
    return run_id, clamp_field("progress", meta.get("swarm_samples", 0)), clamp_field("version", meta.get("version", 0))


def save(
    path: str | os.PathLike[str], tensors: Mapping[str, Tensor], optimizer_state: Mapping[str, Any] | None,
    meta: Mapping[str, Any], keep: int = 1,
) -> dict[str, Any]:  # fmt: skip
    """Write ``path``, an ``.optimizer`` file next to it, and a ``.json`` file that describes it.

    All are written to a temporary directory, synced and renamed, the weights last. A process that is killed, or that
    runs out of disk space, leaves the previous weights readable. Several processes may save to one path at once; the
    last one wins.

    Args:
        path: A name without a suffix gets ``.safetensors``. Missing directories are created.
        tensors: The model's tensors by name, on any device.
        optimizer_state: An optimizer's ``state_dict()``.
        meta: Names mapped to numbers, strings, None, and lists, tuples and mappings of them.
        keep: The number of checkpoints to keep under this name; older ones become run.1.safetensors and so on.

    Returns:
        The metadata of the checkpoint that had this name until now; empty if there was none.

    Raises:
        CheckpointError: The file could not be written. The message says whether the previous checkpoint is intact.
    """
    target = file_of(path)
    save_id = None if optimizer_state is None else secrets.token_hex(16)
    document = {"version": _VERSION, "save": save_id, "meta": _encode(meta, "meta", "", None)}
    elements = sum(tensor.numel() for tensor in tensors.values())
    described = json.dumps({"checkpoint": target.name, "elements": elements, **document}, indent=2, allow_nan=False)
    writers: dict[Path, Callable[[Path], object]] = {}
    if optimizer_state is not None:
        held: dict[str, Tensor] = {}
        structure = _encode(optimizer_state, "the optimizer's state", "", held)
        half = {"version": _VERSION, "save": save_id, "optimizer": structure}
        writers[target.with_name(companion(target.name))] = partial(_write, held, half)
    writers[target.with_name(companion(target.name, DESCRIPTION))] = lambda file: file.write_text(described + "\n")
    writers[target] = partial(_write, tensors, document)
    return _replace(target, writers, keep)


def export(path: str | os.PathLike[str], tensors: Mapping[str, Tensor]) -> None:
    """Write weights alone to ``path``, as :func:`save` does; raise as it does."""
    target = file_of(path)
    if _replace(target, {target: partial(tensor_file.write, tensors, metadata={"format": "pt"})}):
        target.with_name(companion(target.name, DESCRIPTION)).unlink(missing_ok=True)  # It describes other weights.


def load(path: str | os.PathLike[str]) -> Checkpoint:
    """Read a checkpoint, or any safetensors file of weights (without optimizer state and metadata).

    The structure of both files is checked; flipped bits within a tensor are not detected. Where the optimizer's file is
    gone, damaged or of another save, the weights are returned without it.

    Raises:
        CheckpointError: The file is missing, truncated, corrupt, a pickle, or of another format.
    """
    place = file_of(path)
    if not os.path.exists(place) and os.path.exists(path):
        place = Path(path)  # A file without a suffix comes from elsewhere, and is read or refused as it is.
    tensors, fields = _read(place, save=str | None, meta=dict)
    state, lack, beside = None, "", place.with_name(companion(place.name))
    if fields["save"] is not None and not beside.exists():
        lack = f"{beside.name} is not beside it"
    elif fields["save"] is not None:
        try:
            _, held = _read(beside, save=str, optimizer=dict)
            if held["save"] == fields["save"]:
                state = held["optimizer"]
            else:
                lack = f"{beside.name} is of another save"
        except CheckpointError:
            lack = f"{beside.name} cannot be read"
    return Checkpoint(tensors, state, fields["meta"], lack)


def _read(place: Path, **kinds: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors of a file, and those fields of its document that ``kinds`` names, checked by their types.

    The tensors are copied. Those of the library map the file, and would change with it, or end the process once it is
    cut off.

    Raises:
        CheckpointError: The file cannot be read, or a field is missing or of another type.
    """
    try:
        if place.exists() and not place.is_file():
            raise CheckpointError(f"Could not read {place}: it is no regular file; give a checkpoint's path.")
        with safe_open(place, framework="pt", device="cpu") as opened:
            tensors = {name: opened.get_tensor(name).clone() for name in opened.keys()}  # noqa: SIM118 (no mapping)
            document = json.loads((opened.metadata() or {}).get(_KEY, _EMPTY_DOCUMENT))
        if document["version"] != _VERSION:
            raise CheckpointError(
                f"{place} has format {document['version']}, this version reads {_VERSION}: load it with the version "
                "that wrote it."
            )
        if "meta" in kinds and "optimizer" in document:
            raise CheckpointError(f"{place} is an optimizer's state alone: give the checkpoint beside it.")
        fields = {key: _decode(document[key], tensors if key == "optimizer" else {}) for key in kinds}
        for key, kind in kinds.items():
            if not isinstance(fields[key], kind):
                raise TypeError(key)
        return tensors, fields
    except FileNotFoundError as error:
        raise CheckpointError(f"There is no checkpoint at {place}; check the path.") from error
    except OSError as error:
        raise CheckpointError(
            f"Could not read {place}: {_reason(error)}; check the path and its permissions."
        ) from error
    except (SafetensorError, LookupError, OverflowError, ValueError, TypeError, AttributeError, RuntimeError) as error:
        sentence = "is cut off, corrupt, or no checkpoint; use another one."
        if _looks_like_a_pickle(place):
            sentence = (
                "is a pickle, which may run code when it is opened; convert it to safetensors where you trust it."
            )
        raise CheckpointError(f"{place} {sentence}") from error


# Contents -------------------------------------------------------------------------------------------------------------


def _add_tensor(name: str, tensor: Tensor, tensors: dict[str, Tensor]) -> str:
    """Add a tensor under this name, or under a similar free one, and return that name."""
    while name in tensors:  # A state may have both keys 0 and "0".
        name += "'"
    tensors[name] = tensor
    return name


def _encode(value: Any, whole: str, path: str, tensors: dict[str, Tensor] | None) -> Any:
    """Convert ``value`` to strict JSON. Tensors go into ``tensors`` by their paths; None allows no tensors.

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
        return {"$tensor": _add_tensor(path, value, tensors)}
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
    """Reverse :func:`_encode`; raise KeyError, ValueError, TypeError or OverflowError for values it never writes."""
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


# Files ----------------------------------------------------------------------------------------------------------------


def file_of(path: str | os.PathLike[str]) -> Path:
    place = Path(path)
    if is_url(path):
        raise CheckpointError(f"{path} is a URL, which only node.save and node.load take: give a path here.")
    # os.path.isdir returns False where Path.is_dir raises PermissionError.
    if os.path.isdir(place) or not place.name:
        raise CheckpointError(f"{place} is a directory; give a file name, as in {place / 'run.safetensors'}.")
    return place if place.suffix else place.with_name(place.name + SUFFIX)


def _write(tensors: Mapping[str, Tensor], document: Mapping[str, Any], file: Path) -> None:
    tensor_file.write(tensors, file, {"format": "pt", _KEY: json.dumps(document, allow_nan=False)})


def _replace(target: Path, writers: Mapping[Path, Callable[[Path], object]], keep: int = 1) -> dict[str, Any]:
    """Write files of one directory, then replace all in their order; return and raise as :func:`save` does.

    Args:
        target: The last of them: until it is replaced the previous checkpoint stays valid.
        writers: What writes each file to a path.
        keep: As in :func:`save`.
    """
    try:
        if target.suffix == OPTIMIZER:
            raise CheckpointError(f"Could not save to {target}: an optimizer's file is called so; choose another name.")
        for path in writers:
            if path.exists() and not path.is_file():
                raise CheckpointError(f"Could not save to {path}: it is no regular file; choose another path.")
            if path.suffix == DESCRIPTION and _is_foreign(path):
                raise CheckpointError(f"Could not save to {target}: {path} is no checkpoint's; choose another name.")
        target.parent.mkdir(parents=True, exist_ok=True)
        with _folder_beside(target) as folder:
            for path, write in writers.items():
                write(folder / path.name)
                with (folder / path.name).open("rb") as written:
                    os.fsync(written.fileno())
            replaced = _described(target)
            keep_older(target, keep, folder)
            for path in writers:
                os.replace(folder / path.name, path)
            return replaced
    except OSError as error:
        outcome = "the previous checkpoint is intact" if os.path.exists(target) else "nothing was written"
        advice = "free room or choose another path" if error.errno in _NO_ROOM else "choose another path"
        raise CheckpointError(f"Could not save to {target}: {_reason(error)}; {outcome}; {advice}.") from error


def _is_foreign(path: Path) -> bool:
    """Return True if this is JSON that describes no checkpoint, such as a user's own settings."""
    try:
        described = json.loads(path.read_text())
    except (OSError, ValueError):
        return False
    return isinstance(described, dict) and "checkpoint" not in described


def _described(target: Path) -> dict[str, Any]:
    """Return the metadata in the description next to a checkpoint; empty if it has none."""
    try:
        meta = json.loads(target.with_name(companion(target.name, DESCRIPTION)).read_text())["meta"]
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return meta if isinstance(meta, dict) else {}


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

    torch's archives are zip files, and plain pickles start with 0x80. So may the length before a header, "{...".
    """
    try:
        with place.open("rb") as opened:
            start = opened.read(9)
            return start.startswith(b"PK\x03\x04") or (start.startswith(b"\x80") and not start.endswith(b"{"))
    except OSError:
        return False


def _reason(error: OSError) -> str:
    """Return the system's text of an error, lower-case."""
    text = error.strerror or str(error)
    return text[:1].lower() + text[1:]


class Archive:
    """Checkpoints of a model's ``state`` and the ``optimizers`` that train it."""

    def __init__(self, state: State, optimizers: Optimizers) -> None:
        self.state, self.optimizers = state, optimizers
        self.written = ""  # Where the model was last written.

    def save(self, path: str | os.PathLike[str], meta: Mapping[str, Any], keep: int = 1) -> dict[str, Any]:
        """Write the model, the optimizers and this metadata, by :func:`save`, which may raise CheckpointError."""
        meta = {"fingerprint": self.state.layout.contents_fingerprint, **meta}
        replaced = save(path, self.state.tensors(), self.optimizers.state_dict(), meta, keep)
        self.written = str(file_of(path))
        return replaced

    def export(self, path: str | os.PathLike[str]) -> None:
        """Write the model's tensors alone. Raises CheckpointError, as :func:`save`."""
        export(path, self.state.tensors())
        self.written = str(file_of(path))

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
        self.optimizers.load(states)
