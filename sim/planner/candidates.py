"""The candidate settings of a plan: how often, how coarsely, how much at once, and with which partners to mix.

A plan simulates each candidate on given links and recommends one (:mod:`sim.planner.study`).
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from gossip.codecs import AUTO
from gossip.config import Config
from gossip.config.setting import settings_of
from gossip.errors import ConfigError
from sim.scenario.scenario import Scenario, value_of

GIVEN = "as given"  # The name of the candidate with the settings of the user's file, unchanged.
MAX_CANDIDATES = 12  # The settings of the file and eleven others.
CODECS = ("fp32", "bf16", "int8", "int4")
MAX_STEPS = 128  # The most steps that an exchange is assumed to last: beyond it all mix as often as they can.


@dataclass(frozen=True, slots=True)
class Candidate:
    """A candidate. ``changes`` are keys of ``[gossip]`` on top of the file's; with a preset, all its keys."""

    name: str
    changes: Mapping[str, Any]


def candidates(
    scenario: Scenario, steps_of: Callable[[str], float], base_settings: Mapping[str, Any] | None = None
) -> list[Candidate]:
    """Return the file's settings, and up to eleven others around the pace that these links allow.

    No pair can mix more often than an exchange takes, and mixing much more rarely leaves the links idle.

    Args:
        scenario: The scenario to play.
        steps_of: Returns the local steps that pass while two whole vectors are exchanged with a codec.
        base_settings: The base of all candidates but the first: a preset and the file's keys. Without it they change
            the file's keys.
    """
    intervals = {codec: intervals_around(steps_of(codec)) for codec in CODECS}
    # By codec, three numbers of steps between mixes: an exchange takes twice, half and an eighth of them.
    often, middle, rarely = ({codec: steps[place] for codec, steps in intervals.items()} for place in range(3))
    variations = [
        Candidate("auto", {"codec": AUTO, "mix_every_steps": AUTO}),
        mixing_every("int8", middle), mixing_every("int8", often), mixing_every("fp32", middle),
        mixing_every("int4", middle), mixing_every("int4", often), mixing_every("int8", rarely),
        mixing_every("int8", middle, "groups of 4", mixing="group", selection="grid", group_size=4),
        mixing_every("int8", middle, "plain means", outer_momentum=0.0, outer_rate=1.0),
        mixing_every("int8", often, "by quarters", part="fragments 4"),
        mixing_every("bf16", middle), mixing_every("fp32", often), mixing_every("fp32", rarely),
        mixing_every("int4", rarely), mixing_every("bf16", often),
    ]  # fmt: skip
    chosen, configs = [Candidate(GIVEN, {})], [scenario.config]
    for variation in variations:
        candidate = Candidate(variation.name, {**(base_settings or {}), **variation.changes})
        try:
            config = with_candidate(scenario, candidate).config
        except ConfigError:  # It does not go with the file's settings.
            continue
        if config not in configs and len(chosen) < MAX_CANDIDATES:
            chosen.append(candidate)
            configs.append(config)
    return chosen


def intervals_around(steps: float) -> tuple[int, int, int]:
    """Return three intervals between mixes, in steps: half of what an exchange takes, twice and eight times that."""
    pace = 2 ** round(math.log2(min(max(steps, 1.0), MAX_STEPS)))
    return max(1, pace // 2), 2 * pace, 8 * pace


def mixing_every(codec: str, steps_of_codec: Mapping[str, int], method: str = "", **changes: Any) -> Candidate:
    """Return a candidate with this codec that mixes at the codec's interval."""
    steps = steps_of_codec[codec]
    name = f"{codec} every {steps}" + (f", {method}" if method else "")
    return Candidate(name, {"codec": codec, "mix_every_steps": steps} | changes)


def with_candidate(scenario: Scenario, candidate: Candidate) -> Scenario:
    """Return the scenario with a candidate's settings. Raises :class:`ConfigError`."""
    if "preset" in candidate.changes:
        return scenario.replace(gossip=dict(candidate.changes))
    return scenario.replace(**{f"gossip.{key}": value for key, value in candidate.changes.items()})


def parse(text: str, base: Mapping[str, Any] = MappingProxyType({})) -> Candidate:
    """Return the candidate in a text like ``"mix_every_steps=4 codec=int8"``, on top of the settings of all others.

    Raises :class:`ConfigError`.
    """
    known, changes = settings_of(Config), dict[str, Any]()
    for word in text.split():
        key, equals, value = word.partition("=")
        key = key.removeprefix("gossip.")
        if not equals or key not in known:
            raise ConfigError(
                f"--try {text!r} cannot be read: write keys of [gossip], as 'mix_every_steps=4 codec=int8'."
            )
        changes[key] = value_of(value)
    if not changes:
        raise ConfigError("--try names nothing to try: write keys of [gossip], as 'mix_every_steps=4 codec=int8'.")
    return Candidate(text, {**base, **changes})
