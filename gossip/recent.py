"""A table of the last so many: what is set again is the newest, and the oldest makes way."""

from __future__ import annotations

from typing import TypeVar

__all__ = ["Recent"]

K = TypeVar("K")
V = TypeVar("V")


class Recent(dict[K, V]):
    """A dict in the order in which its entries were set last, of ``most`` at most. Whoever fills it pushes out what was
    set the longest ago."""

    __slots__ = ("most",)

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most

    def __setitem__(self, key: K, value: V) -> None:
        if key in self:
            del self[key]  # set again, it goes to the end
        elif len(self) >= self.most:
            del self[next(iter(self))]
        dict.__setitem__(self, key, value)
