"""The table of the latest entries and the list without an order, compared with lists that do the same slowly."""

from hypothesis import given
from hypothesis import strategies as st

from gossip.recent import Recent
from gossip.unordered import UnorderedList

CHANGES = st.lists(st.tuples(st.integers(0, 9), st.booleans()), max_size=60)


@given(CHANGES, st.integers(1, 5))
def test_it_holds_what_was_set_last_and_the_oldest_makes_way(changes, most):
    table, slow = Recent(most), []
    for number, (key, kept) in enumerate(changes):
        slow = [entry for entry in slow if entry[0] != key]
        if kept:
            table[key] = number
            slow = [*slow, (key, number)][-most:]
        else:
            table.pop(key, None)
        assert [*table.items()] == slow


@given(st.lists(st.integers(0, 9), max_size=60))
def test_the_last_item_takes_the_place_of_one_that_is_removed(changes):
    items, slow = UnorderedList(), []
    for item in changes:
        if item in items:
            items.remove(item)
            slow = [slow[-1] if kept == item else kept for kept in slow][:-1]
        else:
            items.add(item)
            slow.append(item)
        assert items == slow
