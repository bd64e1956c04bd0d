"""Identifiers of peers, their addresses, records and claims, and how people read ids and counts."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any, NamedTuple, NewType

from gossip.errors import ConfigError

__all__ = [
    "MOST_SAMPLES",
    "UNSTATED",
    "Address",
    "Claim",
    "MemberRecord",
    "PeerId",
    "from_hex",
    "parse_address",
    "peer_id_of",
    "quantity",
    "short",
]

MOST_SAMPLES = 2**53 - 1  # every number of samples saturates here: it is exact as a float64 too

PeerId = NewType("PeerId", bytes)
"""16 bytes, the hash of a public key: who, for all time. Never an address."""


def peer_id_of(public_key: bytes) -> PeerId:
    """The id of the owner of an Ed25519 public key (32 bytes): the first 128 bits of its SHA-256."""
    return PeerId(hashlib.sha256(b"gossip id" + public_key).digest()[:16])


def from_hex(text: object) -> bytes | None:
    """The 16 bytes of an id, or of a run's name, that are written as hexadecimal digits; None for anything else."""
    try:
        value = bytes.fromhex(text)  # type: ignore[arg-type]
    except (ValueError, TypeError):
        return None
    return value if len(value) == 16 else None


def short(peer: PeerId) -> str:
    """The first eight hexadecimal digits, as people see it."""
    return peer.hex()[:8]


def quantity(number: int, noun: str) -> str:
    """Return a count with its noun for people to read: ``1 member``, ``5,718 samples``."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


class Address(NamedTuple):
    """Where a peer listens."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(text: str) -> Address:
    """``host:port`` or ``[v6]:port``; raises :class:`ConfigError` naming what is wrong."""
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
    """What a member says of itself, signed by its own key.

    Ordering between two records of one id: higher ``incarnation`` wins, then ``left``, then higher ``sequence``.
    """

    id: PeerId
    public_key: bytes  # 32 bytes; the id is its hash
    incarnation: int  # raised by the owner alone: at every start, and to refute an accusation
    sequence: int = 0  # raised by the owner at every new record within an incarnation
    left: bool = False  # LEFT instead of ALIVE
    address: Address | None = None  # None: nobody can dial it
    homes: tuple[PeerId, ...] = ()  # at most 3 reachable members it keeps links to, when nobody can dial it
    ready: bool = False  # it holds the swarm's weights: may be averaged with, and takes a share of the data
    genesis: bytes = b""  # 16 bytes: which run its weights come from
    steps: int = 0  # earlier lives included
    samples: int = 0  # the same: what this member has trained, for whatever run
    progress: int = 0  # samples behind its weights, all members': gossip.exchange.progress
    loss: float | None = None
    version: float = 0.0  # mixing rounds behind its weights, averaged as the weights are
    finished: bool = False  # its owner says that the run has reached its end: nothing is trained any more
    signature: bytes = b""  # 64 bytes over everything else
    # Bytes in the first place are figures that its owner tells other owners; what else a newer version signs is not
    # understood, kept and told on unchanged.
    extra: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class Claim:
    """What one side of an exchange states of its progress, before any of the exchange is applied."""

    samples: int = 0  # its progress
    most: int = 0  # the samples by which it lets one exchange move a number
    members: int = 1  # of its run that it is in contact with, itself included; no number that it was told
    interval: int = 0  # the samples that it adds between two of its mixes


UNSTATED = Claim()
