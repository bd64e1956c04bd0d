"""A node's identity and its access: its own key, the swarm's secret, and the invite that carries the secret."""

from __future__ import annotations

import base64
import binascii
import contextlib
import os
import re
import secrets
import stat
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import msgpack
from cryptography.exceptions import InternalError, InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from gossip.errors import IdentityError
from gossip.ids import Address, PeerId, peer_id_of

IDENTITY_FILE = "identity.pem"
SECRET_FILE = "swarm.secret"  # In a state directory.
SECRET_BYTES = 32  # As many as the Ed25519 key that is derived from it.
SECRET_PREFIX = "gossip-secret-1:"
INVITE_PREFIX = "gossip-invite-1:"
INVITE_ADDRESSES_MAX = 8  # Twice the addresses that a member has: IPv4 and IPv6, local and public.
INVITE_TEXT_MAX = 4_096  # Characters; eight addresses with the longest host names fit.
HOST_PATTERN = re.compile(r"[0-9A-Za-z._:%-]{1,253}")  # 253 is the longest name that DNS can carry.


@dataclass(frozen=True, slots=True)
class Identity:
    """An Ed25519 key pair. The private half is in no ``repr``; only :meth:`pem` returns it."""

    _key: Ed25519PrivateKey = field(repr=False, compare=False)
    public_key: bytes = field(init=False)  # 32 bytes.
    id: PeerId = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "public_key", self._key.public_key().public_bytes_raw())
        object.__setattr__(self, "id", peer_id_of(self.public_key))

    @classmethod
    def fresh(cls) -> Identity:
        """Create a new member that is stored nowhere."""
        return cls(Ed25519PrivateKey.generate())

    @classmethod
    def load(cls, state_dir: Path | None) -> Identity:
        """Load the identity in ``state_dir``, creating it at the first start; without a directory create a fresh one.

        Raises :class:`IdentityError` if the directory cannot be used or the file holds no Ed25519 key. A damaged file
        is never replaced silently, since that would turn this node into another member.
        """
        if state_dir is None:
            return cls.fresh()
        path = state_dir / IDENTITY_FILE
        try:
            pem = path.read_bytes()
        except FileNotFoundError:
            identity = cls.fresh()
            _write_private(path, identity.pem())
            return identity
        except OSError as error:
            raise IdentityError(
                f"The identity in {path} cannot be read ({error.strerror}): make it readable or name another state"
                " directory."
            ) from error
        except ValueError as error:
            raise IdentityError("The path of the state directory holds a null byte: name a folder.") from error
        try:
            key = serialization.load_pem_private_key(pem, password=None)
        # TypeError: it needs a password. InternalError: OpenSSL reads keys of this kind but cannot use them.
        except (ValueError, TypeError, UnsupportedAlgorithm, InternalError):
            key = None
        if not isinstance(key, Ed25519PrivateKey):
            raise IdentityError(
                f"{path} does not hold a node's key: restore it from a copy, or delete it to start as a new member."
            )
        check_private(path, "the node's key")
        return cls(key)

    def sign(self, payload: bytes) -> bytes:
        """Return a signature of 64 bytes that only the holder of this key can make."""
        return self._key.sign(payload)

    def pem(self, password: bytes | None = None) -> bytes:
        """Return the private key as PKCS8 PEM, encrypted if a password is given."""
        encryption = serialization.BestAvailableEncryption(password) if password else serialization.NoEncryption()
        return self._key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption)


def verify(public_key: bytes, payload: bytes, signature: bytes) -> bool:
    """Return True if the owner of ``public_key`` (32 bytes) signed ``payload``; False for junk of any length."""
    try:
        Ed25519PublicKey.from_public_bytes(public_key).verify(signature, payload)
    except (InvalidSignature, ValueError):
        return False
    return True


def new_secret() -> str:
    """Return a new random swarm secret, as text for a file."""
    return SECRET_PREFIX + _text_of(secrets.token_bytes(SECRET_BYTES))


def parse_secret(text: str) -> bytes:
    """Return the 32 bytes of a secret's text; raise :class:`IdentityError`, which never repeats the text."""
    secret = _bytes_of(text, SECRET_PREFIX)
    if secret is None or len(secret) != SECRET_BYTES:
        raise IdentityError("This is not a swarm secret: make one with `gossip secret`, or copy the swarm's whole.")
    return secret


def read_secret(path: Path) -> bytes:
    """Return the secret in a file; raise :class:`IdentityError`, which names the file."""
    try:
        text = path.read_text(encoding="ascii")
    except FileNotFoundError as error:
        raise IdentityError(
            f"There is no swarm secret at {path}: copy the swarm's there, or make one with `gossip secret`."
        ) from error
    except UnicodeDecodeError:
        text = ""
    except OSError as error:
        raise IdentityError(
            f"The swarm secret in {path} cannot be read ({error.strerror}): make it readable or name another file."
        ) from error
    except ValueError as error:
        raise IdentityError("The path of the swarm secret holds a null byte: name a file.") from error
    try:
        secret = parse_secret(text)
    except IdentityError:
        raise IdentityError(
            f"{path} does not hold a swarm secret: make one with `gossip secret`, or copy the swarm's whole."
        ) from None
    check_private(path, "the swarm secret")
    return secret


def check_private(path: Path, content: str) -> None:
    """Raise :class:`IdentityError` if every user of this machine may read or write the file and we could forbid it.

    A file mounted by an orchestrator belongs to another user or its mount is read-only, and is accepted.
    """
    status = path.stat()
    is_ours = status.st_uid == os.geteuid() and not os.statvfs(path).f_flag & os.ST_RDONLY
    if is_ours and stat.S_ISREG(status.st_mode) and status.st_mode & 0o006:
        raise IdentityError(f"Every user of this machine can read {content} in {path}: run chmod 600 {path} first.")


def keep_secret(secret: bytes, folder: Path) -> Path:
    """Write a secret into a folder, readable by its owner alone; raise IdentityError if that fails."""
    path = folder / SECRET_FILE
    try:
        if read_secret(path) == secret:
            return path
    except IdentityError:
        pass
    _write_private(path, f"{SECRET_PREFIX}{_text_of(secret)}\n".encode())
    return path


def kept_secret(folder: Path) -> Path | None:
    """Return the file of the secret that an earlier start kept, if there was one."""
    path = folder / SECRET_FILE
    return path if path.is_file() else None


@dataclass(frozen=True, slots=True)
class InviteToken:
    """All that a newcomer needs: the secret, and one member by its id, so that no impostor can take its address."""

    secret: bytes = field(repr=False)  # 32 bytes.
    seeds: tuple[Address, ...]  # 1 to 8 addresses of the member `seed_id`.
    seed_id: PeerId

    def __post_init__(self) -> None:
        if len(self.secret) != SECRET_BYTES or len(self.seed_id) != 16:
            raise IdentityError("An invite needs a secret of 32 bytes and a member's id of 16.")
        if not 1 <= len(self.seeds) <= INVITE_ADDRESSES_MAX:
            raise IdentityError(f"An invite needs 1 to {INVITE_ADDRESSES_MAX} addresses of the member who invites.")
        for host, port in self.seeds:
            if not HOST_PATTERN.fullmatch(host) or not 1 <= port <= 65_535:
                raise IdentityError(f"An invite cannot carry the address {host!r} port {port}: name a host and a port.")

    @property
    def text(self) -> str:
        """Return one line to give to a newcomer; it must be kept as secret as the secret in it."""
        return INVITE_PREFIX + _text_of(msgpack.packb([self.secret, self.seeds, self.seed_id]))


def is_invite(text: str) -> bool:
    """Return True if the text is meant as an invite (an address or a path never is)."""
    return text.strip().startswith(INVITE_PREFIX)


def parse_invite(text: str) -> InviteToken:
    """Return the invite in a text; raise :class:`IdentityError` for any other text, without repeating it."""
    packed = _bytes_of(text, INVITE_PREFIX) if len(text) <= INVITE_TEXT_MAX else None
    try:
        match msgpack.unpackb(packed or b"", max_ext_len=0, max_map_len=0):
            case [bytes(secret), [*pairs], bytes(seed_id)]:
                invite = InviteToken(secret, tuple(_address_of(pair) for pair in pairs), PeerId(seed_id))
            case _:
                raise ValueError("not three fields")
        if invite.text != text.strip():  # Each invite has one canonical text; wasteful encodings are refused too.
            raise ValueError("not canonical")
    except (ValueError, IdentityError, msgpack.UnpackException):
        raise IdentityError("This is not a whole invite: copy it again, from the prefix to the end.") from None
    return invite


def _address_of(pair: object) -> Address:
    match pair:
        case [str(host), int(port)] if type(port) is int:  # True is an int, but not a port.
            return Address(host, port)
    raise ValueError("not an address")


def _text_of(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode("ascii")


def _bytes_of(text: str, prefix: str) -> bytes | None:
    """Return the bytes that :func:`_text_of` wrote after ``prefix``; None if the text has any other form."""
    text = text.strip()
    if not text.startswith(prefix):
        return None
    body = text.removeprefix(prefix)
    try:
        data = base64.urlsafe_b64decode(body + "=" * (-len(body) % 4))
    except (binascii.Error, ValueError):
        return None
    return data if _text_of(data) == body else None  # The decoder skips characters that it does not know.


def _write_private(path: Path, data: bytes) -> None:
    """Write a file atomically, readable by its owner alone; raise :class:`IdentityError` if that fails."""
    partial = ""  # The file that is written; empty before it exists.
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle, partial = tempfile.mkstemp(prefix=path.name, dir=path.parent)  # Created with mode 0600.
        with open(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except OSError as error:
        if partial:
            with contextlib.suppress(OSError):
                os.unlink(partial)
        raise IdentityError(
            f"{path.name} could not be written into {path.parent} ({error.strerror}): make the directory writable or"
            " name another state directory."
        ) from error
