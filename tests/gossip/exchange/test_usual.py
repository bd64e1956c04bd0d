"""The usual cost of an exchange: medians over a node's last partners, in exchanges that it chose itself."""

from __future__ import annotations

import pytest

from gossip.codecs import get_codec
from gossip.config import Config
from gossip.effects import Mix
from gossip.exchange.durations import WAIT_PARTNERS
from gossip.ids import PeerId
from tests.gossip.exchange.sides import ELEMENTS, Side, accept

AUTO = Config(mix_every_steps="auto", codec="int8").for_training(False)
OTHERS = [PeerId(bytes([100 + number]) * 16) for number in range(WAIT_PARTNERS + 4)]


def mixed(side, partner, seconds, now, own=True):
    """Play an exchange whose answer takes a tenth of a second and whose streams take the rest."""
    x = side.exchanges
    side.partners = [partner]
    session = 10_000 + int(now)
    if own:
        [sent] = side.offer_mix(now)
        session = sent.message.session
        x.on_accept(partner, accept(session, codec="int8"), now + 0.1)
    else:
        side.answer(partner, session, now, codec="int8")
    return side.complete(partner, session, now + seconds)


def test_it_is_the_answer_and_the_streams_in_the_codec_that_was_used():
    side = Side(config=AUTO)
    assert side.exchanges.usual_cost() is None
    mixed(side, OTHERS[0], 0.5, 0.0)
    usual = side.exchanges.usual_cost()
    assert (usual.elements, usual.codec) == (ELEMENTS, "int8")
    assert usual.sent_bytes == get_codec("int8").encoded_bytes(ELEMENTS)
    assert usual.seconds == pytest.approx(0.5)


def test_few_partners_that_are_slow_on_purpose_change_nothing_and_those_that_ask_do_not_count():
    side = Side(config=AUTO)
    for number, partner in enumerate(OTHERS[:WAIT_PARTNERS]):
        mixed(side, partner, 9.0 if number < 7 else 0.5, 100.0 * number)
    assert side.exchanges.usual_cost().seconds == pytest.approx(0.5)
    for number in range(40):
        mixed(side, OTHERS[WAIT_PARTNERS], 9.0, 10_000.0 + 100.0 * number)  # all are one partner, which counts once
    assert side.exchanges.usual_cost().seconds == pytest.approx(0.5)
    before = side.exchanges.usual_cost()
    for number, partner in enumerate(OTHERS):
        mixed(side, partner, 9.0, 100_000.0 + 100.0 * number, own=False)
    assert side.exchanges.usual_cost() == before


def test_a_mix_says_in_which_interval_it_teaches_where_nodes_choose():
    for config, every in ((AUTO, 2), (Config(mix_every_steps=2, codec="int8").for_training(False), 0)):
        [mix] = [effect for effect in mixed(Side(config=config), OTHERS[0], 0.5, 0.0) if isinstance(effect, Mix)]
        assert mix.interval_steps == every
