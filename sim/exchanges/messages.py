"""The encoded sizes of the messages of an exchange."""

from __future__ import annotations

from gossip.arithmetic.subsets import ALL
from gossip.codecs import get_codec
from gossip.config import Config
from gossip.wire import frames
from gossip.wire.messages import Accept, Busy, Commit, Fetch, Offer, Serving

__all__ = ["Sizes"]

SESSION, RUN, VERSION = 1 << 61, bytes(16), 1.5  # values of the usual encoded length


class Sizes:
    """The sizes in bytes of each kind of message, and of the stream of a vector."""

    def __init__(self, config: Config, elements: int) -> None:
        codec = config.codec
        offer = Offer(SESSION, f"vector of {elements}", RUN, VERSION, 0.5, codec, "pair", 0.0, str(ALL))
        self.offer = len(frames.encode(offer))
        self.accept = len(frames.encode(Accept(SESSION, VERSION, 0.5, codec)))
        self.busy, self.commit = (len(frames.encode(kind(SESSION))) for kind in (Busy, Commit))
        fetch = Fetch(SESSION, (), 0, elements)
        self.piece = len(frames.encode(fetch)) + len(frames.encode(Serving(SESSION, VERSION, RUN, (), ())))
        self.stream = get_codec(codec).encoded_bytes(elements)
