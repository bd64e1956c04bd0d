"""Exchanges from the beginning of their streams to their end, for people: what moved, and how far apart it was."""

from __future__ import annotations

import math
from dataclasses import dataclass

from gossip.exchange.session import Session, State
from gossip.ids import PeerId

__all__ = ["Account"]


@dataclass(slots=True, eq=False)
class Account:
    """One of them. What it comes to is known when it is over; bytes are those of encoded weights."""

    session: int
    partners: tuple[PeerId, ...]
    codec: str
    exchange: Session | None  # as the peer has it
    seconds: float = 0.0  # since the wish for a snapshot
    bytes_sent: int = 0
    bytes_received: int = 0
    apart_sq: float | None = None  # |theirs - ours|^2, as if all had been exchanged; of a group |mean - ours|^2

    @property
    def done(self) -> bool:
        return self.exchange is not None and self.exchange.state is State.DONE

    @property
    def distance(self) -> float | None:
        """Between the weights; None where theirs never came whole, or are no numbers."""
        return None if self.apart_sq is None or not math.isfinite(self.apart_sq) else math.sqrt(self.apart_sq)
