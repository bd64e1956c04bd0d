"""The result of a newcomer's survey: majorities and medians of the answers, so that no single donor decides."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from gossip.ids import PeerId
from gossip.wire.messages import Serving

__all__ = ["Agreed", "agree"]

LARGEST_SCALAR = 2.0**53  # bound of an optimizer state's scalars: no step count is larger
AHEAD = 16.0  # Rounds that a donor's version may exceed twice the median by. A young run has only small versions.


@dataclass(frozen=True, slots=True)
class Agreed:
    """The state to fetch, and its donors."""

    donors: tuple[PeerId, ...]
    keys: tuple[str, ...]  # keys of the optimizer's state; empty for the weights alone
    scalars: tuple[tuple[str, float], ...]
    version: float
    swarm_samples: int  # samples behind the run
    finished: bool
    frozen_hash: bytes  # of the frozen weights of all these donors; empty if they differ, or one states none


def agree(answers: Mapping[PeerId, Serving], ours: tuple[str, ...], stateful: bool) -> Agreed:
    """Return the state that most of the donors agree on.

    Args:
        answers: At least one answer, all of one run.
        ours: Our own optimizer's keys, which break a tie.
        stateful: True if we have an optimizer whose state could be replaced.
    """
    keys: tuple[str, ...] = ()
    if stateful:
        votes = Counter(answer.optimizer_keys for answer in answers.values())
        versions = {kind: max(a.version for a in answers.values() if a.optimizer_keys == kind) for kind in votes}
        keys = max(votes, key=lambda kind: (votes[kind], kind == ours, versions[kind]))
    same = {peer: answer for peer, answer in answers.items() if not stateful or answer.optimizer_keys == keys}
    usual = statistics.median_low(answer.version for answer in same.values())
    donors = {peer: answer for peer, answer in same.items() if answer.version <= 2 * usual + AHEAD}
    agreed = donors.values()
    # The lower median: of two donors, the one that states less is believed.
    swarm_samples = statistics.median_low(answer.swarm_samples for answer in agreed)
    # All, not most of them: if one differs, the frozen weights are fetched, and comparisons and witnesses decide.
    hashes = {answer.frozen_hash for answer in agreed}
    return Agreed(
        tuple(donors), keys, medians([answer.optimizer_scalars for answer in agreed], swarm_samples) if keys else (),
        statistics.median(answer.version for answer in agreed),
        swarm_samples,
        2 * sum(answer.finished for answer in agreed) > len(agreed),
        hashes.pop() if len(hashes) == 1 else b"",
    )  # fmt: skip


def medians(stated: list[tuple[tuple[str, float], ...]], samples: int) -> tuple[tuple[str, float], ...]:
    """Return the lower median of each scalar that most donors state, capped by ``samples``.

    A step takes at least one sample, and an optimizer's other scalars (rates and their products) are at most 1. So a
    larger value is false. A value that is too small only makes the next steps smaller.
    """
    values: dict[str, list[float]] = {}
    for scalars in stated:
        for name, value in dict(scalars).items():
            if math.isfinite(value) and 0 <= value <= LARGEST_SCALAR:
                values.setdefault(name, []).append(value)
    most = float(max(samples, 1))
    agreed = {name: statistics.median_low(found) for name, found in values.items() if 2 * len(found) > len(stated)}
    return tuple((name, min(value, most)) for name, value in agreed.items())
