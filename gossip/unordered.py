"""A list without an order."""

from collections.abc import Hashable
from typing import TypeVar

Item = TypeVar("Item", bound=Hashable)


class UnorderedList(list[Item]):
    """A list of unique items, from which one is removed in O(1): the last one takes its place.

    Only :meth:`add` and :meth:`remove` may change it.
    """

    __slots__ = ("places",)

    def __init__(self) -> None:
        super().__init__()
        self.places: dict[Item, int] = {}  # The index of each item.

    def __contains__(self, item: object) -> bool:
        return item in self.places

    def add(self, item: Item) -> None:
        self.places[item] = len(self)
        self.append(item)

    def remove(self, item: Item) -> None:
        place, last = self.places.pop(item), self.pop()
        if place < len(self):
            self[place] = last
            self.places[last] = place
