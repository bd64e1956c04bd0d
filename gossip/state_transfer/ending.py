"""The vote on the end of a run, and the other ways to learn of it: our own decision and the donors.

A member's vote counts once an exchange with it is finished here: until then it has shown only a signature. All other
known members of the run count as training, including dialable ones that we only heard of. So a newcomer with few
contacts is not outvoted by these few. A node that finishes exits. Its vote therefore counts on until a new member takes
its place: identities that come one after another have one vote.

A Sybil, which is one attacker with many identities, has a vote for each of them that has finished an exchange and is
present. They end our run if they are more than half of all members that we know of, ourselves included.
"""

from collections.abc import Iterable

from gossip.effects import Effect, MemberState, Notice
from gossip.exchange.session import Local
from gossip.ids import PeerId
from gossip.membership.members import Members
from gossip.recent import Recent

MAX_PARTNERS = 10_000  # Partners to remember: as many as a swarm can have.


class Ending:
    """The votes of a run's members.

    Attributes:
        finished_run_id: The run that this node had finished in an earlier life.
        run_id: The run that the votes are about.
        partners: The members that finished an exchange with us in this run.
        voters: The members that said that the run is finished, in the order in which they did. Some have left since.
        present: The members of our run at the last count.
    """

    def __init__(self, local: Local, membership: Members, finished_run_id: bytes = b"") -> None:
        self.local, self.membership, self.finished_run_id = local, membership, finished_run_id
        self.run_id = b""
        self.partners = Recent[PeerId, None](MAX_PARTNERS)
        self.voters: dict[PeerId, None] = {}
        self.present: set[PeerId] = set()

    def finish(self, now: float) -> None:
        """Note that the run is finished, and tell the others."""
        self.local.finished = True
        self.membership.update_me(now, finished=True)

    def note_partners(self, partners: Iterable[PeerId]) -> None:
        """Note that exchanges with these members are finished."""
        self.follow_run()
        for partner in partners:
            self.partners[partner] = None

    def count_votes(self, now: float) -> list[Effect]:
        """Count the votes; call it every second or so. Walks the table of members."""
        local = self.local
        if local.finished or not local.ready:
            return []
        self.follow_run()
        records = self.membership.run_members(local.run_id)
        present = {record.id for record in records}
        # New members take the places of voters that have gone: identities one after another have one vote.
        newcomer_count = len(present - self.present - self.voters.keys())
        gone_voters = [voter for voter in self.voters if voter not in present]
        for voter in gone_voters[:newcomer_count]:
            del self.voters[voter]
        self.present = present
        for record in records:
            if record.finished and record.id in self.partners:
                self.voters[record.id] = None
            else:
                self.voters.pop(record.id, None)
        vote_count = len(self.voters)
        member_count = len(self.voters.keys() | present) + self.stranger_count(present) + 1  # Ourselves.
        if 2 * vote_count <= member_count:
            return []
        self.finish(now)
        text = f"{vote_count} of the {member_count} members hold this run to be finished, so it is."
        return [Notice("finished", text)]

    def stranger_count(self, present: set[PeerId]) -> int:
        """Return the number of members of our run that we only heard of and could dial."""
        return sum(
            state is MemberState.ALIVE and record.ready and record.run_id == self.run_id
            and record.address is not None and record.id not in present
            for record, state in self.membership.members()
        )  # fmt: skip

    def follow_run(self) -> None:
        """Start again if our run has changed."""
        if self.run_id != self.local.run_id:
            self.run_id, self.present = self.local.run_id, set()
            self.voters.clear()
            self.partners.clear()

    def on_begun(self, now: float) -> list[Effect]:
        """Handle a start with our own weights: finish at once if this node finished its run in an earlier life."""
        if not self.finished_run_id:
            return []
        self.finish(now)
        text = "The run of this node's state directory is finished: nothing is trained again alone."
        return [Notice("finished", text)]

    def on_adopted(self, is_finished: bool, now: float) -> list[Effect]:
        """Handle the adoption of a run's weights.

        Args:
            is_finished: True if most of the donors said that the run is finished. Donors may be few. They are
                outweighed if most of the contacted members still train.
            now: The current time.
        """
        records = self.membership.run_members(self.local.run_id)
        if not is_finished or 2 * sum(not record.finished for record in records) > len(records):
            return []
        self.finish(now)
        return [Notice("finished", "This run is finished: these are its weights, and nothing is left to train.")]
