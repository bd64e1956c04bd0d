"""The question to witnesses: if donors differ, members that gave nothing are asked for the same chunks.

A *witness* is a member of the run that gave no piece of this transfer. Its chunk is near to that of an honest donor. If
there are fewer witnesses than donors, donors that lie together could outvote them. The question therefore waits for
more members to be contacted, as long as some are known that are not, but not for ever. In a small swarm all members
are donors, and models of members that train differ in ordinary use.
"""

from __future__ import annotations

from gossip.effects import Effect
from gossip.ids import PeerId
from gossip.state_transfer.comparing import CHUNKS_PER_WITNESS, Comparison, any_differ
from gossip.state_transfer.donor_check import DonorCheck

__all__ = ["MAX_WITNESS_WAITS", "WITNESS_WAIT_S", "Witnesses"]

# One wait lasts as long as the members that the seeds know need to be contacted. It is repeated for more witnesses.
WITNESS_WAIT_S, MAX_WITNESS_WAITS = 2.0, 5


class Witnesses:
    """The witnesses of one transfer, whose chunks ``check`` compares with those of the donors."""

    def __init__(self, check: DonorCheck) -> None:
        self.check = check
        self.wait_count = 0  # Waits for witnesses that have begun; 0 while the question does not wait.

    @property
    def are_needed(self) -> bool:
        """Return True if donors differ, and no witness was asked yet."""
        return not self.check.has_witnesses and any(any_differ(results) for results in self.check.results_by_kind())

    @property
    def are_awaited(self) -> bool:
        return self.wait_count > 0

    def wait(self, now: float) -> float:
        """Wait for more witnesses. Return the time at which to count them again."""
        self.wait_count += 1
        return now + WITNESS_WAIT_S

    def are_enough(self, witness_count: int, donor_count: int) -> bool:
        """Return True if the question need not wait any more."""
        return witness_count >= donor_count or self.wait_count >= MAX_WITNESS_WAITS

    def stop_waiting(self) -> None:
        self.wait_count = 0

    def ask(self, witnesses: list[PeerId], now: float) -> list[Effect]:
        """Ask these witnesses for chunks of the donors that differ. Return nothing if there are no witnesses."""
        effects: list[Effect] = []
        for results in self.check.results_by_kind():
            if any_differ(results):
                effects += self.request_chunks(results, witnesses, now)
        self.check.has_witnesses = bool(effects)
        return effects

    def request_chunks(self, results: list[Comparison], witnesses: list[PeerId], now: float) -> list[Effect]:
        """Request two of the chunks that these comparisons were about from each witness."""
        chunk_of = {comparison.owner: (comparison.start, comparison.stop) for comparison in results}
        chunks = list(chunk_of.items())
        effects: list[Effect] = []
        for place, witness in enumerate(witness for witness in witnesses for _ in range(CHUNKS_PER_WITNESS)):
            owner, (start, stop) = chunks[place % len(chunks)]
            effects += self.check.request(owner, witness, start, stop, now)
        return effects
