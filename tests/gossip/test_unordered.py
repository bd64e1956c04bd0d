"""The list without an order, compared with a list that removes from its middle slowly."""

from hypothesis import given
from hypothesis import strategies as st

from gossip.unordered import UnorderedList


@given(st.lists(st.integers(0, 9), max_size=60))
def test_the_last_item_takes_the_place_of_one_that_is_removed(changes):
    items, slow = UnorderedList(), []
    for item in changes:
        if item in slow:
            items.remove(item)
            slow[slow.index(item)] = slow[-1]
            slow.pop()
        else:
            items.add(item)
            slow.append(item)
        assert items == slow
        assert [number in items for number in range(10)] == [number in slow for number in range(10)]
