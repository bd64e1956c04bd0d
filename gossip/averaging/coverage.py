"""Which elements of a vector are here, and which are coming: over several connections chunks come in any order."""

from __future__ import annotations

from bisect import bisect_right

from gossip.codecs import ALIGN
from gossip.errors import ProtocolError
from gossip.wire.messages import MIN_CHUNK_ELEMENTS

__all__ = ["Coverage"]


class Coverage:
    """Of ``size`` elements, each of which comes once. What it holds is bounded by how many chunks a vector may have."""

    __slots__ = ("came", "filling", "missing", "next", "size")

    def __init__(self, size: int) -> None:
        self.size = size
        self.next = 0  # behind the furthest that began
        self.missing: list[tuple[int, int]] = []  # before it, and not begun yet: from, to; ascending
        self.filling: dict[int, int] = {}  # begun, and not here yet: to, by from
        self.came = 0  # elements

    def begin(self, start: int, elements: int, anywhere: bool = False) -> None:
        """A chunk begins to come: the next, or, ``anywhere``, one that lies where none came. Raises ProtocolError."""
        stop, left = start + elements, self.size - start
        if not min(left, MIN_CHUNK_ELEMENTS) <= elements <= left or not left or (start != self.next and not anywhere):
            raise ProtocolError(f"{elements} elements came for {start} where {self.next} is next.")
        if start % ALIGN or (elements % ALIGN and elements != left):
            raise ProtocolError(f"A chunk from {start} to {stop} begins or ends at what is no multiple of {ALIGN}.")
        if start >= self.next:
            if start > self.next:
                self.missing.append((self.next, start))
            self.next = stop
        else:
            self.fill(start, stop)
        self.filling[start] = stop

    def fill(self, start: int, stop: int) -> None:
        """A part of what is missing begins to come."""
        at = bisect_right(self.missing, (start, self.size)) - 1
        first, last = self.missing[at] if at >= 0 else (0, 0)
        if not first <= start < stop <= last:
            raise ProtocolError(f"A chunk from {start} to {stop} came where another had come.")
        self.missing[at : at + 1] = [gap for gap in ((first, start), (stop, last)) if gap[0] < gap[1]]

    def arrived(self, start: int) -> None:
        """All of a chunk that began there is here."""
        self.came += self.filling.pop(start) - start

    @property
    def prefix(self) -> int:
        """All elements before it are here."""
        first = min(self.filling) if self.filling else self.next
        return min(first, self.missing[0][0]) if self.missing else first

    @property
    def done(self) -> bool:
        return self.came == self.size
