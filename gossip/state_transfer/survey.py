"""The result of a newcomer's survey: majorities and medians of the answers, so that no single donor decides."""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median_low

from gossip.ids import PeerId
from gossip.wire.messages import Serving

MAX_SCALAR = 2.0**53  # Bound of an optimizer state's scalars: no step count is larger.


@dataclass(frozen=True, slots=True)
class Agreed:
    """The state to fetch, and its donors."""

    donors: tuple[PeerId, ...]
    keys: tuple[str, ...]  # Keys of the optimizer's state; empty for the weights alone.
    scalars: tuple[tuple[str, float], ...]  # Single numbers of the optimizer's state, by name.
    version: float
    swarm_samples: int  # Samples behind the run.
    finished: bool
    frozen_hash: bytes  # Hash of the frozen weights of all these donors; empty if they differ, or one states none.


def agree(answers: Mapping[PeerId, Serving], own_keys: tuple[str, ...], has_optimizer: bool) -> Agreed:
    """Return the state that most of the donors agree on.

    Args:
        answers: At least one answer, all of one run.
        own_keys: Our own optimizer's keys, which break a tie.
        has_optimizer: True if we have an optimizer whose state could be replaced.
    """
    keys: tuple[str, ...] = ()
    with_keys = dict(answers)  # The answers of the donors with these keys.
    if has_optimizer:
        votes = Counter(answer.optimizer_keys for answer in answers.values())
        newest: dict[tuple[str, ...], float] = {}  # The largest version of the donors with these keys.
        for answer in answers.values():
            newest[answer.optimizer_keys] = max(answer.version, newest.get(answer.optimizer_keys, -math.inf))
        keys = max(votes, key=lambda voted: (votes[voted], voted == own_keys, newest[voted]))
        if len(answers) > 2 and 2 * votes[keys] <= len(answers):
            keys = ()  # As many liars as honest donors could leave none of these: take the weights alone, from all.
        else:
            with_keys = {peer: answer for peer, answer in answers.items() if answer.optimizer_keys == keys}
    agreed = with_keys.values()
    # The lower median: of two donors, the one that states less is believed.
    swarm_samples = median_low(answer.swarm_samples for answer in agreed)
    # All, not most of them: if one differs, the frozen weights are fetched, and comparisons and witnesses decide.
    hashes = {answer.frozen_hash for answer in agreed}
    return Agreed(
        donors=tuple(with_keys),
        keys=keys,
        scalars=median_scalars([answer.optimizer_scalars for answer in agreed], swarm_samples) if keys else (),
        version=median_low(answer.version for answer in agreed),
        swarm_samples=swarm_samples,
        finished=2 * sum(answer.finished for answer in agreed) > len(agreed),
        frozen_hash=hashes.pop() if len(hashes) == 1 else b"",
    )


def median_scalars(stated: list[tuple[tuple[str, float], ...]], samples: int) -> tuple[tuple[str, float], ...]:
    """Return the lower median of each scalar that most donors state, capped by ``samples``.

    A step takes at least one sample, and an optimizer's other scalars (rates and their products) are at most 1. So a
    larger value is false. A value that is too small only makes the next steps smaller.
    """
    values: dict[str, list[float]] = {}
    for scalars in stated:
        for name, value in dict(scalars).items():
            if math.isfinite(value) and 0 <= value <= MAX_SCALAR:
                values.setdefault(name, []).append(value)
    limit = float(max(samples, 1))
    agreed = {name: median_low(of_name) for name, of_name in values.items() if 2 * len(of_name) > len(stated)}
    return tuple((name, min(value, limit)) for name, value in agreed.items())
