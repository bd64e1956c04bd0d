"""What was written is read again as it was, or not at all."""

import random

import msgpack

from gossip.ids import Address, MemberRecord, PeerId
from gossip.records import MAX_INT
from node.statedir import VERSION, Memory, StateDir, checksum

BOOK = [
    MemberRecord(PeerId(bytes([n]) * 16), b"k" * 32, n, address=Address("10.0.0.5", 7700 + n), extra=("new", n))
    for n in range(1, 5)
]


def written(path, *values):
    body = msgpack.packb(values)
    (path / "members.bin").write_bytes(body + checksum(body))


def test_what_was_written_is_read_again(tmp_path):
    assert StateDir(tmp_path).read() == Memory()
    StateDir(tmp_path).write(7, 1000, BOOK)
    assert StateDir(tmp_path).read() == Memory(7, 1000, BOOK)


def test_no_bit_of_an_address_book_flips_unnoticed(tmp_path):
    """A flipped bit in a count would be signed by its owner, and refused by everybody."""
    StateDir(tmp_path).write(7, 1000, BOOK)
    file = tmp_path / "members.bin"
    whole = file.read_bytes()
    rng = random.Random(3)
    for at in range(len(whole)):
        flipped = bytearray(whole)
        flipped[at] ^= 1 << rng.randrange(8)
        file.write_bytes(flipped)
        state = StateDir(tmp_path)
        assert state.read() == Memory()
        assert "set aside" in state.damaged
    for length in range(len(whole)):
        file.write_bytes(whole[:length])
        assert StateDir(tmp_path).read() == Memory()


def test_what_a_newer_version_wrote_behind_the_rest_is_written_again(tmp_path):
    written(tmp_path, VERSION, 7, 1000, [], {"run": b"r"}, "new")
    state = StateDir(tmp_path)
    assert state.read() == Memory(7, 1000, [], ({"run": b"r"}, "new"))
    state.write(8, 2000, BOOK)
    assert StateDir(tmp_path).read() == Memory(8, 2000, BOOK, ({"run": b"r"}, "new"))


def test_a_format_that_cannot_be_read_is_set_aside_and_both_are_named(tmp_path):
    written(tmp_path, VERSION + 3, "other")
    state = StateDir(tmp_path)
    assert state.read() == Memory()
    assert f"format {VERSION + 3}" in state.damaged
    assert f"reads {VERSION}" in state.damaged
    assert (tmp_path / "members.newer").exists()
    assert not (tmp_path / "members.damaged").exists()


def test_counts_that_cannot_be_are_damage_whatever_the_checksum_says(tmp_path):
    for counts in ((-1, 0), (0, -1), (MAX_INT, 0), (0, MAX_INT), (True, 0), (0.5, 0), (None, 0)):
        written(tmp_path, VERSION, *counts, [])
        state = StateDir(tmp_path)
        assert state.read() == Memory()
        assert state.damaged
