"""Exchanges from the beginning of their streams to their end, for people: what moved, and how far apart it was."""

from __future__ import annotations

from dataclasses import dataclass

from gossip.exchange.session import Session

__all__ = ["Account"]


@dataclass(slots=True, eq=False)
class Account:
    """One of them. What it comes to is known when it is over; bytes are those of encoded weights."""

    session: int
    partners: tuple[str, ...]  # 32 hexadecimal digits each
    codec: str
    exchange: Session | None  # as the peer has it
    done: bool = False  # and not failed
    seconds: float = 0.0  # since the wish for a snapshot
    bytes_sent: int = 0
    bytes_received: int = 0
    distance: float | None = None  # between the weights, as if all had been exchanged; of a group from the mean
