"""What follows from a Config's keys."""

from __future__ import annotations

from dataclasses import dataclass

from gossip.codecs import AUTO, CODECS, COMPILED, Taken, interval
from gossip.config.filters import AUTO_FILTER, FILTERS
from gossip.config.keys import MOST_PARTNERS, Keys
from gossip.config.mixings import MIXINGS

__all__ = ["NOMINAL_STEPS", "PLAIN", "Derived"]

NOMINAL_STEPS = 8  # local steps in an interval, as versions count, where each node chooses its own
SAMPLE = 1 << 16  # elements, of which bytes are counted
PLAIN = (0.0, 1.0)  # momentum and rate of an outer step that is none


@dataclass(frozen=True, slots=True, kw_only=True)
class Derived(Keys):
    """The keys, and what is decided by several of them."""

    @property
    def outer(self) -> tuple[float, float]:
        """Momentum and rate of the outer step in use; left open it is the plain mean."""
        momentum, rate = self.outer_momentum, self.outer_rate
        return PLAIN[0] if momentum is None else momentum, PLAIN[1] if rate is None else rate

    @property
    def plain(self) -> bool:
        """Whether a mix is the plain mean, without outer momentum."""
        return self.outer == PLAIN

    @property
    def kappa(self) -> float:
        """The share of a mix's displacement that the correction takes up; left open there is no correction."""
        return self.correction or 0.0

    @property
    def chooses(self) -> bool:
        """Whether each node chooses its own interval."""
        return self.mix_every_steps == AUTO

    @property
    def interval_steps(self) -> int | None:
        """Local steps in an interval, as versions count them, which nodes of a swarm must do alike; None by the clock
        alone."""
        return NOMINAL_STEPS if isinstance(self.mix_every_steps, str) else self.mix_every_steps

    @property
    def first_interval(self) -> int | None:
        """Local steps between two mixes, before a node has measured anything: what its codec's bytes allow."""
        if not self.chooses:
            return self.interval_steps
        codec = CODECS["int8" if self.codec == AUTO else self.codec]
        return interval(0.0, Taken(SAMPLE, codec.name, codec.encoded_bytes(SAMPLE), 0.0), COMPILED, self.mixing_share)

    @property
    def averaged(self) -> int:
        """How many vectors a mix averages, as the stability of the outer step asks."""
        return (self.group_size or MOST_PARTNERS) if self.grouped else 2

    @property
    def incoming_limit(self) -> int:
        """Incoming exchanges at once: none beside another with an outer step of parts or groups, or one that a loop
        waits for."""
        return self.incoming_exchanges if self.plain or self.overlaps else 1

    @property
    def overlaps(self) -> bool:
        """Whether mixes with an outer step may overlap: pairs of the whole vector, for which no training loop waits."""
        alone = self.paired and self.partners == 1 and self.part == "all"
        return alone and not self.plain and self.max_version_gap is None

    @property
    def watches_movement(self) -> bool:
        """Whether a driver measures how far local steps alone move the model (gossip.schedule)."""
        return self.consensus_target is not None or (FILTERS[self.filtering].follows and self.clip_radius is None)

    @property
    def pushes(self) -> bool:
        """Whether vectors travel one way."""
        return MIXINGS[self.mixing].one_way

    @property
    def conserves(self) -> bool:
        """Whether what one gives away is taken from oneself."""
        return MIXINGS[self.mixing].conserves

    @property
    def grouped(self) -> bool:
        """Whether more than two average at once."""
        return MIXINGS[self.mixing].group

    @property
    def paired(self) -> bool:
        """Whether two average, each with the other."""
        return not (self.pushes or self.grouped)

    @property
    def filtering(self) -> str:
        """The filter in use: what "auto" comes to is to clip, but for push-sum, whose mass nobody may cut off, and for
        groups, whose mean a partner alone says nothing of."""
        if self.filter != "auto":
            return self.filter
        return next(name for name in AUTO_FILTER if FILTERS[name].fits(self.grouped, self.conserves))
