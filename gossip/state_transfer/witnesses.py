"""The question to witnesses: if donors differ, members that gave nothing are asked for the same chunks.

A *witness* is a member of the run that gave no piece of this transfer. Its chunk is near to that of an honest donor. If
there are fewer witnesses than donors, donors that lie together could outvote them. The question therefore waits for
more members to be contacted, as long as some are known that are not, but not for ever. In a small swarm all members
are donors, and models of members that train differ in ordinary use.
"""

from gossip.effects import Effect
from gossip.ids import PeerId
from gossip.state_transfer.comparing import CHUNKS_PER_WITNESS, any_differ
from gossip.state_transfer.donor_check import DonorCheck

LOOKOUTS = 2  # Witnesses that are always asked.
# One wait lasts as long as the members that the seeds know need to be contacted. It is repeated for more witnesses, but
# members that a liar has made up, and that nobody can contact, must not keep a newcomer for ten seconds.
WITNESS_WAIT_S, MAX_WITNESS_WAITS = 2.0, 4


class Witnesses:
    """The witnesses of one transfer, whose chunks ``check`` compares with those of the donors."""

    def __init__(self, check: DonorCheck) -> None:
        self.check = check
        self.wait_count = 0  # Waits for witnesses that have begun; 0 while the question does not wait.
        self.unasked: dict[PeerId, list[tuple[PeerId, int, int]]] = {}  # The chunks still to ask each witness for.

    @property
    def are_needed(self) -> bool:
        """Return True if donors differ, and not all witnesses were asked yet."""
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

    def reset(self) -> None:
        """Start again for another transfer."""
        self.wait_count, self.unasked = 0, {}

    def stop_waiting(self) -> None:
        self.wait_count = 0

    def look_out(self, others: list[PeerId], now: float) -> list[Effect]:
        """Ask the first two of these members, which gave nothing, for the chunks that the donors are compared by.

        Otherwise donors that lie each in its own way would all be equally far from each other, and none would be far.
        """
        chunks = {(each.owner, each.start): each.stop for each in self.check.comparisons.values()}
        return self.request([(owner, start, stop) for (owner, start), stop in chunks.items()], others[:LOOKOUTS], now)

    def ask(self, witnesses: list[PeerId], now: float) -> list[Effect]:
        """Ask these witnesses for chunks of the donors that differ. Return nothing if all were asked already."""
        chunks = [
            chunk for results in self.check.results_by_kind() if any_differ(results)
            for chunk in {each.owner: (each.owner, each.start, each.stop) for each in results}.values()
        ]  # fmt: skip
        effects = self.request(chunks, [peer for peer in witnesses if peer not in self.unasked], now)
        self.check.has_witnesses = bool(self.unasked)
        return effects

    def request(self, chunks: list[tuple[PeerId, int, int]], witnesses: list[PeerId], now: float) -> list[Effect]:
        """Ask each witness for all these chunks, some at a time, so that it has a vote on every donor."""
        self.unasked |= {witness: list(chunks) for witness in witnesses if chunks}
        return [effect for witness in witnesses for effect in self.ask_more(witness, CHUNKS_PER_WITNESS, now)]

    def ask_more(self, witness: PeerId, count: int, now: float) -> list[Effect]:
        """Ask this witness for so many further chunks, if there are any."""
        if witness not in self.unasked:
            return []
        asked, self.unasked[witness] = self.unasked[witness][:count], self.unasked[witness][count:]
        return [
            effect for owner, start, stop in asked for effect in self.check.request(owner, witness, start, stop, now)
        ]
