"""A checkpoint: one safetensors file that holds everything, replaced as a whole, and a small JSON beside it for people.

Weights keep their own names, so that any tool that reads safetensors reads them. Optimizer tensors stand beside them
under ``optimizer/``; the optimizer's structure and the meta data are JSON in the file's header, because one rename can
only replace one file: what `load` needs is never spread over two. Nothing is ever pickled or unpickled.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import math
import os
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from gossip.errors import CheckpointError
from gossip.records import within

__all__ = ["Checkpoint", "Figures", "figures", "inspect", "load", "save"]

_SUFFIX: Final = ".safetensors"
_VERSION: Final = 1
_KEY: Final = "gossip"  # our entry in the header's __metadata__
_OPTIMIZER: Final = "optimizer/"

_DTYPES: Final = {  # as the format spells them; what is missing (complex128, quantised) it cannot hold
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What a file held. Tensors are on the CPU; tied ones are the same object again."""

    tensors: dict[str, Tensor]
    optimizer_state: dict[str, Any] | None  # as `optimizer.load_state_dict` takes it
    meta: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Figures:
    """What a run's checkpoint says of the run; ``genesis`` None: weights of no run."""

    genesis: bytes | None
    swarm_samples: int
    version: float


def figures(meta: Mapping[str, Any], path: str | os.PathLike[str]) -> Figures:
    """The run's figures in a checkpoint's meta data, within the bounds of a record: a run in which somebody lied has
    numbers beyond them, and its weights are worth as much as before.

    Raises :class:`CheckpointError` for a genesis that is none: under another one the run would silently be another.
    """
    given = meta.get("genesis")
    try:
        genesis = None if given is None else bytes.fromhex(given)
    except (ValueError, TypeError):
        genesis = b""
    if genesis is not None and len(genesis) != 16:
        raise CheckpointError(
            f"{path} names a run that cannot be: genesis should be 32 hexadecimal digits. The file was altered; use "
            "another one."
        )
    return Figures(
        genesis, within("base_samples", meta.get("swarm_samples", 0)), within("version", meta.get("version", 0))
    )


def save(
    path: str | os.PathLike[str],
    tensors: Mapping[str, Tensor],
    optimizer_state: Mapping[str, Any] | None,
    meta: Mapping[str, Any],
) -> None:
    """Writes ``path`` (a name without any ending gets ``.safetensors``) and, beside it, a ``.json`` that describes it.

    ``tensors`` may live on any device; ``optimizer_state`` is an optimizer's ``state_dict()``; ``meta`` holds numbers,
    strings, None, and lists, tuples and mappings of them. Killed at any moment, or out of room, it leaves the previous
    checkpoint readable: everything is written to temporary files in the same directory, synced, then renamed. Several
    processes may save to one path at once; the last one stays. Missing directories are made.

    The library's own ``save_file`` is not used: it copies a GPU's tensors all at once, does not sync, hides the error
    number behind text, and refuses tied tensors.

    Raises :class:`CheckpointError` in one sentence, saying whether the previous checkpoint is intact.
    """
    target = _with_suffix(path)
    # An ending of the caller's own stays in the name, or "run.1" and "run.2" would share one description.
    beside = target.with_suffix(".json") if target.suffix == _SUFFIX else target.with_name(target.name + ".json")
    everything, document = _plan(tensors, optimizer_state, meta)
    elements = sum(tensor.numel() for name, tensor in everything.items() if name in tensors)
    described = {"checkpoint": target.name, "version": _VERSION, "elements": elements, "meta": document["meta"]}
    committed = False
    try:
        for place in (target, beside):
            if place.exists() and not place.is_file():
                raise CheckpointError(f"Could not save to {place}: it is no regular file; choose another path.")
        target.parent.mkdir(parents=True, exist_ok=True)
        _sweep(target)
        _sweep(beside)
        # Both are on the disk before either is renamed: a full disk then stops both.
        with _temporary(target) as (weights_fd, weights), _temporary(beside) as (text_fd, text):
            _write_safetensors(weights_fd, everything, document)
            _write(text_fd, memoryview(json.dumps(described, indent=2).encode() + b"\n"))
            os.fsync(weights_fd)
            os.fsync(text_fd)
            os.replace(weights, target)
            committed = True
            os.replace(text, beside)
            _sync_directory(target.parent)
    except OSError as error:
        reason = _reason(error)
        if committed:
            raise CheckpointError(f"Saved {target}, whole, but could not describe it in {beside}: {reason}.") from error
        before = "the previous checkpoint is intact" if os.path.exists(target) else "nothing was written"
        room = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        advice = "free room or choose another path" if room else "choose another path"
        raise CheckpointError(f"Could not save to {target}: {reason}; {before}; {advice}.") from error


def load(path: str | os.PathLike[str]) -> Checkpoint:
    """Reads a checkpoint, or any safetensors file of weights (which then has no optimizer state and no meta data).

    Raises :class:`CheckpointError` in one sentence when the file is missing, cut off, corrupt, a pickle, or newer than
    this version. The file is checked as the format demands; bits that flipped within a tensor are not seen.
    """
    with _opened(path) as (place, file):
        document = _document(place, file)
        stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no mapping)
        for alias, kept in document["tied"].items():
            stored[alias] = stored[kept]
        encoded = document["optimizer"]
        state = None if encoded is None else _decode(encoded, stored)
        weights = {name: tensor for name, tensor in stored.items() if not name.startswith(_OPTIMIZER)}
        return Checkpoint(weights, state, _decode(document["meta"], {}))


def inspect(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The ``meta`` that a checkpoint was saved with, from its header alone. Errors as in :func:`load`."""
    with _opened(path) as (place, file):
        meta: dict[str, Any] = _decode(_document(place, file)["meta"], {})
        return meta


# What is written ------------------------------------------------------------------------------------------------------


def _plan(
    tensors: Mapping[str, Tensor], optimizer_state: Mapping[str, Any] | None, meta: Mapping[str, Any]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Every tensor to store, each once, and the JSON that says what they are."""
    for name in tensors:
        if name == "__metadata__" or name.startswith(_OPTIMIZER):
            raise CheckpointError(f"Could not save: a tensor may not be called {name!r} in a checkpoint; rename it.")
    everything = dict(tensors)
    optimizer = None if optimizer_state is None else _encode(optimizer_state, "the optimizer's state", "", everything)
    described = _encode(meta, "meta", "", None)
    if not isinstance(meta, Mapping) or "$map" in described:
        raise CheckpointError("Could not save: meta must be a mapping of names to plain values.")
    tied: dict[str, str] = {}
    kept: dict[tuple[Any, ...], str] = {}
    for name, tensor in list(everything.items()):
        if tensor.layout != torch.strided or tensor.is_meta or tensor.dtype not in _DTYPES:
            kind = f"{tensor.dtype} on {tensor.device} with layout {tensor.layout}"
            raise CheckpointError(f"Could not save: {name} is {kind}, which safetensors cannot hold; convert it first.")
        # The same memory seen the same way is one tensor under two names. Views that only overlap are written apart.
        view = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.is_conj())
        if tensor.numel() and kept.setdefault(view, name) != name:
            tied[name] = kept[view]
            del everything[name]
    return everything, {"version": _VERSION, "optimizer": optimizer, "tied": tied, "meta": described}


def _encode(value: Any, what: str, where: str, tensors: dict[str, Tensor] | None) -> Any:
    """``value`` as strict JSON. Tensors go into ``tensors`` under ``optimizer/<where>`` (None: there may be none).

    What JSON lacks is written as an object with one key: ``$tensor``, ``$tuple``, ``$float`` (nan, inf), ``$map``.
    """
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, np.bool_ | np.integer | np.floating):  # a schedule computed in numpy: 1e-3 is still a number
        value = value.item() if not isinstance(value, np.floating) else float(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else {"$float": repr(float(value))}
    if isinstance(value, int):
        return value
    if isinstance(value, Tensor) and tensors is not None:
        name = _OPTIMIZER + where
        while name in tensors:  # the keys 0 and "0", say
            name += "'"
        tensors[name] = value
        return {"$tensor": name}
    if isinstance(value, tuple | list):
        items = [_encode(item, what, f"{where}.{index}".lstrip("."), tensors) for index, item in enumerate(value)]
        return {"$tuple": items} if isinstance(value, tuple) else items
    if isinstance(value, Mapping) and all(isinstance(key, str | int) for key in value):
        pairs = [(key, _encode(item, what, f"{where}.{key}".lstrip("."), tensors)) for key, item in value.items()]
        if all(isinstance(key, str) and not key.startswith("$") for key in value):
            return dict(pairs)
        return {"$map": [list(pair) for pair in pairs]}
    place = f"{where!r} in {what}" if where else what
    allowed = "plain data" if tensors is None else "a tensor or plain data"
    raise CheckpointError(f"Could not save: {place} is {type(value).__name__}, not {allowed}; remove or convert it.")


def _decode(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The reverse of :func:`_encode`; KeyError, ValueError or TypeError for what it never wrote."""
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


def _write_safetensors(fd: int, tensors: Mapping[str, Tensor], document: Mapping[str, Any]) -> None:
    """The format: 8 bytes of header length, a JSON header, the tensors' bytes without gaps in the header's order."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt", _KEY: json.dumps(document, allow_nan=False)}}
    # Widest type first: then every tensor starts at a multiple of its element size, and can be read in place.
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    end = 0
    for name in order:
        tensor = tensors[name]
        start, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    _write(fd, memoryview(len(text).to_bytes(8, "little") + text))
    for name in order:  # one at a time: from a GPU, memory for the largest tensor and not for the model
        host = tensors[name].detach().cpu().resolve_conj().resolve_neg().contiguous()
        _write(fd, host.reshape(-1).view(torch.uint8).numpy().data)


# Replacing a file as a whole ------------------------------------------------------------------------------------------


def _with_suffix(path: str | os.PathLike[str]) -> Path:
    given = Path(path)
    if os.path.isdir(given) or not given.name:  # os.path answers False where Path raises PermissionError
        raise CheckpointError(f"{given} is a directory; give a file name, as in {given / 'run.safetensors'}.")
    return given if given.suffix else given.with_name(given.name + _SUFFIX)


@contextlib.contextmanager
def _temporary(target: Path) -> Iterator[tuple[int, Path]]:
    """An empty locked file beside ``target``, removed at the end unless it was renamed.

    Its name is its own, because every process of a swarm on one machine may save to one path at once; its lock tells
    :func:`_sweep` that somebody is writing it, also when process numbers belong to different containers.
    """
    while True:
        path = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        with contextlib.suppress(OSError):  # no locks on this filesystem: then nobody sweeps it either
            fcntl.flock(fd, fcntl.LOCK_EX)
        if os.fstat(fd).st_nlink:
            break
        os.close(fd)  # swept between its creation and its lock
    try:
        yield fd, path
    finally:
        path.unlink(missing_ok=True)
        os.close(fd)


def _sweep(target: Path) -> None:
    """Removes what killed writers left for ``target``, so that kills do not fill the disk."""
    for path in target.parent.iterdir():
        if path.name.startswith(f".{target.name}.") and path.name.endswith(".tmp"):
            with contextlib.suppress(OSError):  # locked by a living writer, or gone already
                fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    if os.fstat(fd).st_ino == path.stat().st_ino:  # not renamed meanwhile by its living writer
                        path.unlink()
                finally:
                    os.close(fd)


def _write(fd: int, data: memoryview) -> None:
    while data:
        data = data[os.write(fd, data) :]


def _sync_directory(directory: Path) -> None:
    with contextlib.suppress(OSError):  # some network filesystems refuse it; the rename itself has happened
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


# What is read ---------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _opened(path: str | os.PathLike[str]) -> Iterator[tuple[Path, Any]]:
    """The path found and its file open; whatever goes wrong inside is one sentence."""
    place = _with_suffix(path)
    if not os.path.exists(place) and os.path.exists(path):
        place = Path(path)  # a name without an ending that somebody else gave, if only to refuse it
    try:
        if place.exists() and not place.is_file():
            raise CheckpointError(f"Could not read {place}: it is no regular file; give a checkpoint's path.")
        with safe_open(place, framework="pt", device="cpu") as file:
            yield place, file
    except FileNotFoundError as error:
        raise CheckpointError(f"There is no checkpoint at {place}; check the path.") from error
    except OSError as error:
        raise CheckpointError(
            f"Could not read {place}: {_reason(error)}; check the path and its permissions."
        ) from error
    except (SafetensorError, KeyError, ValueError, TypeError, AttributeError, RecursionError) as error:
        if _looks_like_a_pickle(place):
            sentence = (
                "is a pickle, which may run code when it is opened; convert it to safetensors where you trust it."
            )
            raise CheckpointError(f"{place} {sentence}") from error
        sentence = "is cut off, corrupt, or no checkpoint; use another one."
        raise CheckpointError(f"{place} {sentence}") from error


def _document(place: Path, file: Any) -> dict[str, Any]:
    text = (file.metadata() or {}).get(_KEY)
    if text is None:  # weights that somebody else wrote
        return {"optimizer": None, "tied": {}, "meta": {}}
    document = json.loads(text)
    if document["version"] != _VERSION:
        raise CheckpointError(f"{place} has format {document['version']}, this version reads {_VERSION}; upgrade it.")
    for key, kind in (("optimizer", dict | None), ("tied", dict), ("meta", dict)):
        if not isinstance(document[key], kind):
            raise TypeError(key)
    return dict(document)


def _looks_like_a_pickle(place: Path) -> bool:
    """Asked only about a file already refused: torch's archives are zip files, plain pickles start with 0x80."""
    try:
        with place.open("rb") as file:
            return file.read(4).startswith((b"PK\x03\x04", b"\x80"))
    except OSError:
        return False


def _reason(error: OSError) -> str:
    text = error.strerror or str(error)
    return text[:1].lower() + text[1:]
