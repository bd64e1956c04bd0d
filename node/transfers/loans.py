"""A vector of ours that a partner on this host reads where it lies, in the place of a stream of chunks."""

from __future__ import annotations

from gossip.averaging.vectors import Floats, Lease
from gossip.codecs import Codec
from gossip.wire.messages import Lent
from node.links.link import Link
from node.model.host_memory import HostMemory

__all__ = ["LOANS", "Loan"]

LOANS = 2  # of one link at once, with those that nobody wants any more and that are not said to be read: others stream


class Loan:
    """It has a sender's face. Its vector stays as it is until the partner says that it has read it, or is told by the
    end of the link's side channel that it must not use it any more."""

    def __init__(
        self, session: int, values: Floats, codec: Codec, lease: Lease, memory: HostMemory, offset: int
    ) -> None:
        self.session, self.codec, self.lease, self.memory = session, codec, lease, memory
        self.message = Lent(session, offset, values.size)
        self.position = 0  # elements, all of them once they are read
        self.since = 0.0  # when it began

    @property
    def done(self) -> bool:
        return self.position == self.message.elements

    def begin(self, link: Link, now: float) -> None:
        """What has its descriptor already is told where it lies."""
        self.since = now
        link.send(self.message)

    def end(self) -> None:
        self.lease.end()
