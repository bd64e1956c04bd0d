"""Schedules whose mixes overlap, and the invariant of mixes that do (docs/decisions/0095).

Few configurations drawn at random have an outer step, few partners for it, and answers as slow as streams. A share of
the seeds therefore gets all three. Their draws come from a generator of their own, so every other seed stays as it was.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

from gossip.exchange.session import State

if TYPE_CHECKING:
    from tests.simulation.host import Host
    from tests.simulation.world import World

SHARE = 0.2  # share of the seeds


class Overlaps:
    """The draws of one seed; ``wanted`` is True if its mixes are to overlap."""

    def __init__(self, seed: int, wanted: bool = True) -> None:
        self.rng = random.Random(f"overlaps {seed}")
        self.wanted = self.rng.random() < SHARE and wanted

    def settings(self, drawn: dict[str, Any]) -> dict[str, Any]:
        """Return the drawn settings, as pairs of the whole vector with an outer step that mix at every step."""
        if not self.wanted:
            return drawn
        kept = {key: value for key, value in drawn.items() if key not in UNLIKE}
        return kept | {
            "mixing": "pair", "outer_momentum": 0.5, "outer_rate": 0.7, "mix_every_steps": 1,
            "incoming_exchanges": self.rng.choice([1, 2, 2, 3]), "filter": self.rng.choice(["none", "none", "clip"]),
        }  # fmt: skip

    def count(self, drawn: int) -> int:
        """Return how many peers begin: each of three mixes at once is with another partner."""
        return max(drawn, self.rng.choice([4, 4, 5, 6])) if self.wanted else drawn

    def calm_s(self, drawn: float) -> float:
        """Return how long there are no faults at first. Four mixes must show how long answers take."""
        return drawn + self.rng.choice([2.0, 4.0, 6.0]) if self.wanted else drawn

    def every_s(self, drawn: float) -> float:
        """Return the seconds between two faults, so few that some mixes finish."""
        return max(drawn, 0.3) if self.wanted else drawn

    def step_s(self, drawn: float) -> float:
        """Return the seconds of a step: several pass during an exchange."""
        return min(drawn, 0.06) if self.wanted else drawn

    def latency_s(self, drawn: float) -> float:
        return self.rng.choice([0.02, 0.05, 0.1, 0.15]) if self.wanted else drawn


# Settings that rule overlaps out, or that settings() replaces.
UNLIKE = frozenset({
    "mixing", "mix_every_s", "filter", "max_version_gap", "part", "codec", "group_size", "partners", "selection"
})  # fmt: skip


def check_overlaps(world: World, host: Host) -> int:
    """Return how many mixes of one host stream at once, as one more begins, if its mixes may overlap."""
    exchanges = host.peer.exchanges
    if not exchanges.is_overlapping or host.liar:
        return 0
    streaming = [one.partner for one in exchanges.table.values() if one.state in STREAMS and not one.is_backgrounded]
    count, most = len(streaming), 1 + host.peer.partners.max_incoming()
    if count > most:
        world.fail("so many exchanges at a time, and one next", f"{host!r}: {count} overlap, and {most} may")
    if len(set(streaming)) < count:
        world.fail("overlapping mixes have different partners", f"{host!r}: {count} with {len(set(streaming))}")
    return count


STREAMS = (State.STREAMING, State.VERIFIED)
