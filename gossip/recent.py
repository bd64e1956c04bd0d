"""A bounded table of the most recently set entries."""

from typing import TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


class Recent(dict[Key, Value]):
    """A dict of at most ``limit`` entries, in the order in which they were last set. The oldest one is evicted."""

    __slots__ = ("limit",)

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit

    def __setitem__(self, key: Key, value: Value) -> None:
        if key in self:
            del self[key]  # Move it to the end.
        elif len(self) >= self.limit:
            del self[next(iter(self))]
        dict.__setitem__(self, key, value)
