"""The table of the latest entries, compared with a list that does the same slowly."""

from hypothesis import given
from hypothesis import strategies as st

from gossip.recent import Recent

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
