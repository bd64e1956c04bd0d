"""Coverage of a vector by chunks, which arrive in any order over several connections."""

from bisect import bisect_right

from gossip.codecs import ALIGN
from gossip.errors import ProtocolError
from gossip.wire.messages import MIN_CHUNK_ELEMENTS


class Coverage:
    """Bookkeeping of the chunks of a vector of ``size`` elements. It refuses an element that comes twice.

    Its memory is bounded, since a vector has few chunks: each has at least ``MIN_CHUNK_ELEMENTS``, except the last.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.frontier = 0  # End of the furthest chunk that has begun.
        self.gaps: list[tuple[int, int]] = []  # Ascending (start, stop) before the frontier that have not begun.
        self.arriving: dict[int, int] = {}  # Stops by start, of the chunks that have begun and not yet arrived whole.
        self.arrived_elements = 0  # Number of elements of the chunks that have arrived whole.

    def begin_chunk(self, start: int, elements: int, anywhere: bool = False) -> None:
        """Record that a chunk begins.

        Args:
            start: The position of its first element.
            elements: The number of its elements.
            anywhere: True if chunks may come in any order; else each must follow the one before.

        Raises:
            ProtocolError: The chunk is out of order, too small, too large, not aligned, or overlaps another one.
        """
        stop, rest = start + elements, self.size - start
        if start != self.frontier and not anywhere:
            raise ProtocolError(f"A chunk begins at element {start}, and the next one must begin at {self.frontier}.")
        if not rest or not min(rest, MIN_CHUNK_ELEMENTS) <= elements <= rest:
            raise ProtocolError(f"A chunk at element {start} of {self.size} cannot have {elements} elements.")
        if start % ALIGN or (elements % ALIGN and elements != rest):
            raise ProtocolError(f"A chunk from {start} to {stop} does not begin and end at a multiple of {ALIGN}.")
        if start >= self.frontier:
            if start > self.frontier:
                self.gaps.append((self.frontier, start))
            self.frontier = stop
        else:
            self.take_from_gap(start, stop)
        self.arriving[start] = stop

    def take_from_gap(self, start: int, stop: int) -> None:
        """Remove the range of a chunk from the gap that holds it."""
        index = bisect_right(self.gaps, (start, self.size)) - 1  # The last gap that does not begin after the chunk.
        gap_start, gap_stop = self.gaps[index] if index >= 0 else (0, 0)  # An empty gap holds no chunk.
        if not gap_start <= start < stop <= gap_stop:
            raise ProtocolError(f"A chunk from {start} to {stop} overlaps another.")
        rests = (gap_start, start), (stop, gap_stop)
        self.gaps[index : index + 1] = [rest for rest in rests if rest[0] < rest[1]]

    def finish_chunk(self, start: int) -> None:
        """Record that the chunk that begins at ``start`` has arrived whole."""
        self.arrived_elements += self.arriving.pop(start) - start

    @property
    def prefix(self) -> int:
        """Return the position before which all elements have arrived."""
        missing_start = min(self.arriving) if self.arriving else self.frontier
        return min(missing_start, self.gaps[0][0]) if self.gaps else missing_start

    @property
    def is_complete(self) -> bool:
        """Return True if all elements have arrived."""
        return self.arrived_elements == self.size
