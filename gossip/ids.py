"""Ids of peers, addresses, records and claims, and how ids and counts are displayed."""

import hashlib
from dataclasses import dataclass
from typing import Any, NamedTuple, NewType

from gossip.errors import ConfigError

MOST_SAMPLES = 2**53 - 1  # Sample counts are clamped to this: up to it every count is exact as a float64 too.

PeerId = NewType("PeerId", bytes)
"""The permanent id of a peer: 16 bytes of the hash of its public key. It is not an address."""


def peer_id_of(public_key: bytes) -> PeerId:
    """Return the id of the owner of an Ed25519 public key (32 bytes): the first 128 bits of its SHA-256."""
    return PeerId(hashlib.sha256(b"gossip id" + public_key).digest()[:16])


def from_hex(text: object) -> bytes | None:
    """Return the 16 bytes of a peer or run id in hexadecimal, or None for anything else."""
    try:
        value = bytes.fromhex(text)  # type: ignore[arg-type]
    except (ValueError, TypeError):
        return None
    return value if len(value) == 16 else None


def short(peer: PeerId) -> str:
    """Return the first eight hexadecimal digits, as displayed."""
    return peer.hex()[:8]


def quantity(number: int, noun: str) -> str:
    """Return a count with its noun for people to read: ``1 member``, ``5,718 samples``."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def every(steps: int) -> str:
    """Return an interval for people to read: ``every step``, ``every 8 steps``."""
    return "every step" if steps == 1 else f"every {quantity(steps, 'step')}"


class Address(NamedTuple):
    """The address at which a peer listens."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(text: str) -> Address:
    """Parse ``host:port`` or ``[v6]:port``. Raise :class:`ConfigError` that names the mistake."""
    if "//" in text:
        raise ConfigError(f"{text!r} is not an address: write host:port alone, without a scheme, as in 10.0.0.5:7700.")
    host, colon, port = text.strip().rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ConfigError(f"{text!r} is not an address: write an IPv6 host in brackets, as in [::1]:7700.")
    if not colon or not host or not port.isascii() or not port.isdigit() or len(port) > 5 or int(port) > 65535:
        raise ConfigError(f"{text!r} is not an address: write host:port, as in 10.0.0.5:7700.")
    return Address(host, int(port))


@dataclass(frozen=True, slots=True)
class MemberRecord:
    """A member's statement about itself, signed with its own key.

    Order of two records of one id: higher ``incarnation`` wins, then ``left``, then higher ``sequence``.
    A *life* of a member is the time from one start of its process to the next.
    """

    id: PeerId
    public_key: bytes  # 32 bytes, of which the id is the hash.
    incarnation: int  # Only the owner raises it: at each start, and to refute an accusation.
    sequence: int = 0  # The owner raises it in each new record of an incarnation.
    left: bool = False  # The member has LEFT; else it is ALIVE.
    address: Address | None = None  # None for an undialable member, which opens all its links itself.
    homes: tuple[PeerId, ...] = ()  # At most 3 reachable members to which an undialable member keeps links.
    ready: bool = False  # It holds the run's weights: it may mix, and takes a share of the data.
    run_id: bytes = b""  # 16 bytes, the id of the run of its weights; empty before it has a run.
    steps: int = 0  # Training steps in all lives.
    samples: int = 0  # Samples that this member trained in all lives, for any run.
    progress: int = 0  # Samples of all members that shaped its weights, see :mod:`gossip.exchange.progress`.
    loss: float | None = None  # The last training loss; None if there is none.
    version: float = 0.0  # Mixing rounds that shaped its weights, averaged with them.
    finished: bool = False  # The owner says that the run is finished and training has ended.
    signature: bytes = b""  # 64 bytes over all other fields.
    # If the first item is bytes, these are figures that users combine over the swarm. Items that a newer version signs
    # are kept and relayed unchanged.
    extra: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class Claim:
    """The progress that one side of an exchange states before anything is applied."""

    samples: int = 0  # Its progress, as in its record.
    most: int = 0  # The largest change of ``samples`` by one exchange that it accepts.
    members: int = 1  # Members of its run that it is linked with, itself included, by its own count.
    interval: int = 0  # Samples that it adds between two of its mixes.


UNSTATED = Claim()  # The claim of a message that states none; an exchange with it changes no progress.
