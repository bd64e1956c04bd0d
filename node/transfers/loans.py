"""Loans: a partner on this host reads our vector in shared memory, without a stream of chunks."""

from __future__ import annotations

from gossip.averaging.vectors import Floats, Lease
from gossip.codecs import Codec
from gossip.wire.messages import Lent
from node.links.link import Link
from node.model.host_memory import HostMemory

__all__ = ["LOANS", "Loan"]

LOANS = 2  # Per link, including loans of ended sessions that the partner has not returned. Further vectors stream.


class Loan:
    """A lent vector, with the interface of a Sender.

    Its vector stays unchanged until the partner has read it, or until the side channel closes, which forbids further
    use.
    """

    def __init__(
        self, session: int, values: Floats, codec: Codec, lease: Lease, memory: HostMemory, offset: int
    ) -> None:
        self.session, self.codec, self.lease, self.memory = session, codec, lease, memory
        self.message = Lent(session, offset, values.size)
        self.position = 0  # In elements: 0, then all at once.
        self.since = 0.0  # The time at which it began.

    @property
    def done(self) -> bool:
        return self.position == self.message.elements

    def begin(self, link: Link, now: float) -> None:
        """Tell the partner where the vector is in the memory; it has the descriptor already."""
        self.since = now
        link.send(self.message)

    def end(self) -> None:
        self.lease.end()
