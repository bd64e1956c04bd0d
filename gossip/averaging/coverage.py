"""Coverage of a vector by chunks, which arrive in any order over several connections."""

from __future__ import annotations

from bisect import bisect_right

from gossip.codecs import ALIGN
from gossip.errors import ProtocolError
from gossip.wire.messages import MIN_CHUNK_ELEMENTS

__all__ = ["Coverage"]


class Coverage:
    """Bookkeeping of the chunks of a vector of ``size`` elements. It refuses an element that comes twice.

    Its memory is bounded, since a vector has few chunks: each has at least ``MIN_CHUNK_ELEMENTS``, except the last.
    """

    __slots__ = ("arrived", "missing", "next", "size", "under_way")

    def __init__(self, size: int) -> None:
        self.size = size
        self.next = 0  # End of the furthest chunk that has begun.
        self.missing: list[tuple[int, int]] = []  # Ascending (start, stop) before ``next`` that have not begun.
        self.under_way: dict[int, int] = {}  # Start to stop of the chunks that have begun and not yet arrived whole.
        self.arrived = 0  # Elements of the chunks that have arrived whole.

    def begin(self, start: int, elements: int, anywhere: bool = False) -> None:
        """Record that a chunk begins.

        Args:
            start: The position of its first element.
            elements: The number of its elements.
            anywhere: True if chunks may come in any order; else each must follow the one before.

        Raises:
            ProtocolError: The chunk is out of order, too small, too large, not aligned, or overlaps another one.
        """
        stop, rest = start + elements, self.size - start
        if start != self.next and not anywhere:
            raise ProtocolError(f"A chunk begins at element {start}, and the next one must begin at {self.next}.")
        if not rest or not min(rest, MIN_CHUNK_ELEMENTS) <= elements <= rest:
            raise ProtocolError(f"A chunk at element {start} of {self.size} cannot have {elements} elements.")
        if start % ALIGN or (elements % ALIGN and elements != rest):
            raise ProtocolError(f"A chunk from {start} to {stop} does not begin and end at a multiple of {ALIGN}.")
        if start >= self.next:
            if start > self.next:
                self.missing.append((self.next, start))
            self.next = stop
        else:
            self.take_from_missing(start, stop)
        self.under_way[start] = stop

    def take_from_missing(self, start: int, stop: int) -> None:
        """Remove the range of a chunk from the missing range that holds it."""
        at = bisect_right(self.missing, (start, self.size)) - 1
        first, last = self.missing[at] if at >= 0 else (0, 0)
        if not first <= start < stop <= last:
            raise ProtocolError(f"A chunk from {start} to {stop} overlaps another.")
        self.missing[at : at + 1] = [left for left in ((first, start), (stop, last)) if left[0] < left[1]]

    def complete(self, start: int) -> None:
        """Record that the chunk that begins at ``start`` has arrived whole."""
        self.arrived += self.under_way.pop(start) - start

    @property
    def prefix(self) -> int:
        """Return the position before which all elements have arrived."""
        first = min(self.under_way) if self.under_way else self.next
        return min(first, self.missing[0][0]) if self.missing else first

    @property
    def done(self) -> bool:
        """Return True if all elements have arrived."""
        return self.arrived == self.size
