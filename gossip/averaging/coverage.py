"""Coverage of a vector by chunks, which arrive in any order over several connections."""

from __future__ import annotations

from bisect import bisect_right

from gossip.codecs import ALIGN
from gossip.errors import ProtocolError
from gossip.wire.messages import MIN_CHUNK_ELEMENTS

__all__ = ["Coverage"]


class Coverage:
    """The ranges of a vector of ``size`` elements that have arrived or are arriving. Each element may come once.

    Its memory is bounded, since a vector has few chunks: each has at least ``MIN_CHUNK_ELEMENTS``, except the last.
    """

    __slots__ = ("came", "filling", "missing", "next", "size")

    def __init__(self, size: int) -> None:
        self.size = size
        self.next = 0  # End of the furthest chunk that has begun.
        self.missing: list[tuple[int, int]] = []  # Ascending (start, stop) before ``next`` that have not begun.
        self.filling: dict[int, int] = {}  # Start to stop of the chunks that have begun and not yet arrived whole.
        self.came = 0  # Elements that have arrived.

    def begin(self, start: int, elements: int, anywhere: bool = False) -> None:
        """Record that a chunk begins: the next one, or, with ``anywhere``, one in a range where none has begun.

        Raises:
            ProtocolError: The chunk is out of place, too small, too large or not aligned.
        """
        stop, left = start + elements, self.size - start
        if not min(left, MIN_CHUNK_ELEMENTS) <= elements <= left or not left or (start != self.next and not anywhere):
            raise ProtocolError(f"A chunk of {elements} elements came at {start}; {self.next} is next of {self.size}.")
        if start % ALIGN or (elements % ALIGN and elements != left):
            raise ProtocolError(f"A chunk from {start} to {stop} does not begin and end at a multiple of {ALIGN}.")
        if start >= self.next:
            if start > self.next:
                self.missing.append((self.next, start))
            self.next = stop
        else:
            self.fill(start, stop)
        self.filling[start] = stop

    def fill(self, start: int, stop: int) -> None:
        """Begin a chunk within a missing range."""
        at = bisect_right(self.missing, (start, self.size)) - 1
        first, last = self.missing[at] if at >= 0 else (0, 0)
        if not first <= start < stop <= last:
            raise ProtocolError(f"A chunk from {start} to {stop} overlaps another.")
        self.missing[at : at + 1] = [gap for gap in ((first, start), (stop, last)) if gap[0] < gap[1]]

    def arrived(self, start: int) -> None:
        """Mark the whole chunk that begins at ``start`` as arrived."""
        self.came += self.filling.pop(start) - start

    @property
    def prefix(self) -> int:
        """Return the position before which all elements have arrived."""
        first = min(self.filling) if self.filling else self.next
        return min(first, self.missing[0][0]) if self.missing else first

    @property
    def done(self) -> bool:
        return self.came == self.size
