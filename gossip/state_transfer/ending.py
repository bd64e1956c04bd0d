"""Whether the run that we hold has reached its end: said by ourselves, by most of its members, or by those who gave us
its weights. One member's word ends nothing for those who train."""

from __future__ import annotations

from gossip.effects import Effect, Notice
from gossip.exchange.session import Local
from gossip.ids import PeerId
from gossip.membership.members import Members

__all__ = ["Ending"]


class Ending:
    """``before``: the run that this node had finished in an earlier life."""

    def __init__(self, local: Local, membership: Members, before: bytes = b"") -> None:
        self.local, self.membership, self.before = local, membership, before
        self.genesis = b""  # of the run that the voters speak of
        self.voters: set[PeerId] = set()  # as many as members at most: who said so and left has said so all the same

    def finish(self, now: float) -> None:
        self.local.finished = True
        self.membership.update_me(now, finished=True)

    def tick(self, now: float) -> list[Effect]:
        """Call it every second or so. Walks the members of the run."""
        local = self.local
        if local.finished or not local.ready:
            return []
        if self.genesis != local.genesis:
            self.genesis, self.voters = local.genesis, set()
        sharing = self.membership.sharing(local.genesis)
        for record in sharing:
            (self.voters.add if record.finished else self.voters.discard)(record.id)
        members = len(self.voters.union(record.id for record in sharing)) + 1
        if 2 * len(self.voters) <= members:
            return []
        self.finish(now)
        text = f"{len(self.voters)} of the {members} members hold this run to be finished, so it is."
        return [Notice("finished", text)]

    def began(self, now: float) -> list[Effect]:
        """We began alone, with weights of our own."""
        if not self.before:
            return []
        self.finish(now)
        return [
            Notice("finished", "The run of this node's state directory is finished: nothing is trained again alone.")
        ]

    def taken(self, finished: bool, now: float) -> list[Effect]:
        """We took a run's weights; ``finished``: from donors most of whom said that it is."""
        if not finished:
            return []
        self.finish(now)
        return [Notice("finished", "This run is finished: these are its weights, and nothing is left to train.")]
