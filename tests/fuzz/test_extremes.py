"""No number that a member states raises anything but a RemoteError, or makes a number of ours that is not finite."""

import pytest

from gossip.wire.messages import MESSAGES
from tests.fuzz.extremes import EXTREMES, STATES, play


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("tag", list(MESSAGES))
def test_an_extreme_number_is_refused_or_harmless(tag, state):
    heard, told = play(state, MESSAGES[tag])
    assert heard <= told
    assert told % len(EXTREMES) == 0, "each number of the message at each extreme"
