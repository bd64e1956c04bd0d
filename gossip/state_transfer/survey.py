"""What a newcomer takes its donors to have: the majority's word and medians, so that no single one decides."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from gossip.ids import PeerId
from gossip.wire.messages import Serving

__all__ = ["Agreed", "agree"]

LARGEST_SCALAR = 2.0**53  # of an optimizer's state: a step count beyond it is none
AHEAD = 16.0  # rounds that a donor's version may lie beyond twice the median: a young run's versions are all small


@dataclass(frozen=True, slots=True)
class Agreed:
    """What is fetched, and from whom."""

    donors: tuple[PeerId, ...]
    keys: tuple[str, ...]  # of the optimizer's state; empty: the weights alone
    scalars: tuple[tuple[str, float], ...]
    version: float
    swarm_samples: int  # behind the run
    finished: bool


def agree(answers: Mapping[PeerId, Serving], ours: tuple[str, ...], stateful: bool) -> Agreed:
    """What most of the ``answers`` (one at least, all of one run) say. ``ours`` are our own optimizer's keys, which
    decide between as many; ``stateful``: there is an optimizer whose state could be taken."""
    keys: tuple[str, ...] = ()
    if stateful:
        votes = Counter(answer.optimizer_keys for answer in answers.values())
        versions = {kind: max(a.version for a in answers.values() if a.optimizer_keys == kind) for kind in votes}
        keys = max(votes, key=lambda kind: (votes[kind], kind == ours, versions[kind]))
    same = {peer: answer for peer, answer in answers.items() if not stateful or answer.optimizer_keys == keys}
    usual = statistics.median_low(answer.version for answer in same.values())
    donors = {peer: answer for peer, answer in same.items() if answer.version <= 2 * usual + AHEAD}
    agreed = donors.values()
    # The lower median, as of the paces in gossip.credit: of two, the one that states less is believed.
    swarm_samples = statistics.median_low(answer.swarm_samples for answer in agreed)
    return Agreed(
        tuple(donors), keys, medians([answer.optimizer_scalars for answer in agreed], swarm_samples) if keys else (),
        statistics.median(answer.version for answer in agreed),
        swarm_samples,
        2 * sum(answer.finished for answer in agreed) > len(agreed),
    )  # fmt: skip


def medians(stated: list[tuple[tuple[str, float], ...]], samples: int) -> tuple[tuple[str, float], ...]:
    """Of each scalar that most donors state, the lower median of what can be one; at most the ``samples`` behind the
    run. A step takes a sample at least, and what an optimizer keeps beside its count of steps is at most 1 (a rate, a
    product of rates): more was never counted, and of too few steps the next ones are only smaller."""
    values: dict[str, list[float]] = {}
    for scalars in stated:
        for name, value in dict(scalars).items():
            if math.isfinite(value) and 0 <= value <= LARGEST_SCALAR:
                values.setdefault(name, []).append(value)
    most = float(max(samples, 1))
    agreed = {name: statistics.median_low(found) for name, found in values.items() if 2 * len(found) > len(stated)}
    return tuple((name, min(value, most)) for name, value in agreed.items())
