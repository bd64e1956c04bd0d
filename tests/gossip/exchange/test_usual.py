"""What a node that chooses its interval learns from its own exchanges: their usual cost, and how many fail."""

import pytest

from gossip.codecs import COMPILED, ExchangeCost, get_codec, mix_interval
from gossip.codecs.choice import NOMINAL_STEPS
from gossip.config import Config
from gossip.effects import Mix
from gossip.exchange.durations import LAST_RESULTS, MANY_FAILURES, WAIT_PARTNERS, OwnResults
from gossip.ids import PeerId
from sim import Scenario, simulate
from tests.gossip.exchange.sides import ELEMENTS, Side, accept

AUTO = Config(mix_every_steps="auto", codec="int8").for_training()
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
    for config, every in ((AUTO, 2), (Config(mix_every_steps=2, codec="int8").for_training(), 0)):
        [mix] = [effect for effect in mixed(Side(config=config), OTHERS[0], 0.5, 0.0) if isinstance(effect, Mix)]
        assert mix.interval_steps == every


QUICK = ExchangeCost(1000, "int8", 1004, 0.01)


def test_two_failures_among_the_last_exchanges_count_and_older_ones_do_not():
    results = OwnResults()
    assert not results.are_failing
    for _ in range(MANY_FAILURES - 1):
        results.add(failed=True)
    assert not results.are_failing
    results.add(failed=True)
    assert results.are_failing
    for _ in range(LAST_RESULTS - 1):
        results.add(failed=False)
    assert not results.are_failing


def test_where_exchanges_fail_the_interval_is_at_least_what_it_is_at_first():
    assert mix_interval(0.1, QUICK, COMPILED, 0.02) == 2
    assert mix_interval(0.1, QUICK, COMPILED, 0.02, is_failing=True) == NOMINAL_STEPS
    assert mix_interval(0.0, QUICK, COMPILED, 0.02, is_failing=True) == NOMINAL_STEPS
    slow = ExchangeCost(1000, "int8", 1004, 1.2)
    assert mix_interval(0.1, slow, COMPILED, 0.02, is_failing=True) == mix_interval(0.1, slow, COMPILED, 0.02) == 12


@pytest.mark.parametrize(("loss", "interval"), [(0.0, 2), (0.135, NOMINAL_STEPS)])
def test_peers_whose_messages_are_lost_keep_their_first_interval(loss, interval):
    scenario = Scenario.from_mapping({
        "peers": 12, "duration_s": 25.0, "membership": {"mode": "ideal"},
        "task": {"dataset": "digits", "model": "linear"},
        "compute": {"step_s": {"kind": "uniform", "low_s": 0.095, "high_s": 0.105}},
        "network": {"latency": {"kind": "constant", "value_ms": 5}, "loss": loss, "congestion": "none"},
        "gossip": {"stall_s": 0.8},
    })  # fmt: skip
    assert simulate(scenario, progress=False).summary["interval_steps"] == interval
