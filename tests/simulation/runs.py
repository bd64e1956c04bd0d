"""The claims about runs: how a member comes to one, and who may end it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gossip.ids import PeerId

if TYPE_CHECKING:
    from tests.simulation.host import Host
    from tests.simulation.world import World

LATELY_S = 60.0  # Time within which no member may take the same run's weights three times.


class Runs:
    """The runs of one world, as the notices of honest members tell of them."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.ended_runs: set[bytes] = set()  # Runs that the owner of an honest member ended.
        self.finishers: dict[bytes, set[PeerId]] = {}  # The honest members that hold each run to be finished.
        self.merges: list[tuple[float, Host, bytes]] = []  # The last merges: time, member, and the run that it took.

    def noticed(self, host: Host, kind: str, sentence: str) -> None:
        """Check a notice of a host."""
        if host.liar:
            return
        if kind == "started" and host.must_join:
            self.world.fail("a peer that must join begins no run", f"{host}: {sentence}")
        if kind == "merged":
            now, merge = self.world.now, (host, host.run_id)
            self.merges = [one for one in (*self.merges, (now, *merge)) if one[0] > now - LATELY_S]
            if sum(one[1:] == merge for one in self.merges) > 2:
                self.world.fail("nobody goes to and fro between two runs", f"{host}: {sentence}")
        if kind == "finished":
            if "members hold" in sentence:
                self.check_vote(host, sentence)
            self.note_finished(host)

    def ended_by_owner(self, host: Host) -> None:
        """Note that the owner of a host marks its run as finished."""
        self.ended_runs.add(host.peer.view.run_id)
        self.note_finished(host)

    def note_finished(self, host: Host) -> None:
        self.finishers.setdefault(host.peer.view.run_id, set()).add(host.id)

    def check_vote(self, host: Host, sentence: str) -> None:
        """Check that a host which was outvoted rightly holds its run to be finished.

        Honest members that hold so, with all liars, must be more than half of the run's members, the host included. A
        member that is gone may have one vote more, until a new member takes its place.
        """
        run_id, membership = host.peer.view.run_id, host.peer.membership
        present = {record.id for record in membership.run_members(run_id)}
        honest = self.finishers.get(run_id, set()) - {host.id}
        liars = {other.id for other in self.world.hosts if other.liar}
        if run_id not in self.ended_runs and 2 * len(present & liars) < len(present) + 1:
            self.world.fail("only honest members end a run", f"{host}: {sentence}")
        voters = honest | liars
        if 2 * len(voters & present) + len(voters - present) <= len(present) + 1:
            self.world.fail("a run ends by most of its members", f"{host}: {sentence}")
