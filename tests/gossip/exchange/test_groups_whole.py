"""Group means in a swarm: all members that have committed mix or none does, with messages lost and members killed."""

from collections.abc import Callable
from fractions import Fraction
from itertools import permutations
from typing import Any

import pytest

from gossip.config import Config
from gossip.effects import Gather, LeaveOut
from gossip.ids import PeerId
from gossip.wire.messages import Abort, Begin, Busy, Commit, Invite, Joined, Message, Outcome, Refuse, Settled
from tests.harness.configs import tuned
from tests.harness.host import Host
from tests.harness.network import Link
from tests.harness.world import World

GROUP = (Invite, Joined, Begin, Commit, Settled, Outcome, Abort, Busy, Refuse)


class Member(Host):
    """A host some of whose streams stall, so that their links are closed."""

    def stream(self, link: Link, number: int, what: str, value: Any) -> None:
        self.world.streams += 1
        if self.world.streams in self.world.lost_streams:
            self.world.later(self.world.config.stall_s, self.world.network.cut_link, link)
        else:
            super().stream(link, number, what, value)


class GroupWorld(World):
    """A swarm whose group messages and streams can be lost.

    ``fault(number, sender, to, message)`` is called with every message about groups that is sent and its number; it
    returns True to lose the message. ``lost_streams`` are the numbers of streams that stall. The latencies of pairs
    differ, so that some of the messages sent together arrive sooner.
    """

    def __init__(self, seed: int, config: Config) -> None:
        super().__init__(seed, config=config)
        self.fault: Callable[[int, Host, Host, Message], bool] = lambda number, sender, to, message: False
        self.said = self.streams = 0
        self.committed: set[tuple[int, PeerId]] = set()
        self.lost_streams: set[int] = set()
        self.network.fault = self.hear
        self.network.latency = self.latency

    def hear(self, sender: Host, to: Host, message: Message) -> bool:
        if not isinstance(message, GROUP):
            return False
        self.said += 1
        if isinstance(message, Commit):
            self.committed.add((message.session, sender.id))
        return self.fault(self.said, sender, to, message)

    @staticmethod
    def latency(a: Host, b: Host | None) -> float:
        return 0.01 * (0.5 + (7 * a.number + 3 * (b.number if b else 0)) % 5 / 4)

    @property
    def members(self) -> dict[int, set[PeerId]]:
        """Return the members of every group that began anywhere, in the order of their beginnings."""
        begun = sorted((at, gather.session, gather.members) for host in self.hosts for at, gather in host.said(Gather))
        return {session: set(members) for _, session, members in begun}

    @property
    def mixed(self) -> dict[int, set[PeerId]]:
        """Return the members that mixed each group."""
        mixes = sorted((at, session, host.id) for host in self.hosts for at, session, _ in host.mixes)
        found: dict[int, set[PeerId]] = {}
        for _, session, member in mixes:
            found.setdefault(session, set()).add(member)
        return found

    def halves(self) -> list[int]:
        """Return the groups that some running members mixed and others, which had committed, did not."""
        running, mixed = {host.id for host in self.running}, self.mixed
        return [
            session for session, members in self.members.items()
            if mixed.get(session, set()) & running
            and not {member for member in members & running if (session, member) in self.committed} <= mixed[session]
        ]  # fmt: skip

    def play(self, seconds: float) -> None:
        """Mix for so long, let all sessions end, and check that every group is whole and all values are inside."""
        self.resume()
        self.run(seconds)
        self.finish()

    def finish(self) -> None:
        self.until(self.quiet, 120.0)
        self.run(1.0)  # a session that ended may have asked for another
        assert self.halves() == []
        assert all(100 <= host.value <= 100 * len(self.hosts) for host in self.hosts), "within the initial range"


def together(count: int, seed: int = 0, **changes: Any) -> GroupWorld:
    """Return a swarm whose members know each other, before their first group."""
    swarm = GroupWorld(seed, tuned(mixing="group", **changes))
    swarm.swarm(count, kind=Member)
    swarm.quiet()
    pairs = list(permutations(swarm.hosts, 2))
    swarm.until(lambda: swarm.agreed() and all(a.peer.partners.fits(b.id) for a, b in pairs), 30.0)
    for host in swarm.hosts:
        host.model.replace(Fraction(100 * host.number + 100))  # within each other's norm bound
    swarm.said = 0
    return swarm


def test_a_group_takes_everybody_to_the_exact_mean() -> None:
    swarm = together(4)
    swarm.play(1.5)
    assert {node.value for node in swarm.hosts} == {Fraction(250)}
    assert any(len(mixed) == 4 for mixed in swarm.mixed.values())


@pytest.mark.parametrize("number", range(1, 25))
def test_a_lost_message_leaves_no_half_of_a_group(number: int) -> None:
    swarm = together(4, doubt_s=60.0)
    swarm.fault = lambda said, sender, to, message: said == number
    swarm.play(8.0)  # more than an answer may take
    assert swarm.said >= number
    assert sum(len(mixed) for mixed in swarm.mixed.values()) > 4


def test_those_lost_messages_were_of_every_kind() -> None:
    swarm, kinds = together(4), list[type]()
    swarm.fault = lambda said, sender, to, message: bool(kinds.append(type(message)))
    swarm.resume()
    swarm.run(2.0)
    assert {Invite, Joined, Begin, Commit, Settled} <= set(kinds[:24])


@pytest.mark.parametrize("number", range(1, 25))
def test_a_group_goes_on_without_what_a_lost_stream_carried(number: int) -> None:
    swarm = together(4)
    swarm.lost_streams = {number}  # the first 12 are slices, the next 12 means
    swarm.play(6.0)
    assert any(node.said(LeaveOut) or node.peer.exchanges.failures for node in swarm.hosts)
    first = next(iter(swarm.members))
    assert len(swarm.mixed[first]) >= 3


@pytest.mark.parametrize("victim", ["sender", "receiver"])
@pytest.mark.parametrize("number", range(1, 25, 2))
def test_a_member_that_dies_at_any_message_leaves_no_half_of_a_group(number: int, victim: str) -> None:
    swarm = together(5, doubt_s=60.0, group_size=5)

    def fault(said: int, sender: Host, to: Host, message: Message) -> bool:
        if said == number:
            swarm.later(0.0, (sender if victim == "sender" else to).crash)
        return False

    swarm.fault = fault
    swarm.play(3.0)
    assert sum(node.gone for node in swarm.hosts) == 1
    assert any(node.mixes for node in swarm.hosts if not node.gone)


def test_an_inviter_that_dies_as_it_tells_leaves_out_whom_it_did_not_tell() -> None:
    swarm = together(3, doubt_s=5.0)
    told: list[tuple[Host, Host]] = []

    def fault(said: int, sender: Host, to: Host, message: Message) -> bool:
        if not isinstance(message, Settled) or not message.committed:
            return False
        told.append((sender, to))
        if len(told) == 1:
            swarm.later(2 * swarm.latency(sender, to), sender.crash)
        return len(told) == 2  # the inviter tells one of two, and dies

    swarm.fault = fault
    swarm.resume()
    swarm.run(30.0)  # the mix comes due, the inviter has time to decide, and a doubt of 5 s ends with its next question
    inviter, (first, second) = told[0][0], (to for _, to in told[:2])
    assert inviter.gone
    session = next(iter(swarm.mixed))
    assert swarm.mixed[session] == {inviter.id, first.id}
    assert session not in second.peer.exchanges.table, "nor does it wait for ever"


@pytest.mark.parametrize(("doubt_s", "halves"), [(5.0, 1), (60.0, 0)])
def test_only_who_is_cut_off_longer_than_doubt_s_drops_a_group_alone(doubt_s: float, halves: int) -> None:
    swarm = together(3, doubt_s=doubt_s)
    cut: list[Host] = []

    def fault(said: int, sender: Host, to: Host, message: Message) -> bool:
        if isinstance(message, Settled) and message.committed and not cut:
            cut.append(to)
            swarm.later(0.0, swarm.network.partition, lambda number: int(number == to.number))
            return True
        return False

    swarm.fault = fault
    swarm.resume()
    swarm.run(1.5)
    swarm.quiet()
    swarm.run(30.0)
    assert cut
    swarm.network.partition(None)
    for node, other in permutations(swarm.hosts, 2):
        swarm.network.dial(node, other.peer.membership.me.address, other.id)
    swarm.run(5.0)
    assert len(swarm.halves()) == halves


def test_everybody_due_at_one_instant_mixes_and_nobody_starves() -> None:
    swarm = together(8, group_size=3)
    for node in swarm.hosts:
        node.peer.schedule.due_steps = 0
    swarm.resume()
    swarm.run(20.0)  # 200 steps, 25 mixes
    assert min(len(node.mixes) for node in swarm.hosts) > 10
    assert sum(node.peer.exchanges.failures for node in swarm.hosts) <= 2  # An answer may come after its time.
    assert not any(node.said(LeaveOut) for node in swarm.hosts)


def test_invitations_that_cross_become_one_group_of_everybody() -> None:
    swarm = together(4, group_size=0)
    for host in swarm.hosts:
        host.perform(host.peer.exchanges.begin_mix(swarm.now))
        host.report_taken(host.take(list(host.wishes)))
    swarm.run(1.5)
    first = next(iter(swarm.members))
    assert swarm.members[first] == swarm.mixed[first] == {node.id for node in swarm.hosts}
    assert swarm.halves() == []
