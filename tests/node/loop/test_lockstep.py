"""A training loop that waits for its mix: it continues when its partner disappears, and stops on request."""

import signal
import threading
import time

import numpy as np
import pytest

from tests.harness.configs import tuned
from tests.node.trainees import children

CHILD = """
import signal, sys
import numpy as np
from gossip.config import Config
from node import Node
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background begins without it
config = Config(mix_every_steps=1, max_version_gap=0.0)
with Node({"x": np.zeros(600, np.float32)}, seeds=sys.argv[1:2], config=config) as node:
    print("in", flush=True)
    try:
        while True:
            node.step()
    except KeyboardInterrupt:
        print("out", flush=True)
"""
LOCKSTEP = tuned(mix_every_steps=1, max_version_gap=0.0, bench_s=0.2)


def vector() -> dict[str, np.ndarray]:
    return {"x": np.zeros(600, np.float32)}


@pytest.fixture
def child():
    yield from children(CHILD)


def mixes(trainee) -> int:
    return trainee.node.metrics().exchanges_done


def test_whoever_waits_for_a_partner_that_is_killed_trains_on(train, until, child):
    trainee = train(vector(), config=LOCKSTEP)
    partner, _ = child(trainee.node.address)
    until(lambda: mixes(trainee) > 20)
    partner.kill()
    partner.wait()
    steps = trainee.node.metrics().steps
    until(lambda: trainee.node.metrics().steps > steps + 100)


def test_a_mix_has_landed_when_the_step_returns(train, until):
    """In lockstep a step leaves no update for the next boundary."""
    first = train(vector(), config=LOCKSTEP)
    trainees = [first, train(vector(), config=LOCKSTEP, seeds=[first.node.address])]
    until(lambda: all(mixes(trainee) > 5 for trainee in trainees))

    before, limit = mixes(trainees[0]), time.monotonic() + 30.0

    def step(node) -> list[bool]:
        left = []
        # A partner whose thread waits for a core sits out, and these steps then mix with nobody.
        while len(left) < 30 or (mixes(trainees[0]) == before and time.monotonic() < limit):
            node.step()
            left.append(bool(node._training.live.boundary.pending_updates))
        return left

    assert not any(trainees[0].do(step))
    assert mixes(trainees[0]) > before


def test_one_that_waits_can_be_interrupted(train, until, child):
    trainee = train(vector(), config=LOCKSTEP)
    partner, _ = child(trainee.node.address)
    until(lambda: mixes(trainee) > 5)
    asleep = threading.Event()

    def sleep(_node) -> None:  # Sleep less than the partner's timeout.
        asleep.set()
        time.sleep(1.0)

    sleeper = threading.Thread(target=trainee.do, args=(sleep,))
    sleeper.start()
    asleep.wait()
    partner.send_signal(signal.SIGINT)
    assert partner.stdout.readline() == "out\n"
    assert partner.wait(10) == 0
    sleeper.join()
