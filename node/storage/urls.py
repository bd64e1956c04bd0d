"""URLs of checkpoints, and whether they can be used."""

import os
import re
from typing import Final

from gossip.errors import CheckpointError

SUFFIX: Final = ".safetensors"
URL: Final = re.compile(r"(?:[a-z0-9+.-]+::)*[a-z][a-z0-9+.-]+://")
AS_PATH: Final = re.compile(r"[a-z][a-z0-9+.-]+:/[^/]")  # A URL that went through pathlib.
BUCKETS: Final = frozenset(("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oss", "oci", "cos", "obs", "tos"))
"""Protocols of object stores, whose URLs begin with a bucket."""
REASON_CHARACTERS: Final = 160  # The longest text of an error that becomes part of a sentence.


def is_url(path: str | os.PathLike[str]) -> bool:
    """Return True if a checkpoint's path is the URL of a store.

    Raises:
        CheckpointError: It is no path, or was a URL before it became a Path, which drops one of its slashes.
    """
    if not isinstance(path, str | os.PathLike):
        raise CheckpointError(f"A checkpoint's path is a text or a Path, and not {path!r}.")
    if isinstance(path, str):
        return URL.match(path) is not None
    if AS_PATH.match(os.fspath(path)):
        raise CheckpointError(f"{path} was a URL before it became a Path: give it as text, with two slashes.")
    return False


def public_url(url: str) -> str:
    """Return the URL without user, password and query, which may hold a key."""
    return re.sub(r"(?<=://)[^/@]*@", "", url).partition("?")[0]


def with_ending(url: str) -> str:
    """Return the URL, with ``.safetensors`` if its file has no ending. Raise CheckpointError if it names no file."""
    name = url.rpartition("/")[2]
    rest = url.partition("://")[2]
    if not name or (protocol(url) in BUCKETS and "/" not in rest):
        raise CheckpointError(
            f"{public_url(url)} names no file; give one, as {public_url(url).rstrip('/')}/run{SUFFIX}."
        )
    return url if "." in name or "?" in name else url + SUFFIX


def protocol(url: str) -> str:
    """Return the protocol of the store itself: ``s3`` for ``simplecache::s3://bucket/run``."""
    return url.partition("://")[0].rpartition("::")[2]


def beside(url: str, word: str) -> str:
    """Return the URL of another checkpoint in the same folder: run.<word>.safetensors."""
    return re.sub(r"(\.[^./]+)$", rf".{word}\1", with_ending(url).partition("?")[0])


def check_url(url: str) -> None:
    """Raise CheckpointError if no checkpoint can go there, before anything is written. Opens no connection."""
    with_ending(url)
    try:
        from fsspec import get_filesystem_class
    except ImportError as error:
        raise CheckpointError(
            f"{public_url(url)} is a URL, which needs fsspec: pip install 'gossip-trainer[storage]', or give a path."
        ) from error
    for name in url.partition("://")[0].split("::"):
        try:
            get_filesystem_class(name)
        except ImportError as error:
            raise CheckpointError(
                f"{public_url(url)} needs a package that is not installed ({error_text(error, url)}): install it, or "
                "give a path."
            ) from error
        except ValueError as error:
            raise CheckpointError(
                f"{public_url(url)} begins with {name!r}, which fsspec does not know: correct it, or install the "
                "package that brings it."
            ) from error


def error_text(error: BaseException, url: str) -> str:
    """Return the text of an error in one line, without keys of the URL, to be put in the middle of a sentence."""
    text = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
    text = " ".join(text.replace(url, public_url(url)).split())[:REASON_CHARACTERS].rstrip(". ")
    return text[:1].lower() + text[1:] if text[1:2].islower() else text
