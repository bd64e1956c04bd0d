"""Properties that follow from a Config's keys."""

from __future__ import annotations

from dataclasses import dataclass

from gossip.codecs import AUTO, CODECS, COMPILED, Taken, interval
from gossip.config.filters import AUTO_FILTER, FILTERS
from gossip.config.keys import MOST_PARTNERS, Keys
from gossip.config.mixings import MIXINGS

__all__ = ["NOMINAL_STEPS", "PLAIN", "Derived"]

NOMINAL_STEPS = 8  # Local steps in an interval, as versions count, if each node chooses its own.
SAMPLE = 1 << 16  # Elements whose encoded bytes are counted.
PLAIN = (0.0, 1.0)  # Momentum and rate without an outer step.


@dataclass(frozen=True, slots=True, kw_only=True)
class Derived(Keys):
    """The keys, and properties that depend on several of them."""

    @property
    def outer(self) -> tuple[float, float]:
        """Return momentum and rate of the outer step; if left open, the plain mean."""
        momentum, rate = self.outer_momentum, self.outer_rate
        return PLAIN[0] if momentum is None else momentum, PLAIN[1] if rate is None else rate

    @property
    def plain(self) -> bool:
        """Return True if a mix is the plain mean, without outer momentum."""
        return self.outer == PLAIN

    @property
    def kappa(self) -> float:
        """Return the share of a mix's displacement that the correction takes up; if left open, 0."""
        return self.correction or 0.0

    @property
    def chooses(self) -> bool:
        """Return True if each node chooses its own interval."""
        return self.mix_every_steps == AUTO

    @property
    def interval_steps(self) -> int | None:
        """Return the local steps in an interval as versions count them; None with a clock alone.

        All nodes of a swarm must have the same number.
        """
        return NOMINAL_STEPS if isinstance(self.mix_every_steps, str) else self.mix_every_steps

    @property
    def first_interval(self) -> int | None:
        """Return the local steps between two mixes before any measurement, which the codec's bytes allow."""
        if not self.chooses:
            return self.interval_steps
        codec = CODECS["int8" if self.codec == AUTO else self.codec]
        return interval(0.0, Taken(SAMPLE, codec.name, codec.encoded_bytes(SAMPLE), 0.0), COMPILED, self.mixing_share)

    @property
    def averaged(self) -> int:
        """Return the number of vectors that a mix averages, for the outer step's stability."""
        return (self.group_size or MOST_PARTNERS) if self.grouped else 2

    @property
    def incoming_limit(self) -> int:
        """Return the limit of concurrent incoming exchanges.

        With an outer step it is 1 for parts and groups, and if the loop waits for mixes.
        """
        return self.incoming_exchanges if self.plain or self.overlaps else 1

    @property
    def overlaps(self) -> bool:
        """Return True if mixes with an outer step may overlap.

        That holds for pairs of the whole vector, if no training loop waits for them.
        """
        alone = self.paired and self.partners == 1 and self.part == "all"
        return alone and not self.plain and self.max_version_gap is None

    @property
    def watches_movement(self) -> bool:
        """Return True if a driver measures how far local steps alone move the model (gossip.schedule)."""
        return self.consensus_target is not None or (FILTERS[self.filtering].follows and self.clip_radius is None)

    @property
    def pushes(self) -> bool:
        """Return True if vectors are pushed one way."""
        return MIXINGS[self.mixing].one_way

    @property
    def conserves(self) -> bool:
        """Return True if a node loses the mass that it gives away."""
        return MIXINGS[self.mixing].conserves

    @property
    def grouped(self) -> bool:
        """Return True if more than two members average at once."""
        return MIXINGS[self.mixing].group

    @property
    def paired(self) -> bool:
        """Return True if two members average with each other."""
        return not (self.pushes or self.grouped)

    @property
    def filtering(self) -> str:
        """Return the filter in use.

        "auto" means "clip", except for push-sum, whose mass must not be cut off, and for groups, whose mean depends on
        more than one partner.
        """
        if self.filter != "auto":
            return self.filter
        return next(name for name in AUTO_FILTER if FILTERS[name].fits(self.grouped, self.conserves))
