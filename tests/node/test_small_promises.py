"""Single lines of small functions that no other test would miss."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from node.local import LocalSwarm
from node.loop.held_run import HeldRun


def swarm_of(looks, pause_s=0.0):
    """A local swarm whose nodes end after so many looks at them."""

    def watch(every_s):
        for _ in range(looks):
            time.sleep(pause_s)
            yield

    return SimpleNamespace(watch=watch)


@pytest.mark.parametrize(
    ("looks", "true_at", "met"), [(5, None, True), (5, 3, True), (5, 6, True), (5, 99, False)],
    ids=["the end", "a condition", "one that the end meets", "one that nothing meets"],
)  # fmt: skip
def test_a_wait_for_a_local_swarm_says_whether_its_condition_was_met(looks, true_at, met):
    calls = []
    until = None if true_at is None else lambda: calls.append(0) or len(calls) >= true_at
    assert LocalSwarm.wait(swarm_of(looks), until) is met


def test_a_wait_for_a_local_swarm_ends_with_its_time():
    began = time.monotonic()
    assert LocalSwarm.wait(swarm_of(1_000, 0.01), lambda: False, timeout_s=0.05) is False
    assert time.monotonic() - began < 5.0


@pytest.mark.parametrize(("uncounted", "sharers", "samples"), [(0, 3, 1_000), (16, 1, 1_016), (16, 3, 1_048)])
def test_a_checkpoint_counts_samples_since_the_last_report_for_every_member_of_the_run(uncounted, sharers, samples):
    run = SimpleNamespace(
        network=SimpleNamespace(
            peer=SimpleNamespace(
                view=SimpleNamespace(run_id=b"r", finished=False), local=SimpleNamespace(version=2.0)
            ),
            service=SimpleNamespace(identity=SimpleNamespace(id=b"i")),
        ),
        ranks=SimpleNamespace(uncounted_samples=uncounted),
        view=SimpleNamespace(sharers=sharers, owners=()),
        live=SimpleNamespace(state=SimpleNamespace(layout=SimpleNamespace(contents_fingerprint="f"))),
        samplers=SimpleNamespace(state=dict),
        swarm_samples=1_000, steps=10, samples=160,
    )  # fmt: skip
    state = HeldRun.state_dict(run)
    assert (state["samples"], state["swarm_samples"]) == (160 + uncounted, samples)
