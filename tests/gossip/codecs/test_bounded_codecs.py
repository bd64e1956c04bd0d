"""A codec that must know how far apart the nodes are is agreed on only where an exchange has shown it."""

import pytest

from gossip.config import Config
from gossip.effects import Send
from gossip.wire.messages import Abort
from tests.gossip.exchange.sides import B, C, Side, accept

MONIQUA = Config(codec="moniqua4")
FRAGMENTS = Config(codec="moniqua4", part="fragments 2")
ALL, MASK = "all", "mask 1"


def mixed(side, session, part="all", codec="int8", partner=B):
    """Let the side take part in an exchange that ``partner`` offers; return the codec that it streamed with."""
    _, transfer = side.answer(partner, session, codec=codec, part=part)
    side.complete(partner, session)
    assert not side.table
    return transfer.codec


def offered(side):
    """Return the session and the codec of the side's next offer."""
    [sent] = side.offer_mix()
    return sent.message.session, sent.message.codec


def overflow(side):
    """Let an exchange with B, which the side offers, exceed its bound."""
    session, codec = offered(side)
    assert codec == "moniqua4"
    [transfer] = side.exchanges.on_accept(B, accept(session, codec=codec), 0.0)
    assert transfer.codec == codec
    side.exchanges.on_failed(session, "overflow", 0.0)


def test_an_exchange_of_a_part_teaches_no_bound():
    side = Side(config=MONIQUA)
    mixed(side, 7, part=MASK)
    assert mixed(side, 8, codec="moniqua4") == "int8"
    assert mixed(side, 9, codec="moniqua4") == "moniqua4"  # session 8 was of the whole vector
    assert mixed(side, 10, part=MASK, codec="moniqua4") == "int8"
    assert offered(side)[1] == "moniqua4"


def test_each_fragment_teaches_a_bound_of_its_own():
    side = Side(config=FRAGMENTS)
    assert mixed(side, 7, part="fragment 0/2", codec="moniqua4") == "int8"
    assert mixed(side, 8, part="fragment 0/2", codec="moniqua4") == "moniqua4"
    assert mixed(side, 9, part="fragment 1/2", codec="moniqua4") == "int8"
    assert mixed(side, 10, part="fragment 1/2", codec="moniqua4") == "moniqua4"
    assert offered(side)[1] == "moniqua4"


def test_other_fragments_and_the_whole_vector_teach_no_bound():
    """How many bounds are kept depends on the node's own setting, and not on what members offer."""
    side = Side(config=FRAGMENTS)
    for session, part in ((7, ALL), (9, "fragment 0/4"), (11, "fragment 2/3")):
        mixed(side, session, part=part)
        assert mixed(side, session + 1, part=part, codec="moniqua4") == "int8"
    assert side.exchanges.measured_parts == set()


def test_after_an_overflow_of_one_fragment_the_others_keep_their_bounds():
    side = Side(config=FRAGMENTS)
    mixed(side, 7, part="fragment 0/2", partner=C)
    mixed(side, 8, part="fragment 1/2", partner=C)
    overflow(side)
    assert mixed(side, 9, part="fragment 1/2", codec="moniqua4", partner=C) == "moniqua4"
    assert mixed(side, 10, part="fragment 0/2", codec="moniqua4", partner=C) == "int8"


@pytest.mark.parametrize("config", [Config(codec="int8"), Config(codec="int8", part="mask 0.5"), MONIQUA])
def test_an_answer_with_a_codec_that_cannot_be_used_here_is_refused(config):
    side = Side(config=config)
    if config is not MONIQUA:
        mixed(side, 7)  # it teaches nothing to a side that keeps no bounds
    session, _ = offered(side)
    told = side.exchanges.on_accept(B, accept(session, codec="moniqua4"), 0.0)
    assert told[0] == Send(B, Abort(session, "terms"))


def test_after_an_overflow_the_next_exchange_with_that_one_needs_no_bound():
    """The members nearby show a bound again, but the one that overflowed may still be too far away.

    Before, it overflowed twice, was put in back-off for it, and was further away when it came back.
    """
    side = Side(config=MONIQUA)
    mixed(side, 7, partner=C)
    overflow(side)
    mixed(side, 8, partner=C)
    session, codec = offered(side)
    assert codec == "int8"
    side.exchanges.on_accept(B, accept(session, codec="int8"), 0.0)
    side.complete(B, session)
    assert offered(side)[1] == "moniqua4"
    assert side.benched == []


def test_whom_an_overflow_was_with_gets_no_such_codec_for_asking():
    side = Side(config=MONIQUA)
    mixed(side, 7)
    side.answer(B, 8, codec="moniqua4")
    side.exchanges.on_abort(B, 8, "overflow", 0.0)
    mixed(side, 9, partner=C)
    assert mixed(side, 10, codec="moniqua4") == "int8"
    assert mixed(side, 11, codec="moniqua4") == "moniqua4"
