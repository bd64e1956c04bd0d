"""Whether the run that we hold has reached its end: said by ourselves, by most of its members, or by those who gave us
its weights.

A member's word counts once an exchange with it is finished here: until then it has shown nothing but a signature. All
others that are known to hold the run count as training, those that we only heard of and could dial among them, so that
a newcomer that has met few is not outvoted by these few. The word of a member that left counts on, since a node that
finishes exits, until another member comes and takes its place: identities that come one after another have one vote.

Somebody with several identities, each of which finishes an exchange with us, has as many votes as it has identities
here at one time. They end our run when they are more than all other members that we know of, ourselves included.
"""

from __future__ import annotations

from collections.abc import Iterable

from gossip.effects import Effect, MemberState, Notice
from gossip.exchange.session import Local
from gossip.ids import PeerId
from gossip.membership.members import Members
from gossip.recent import Recent

__all__ = ["Ending"]

PARTNERS = 10_000  # remembered: as many as a swarm has members at most


class Ending:
    """The votes of a run's members.

    Attributes:
        before: The run that this node had finished in an earlier life.
        genesis: The run that the votes are about.
        partners: The members that finished an exchange with us in this run.
        voters: The members that said that the run is finished, in the order in which they did. Some have left since.
        present: The members that shared our run at the last look.
    """

    def __init__(self, local: Local, membership: Members, before: bytes = b"") -> None:
        self.local, self.membership, self.before = local, membership, before
        self.genesis = b""
        self.partners = Recent[PeerId, None](PARTNERS)
        self.voters: dict[PeerId, None] = {}
        self.present: set[PeerId] = set()

    def finish(self, now: float) -> None:
        self.local.finished = True
        self.membership.update_me(now, finished=True)

    def mixed(self, partners: Iterable[PeerId]) -> None:
        """Note that exchanges with these members are finished."""
        self._follow()
        for partner in partners:
            self.partners[partner] = None

    def tick(self, now: float) -> list[Effect]:
        """Count the votes; call it every second or so. Walks the table of members."""
        local = self.local
        if local.finished or not local.ready:
            return []
        self._follow()
        sharing = self.membership.sharing(local.genesis)
        present = {record.id for record in sharing}
        newcomers = len(present - self.present - self.voters.keys())
        left = [voter for voter in self.voters if voter not in present]
        for voter in left[:newcomers]:
            del self.voters[voter]
        self.present = present
        for record in sharing:
            if record.finished and record.id in self.partners:
                self.voters[record.id] = None
            else:
                self.voters.pop(record.id, None)
        votes, members = len(self.voters), len(self.voters.keys() | present) + self._unmet(present) + 1
        if 2 * votes <= members:
            return []
        self.finish(now)
        text = f"{votes} of the {members} members hold this run to be finished, so it is."
        return [Notice("finished", text)]

    def _follow(self) -> None:
        """Begin anew when our run is another."""
        if self.genesis != self.local.genesis:
            self.genesis, self.present = self.local.genesis, set()
            self.voters.clear()
            self.partners.clear()

    def _unmet(self, present: set[PeerId]) -> int:
        """Count the members of our run that we only heard of and could meet."""
        return sum(
            state is MemberState.ALIVE and record.ready and record.genesis == self.genesis
            and record.address is not None and record.id not in present
            for record, state in self.membership.members()
        )  # fmt: skip

    def began(self, now: float) -> list[Effect]:
        """We began alone, with weights of our own."""
        if not self.before:
            return []
        self.finish(now)
        return [
            Notice("finished", "The run of this node's state directory is finished: nothing is trained again alone.")
        ]

    def taken(self, finished: bool, now: float) -> list[Effect]:
        """We took a run's weights.

        Args:
            finished: Most of the donors said that the run is finished. They may have been few: members that we met
                since then, most of which still train, outweigh them.
            now: The time.
        """
        sharing = self.membership.sharing(self.local.genesis)
        if not finished or 2 * sum(not record.finished for record in sharing) > len(sharing):
            return []
        self.finish(now)
        return [Notice("finished", "This run is finished: these are its weights, and nothing is left to train.")]
