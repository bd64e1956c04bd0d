"""The claims about honest members that must hold after every event, and at the end of a schedule."""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING, Any

from gossip.config.filters import FILTERS
from gossip.effects import (
    Effect,
    Gather,
    LeaveOut,
    MemberChanged,
    MemberState,
    Merge,
    Mix,
    Notice,
    ReceivePiece,
    Release,
    Rename,
    Send,
    SendPiece,
    Snapshot,
    Transfer,
)  # fmt: skip
from gossip.ids import PeerId
from gossip.state_transfer.joining import Phase
from gossip.wire.messages import Commit, Joined, Offer
from tests.simulation.deals import Deal, Push, Side
from tests.simulation.overlaps import check_overlaps
from tests.simulation.runs import Runs

if TYPE_CHECKING:
    from tests.harness.sessions import Session
    from tests.simulation.host import Host
    from tests.simulation.world import World

# A partner that was reachable for this long has answered how an exchange ended. It is asked every second.
ASKED_S = 3.0
GONE = (MemberState.DEAD, MemberState.LEFT)
ROUNDING = 1e-6  # Relative error of floats, which add up hundreds of thousands of differences.


class Failure(AssertionError):
    """A claim that does not hold. The text names the hosts and the exchange."""

    def __init__(self, claim: str, detail: str) -> None:
        super().__init__(f"{claim}: {detail}")
        self.claim = claim


class Judge:
    """The judge of one world. Sums are over the honest hosts that run, and exact in fractions."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.deals: dict[tuple[int, tuple[PeerId, ...]], Deal] = {}
        self.of: dict[tuple[Host, int], Deal] = {}  # The deals that have not ended, by host and session.
        self.pushes: dict[tuple[PeerId, int], Push] = {}
        self.asked: set[tuple[Host, int]] = set()  # Sessions that an Offer or Joined named before any snapshot.
        self.commits: set[tuple[PeerId, PeerId, int]] = set()
        self.spent: set[Session] = set()  # Sessions whose vector was mixed or merged.
        self.mass: Fraction | float = 0
        self.total: Fraction | float = 0
        self.clips = FILTERS[world.config.filter_name].cuts
        self.done = self.one_sided = self.clipped = 0
        self.overlapping = 0  # The largest number of mixes of one host that streamed at once.
        self.runs = Runs(world)
        self.blurred = False  # A key was copied, so that the sums are not known.
        self.signed: dict[PeerId, int] = {}  # The highest incarnation of lives that are over.
        self.lost: dict[tuple[Host, PeerId], int] = {}  # The incarnation in which a host last held a member to be gone.

    # -- effects -------------------------------------------------------------------------------------------------
    def watch(self, host: Host, effect: Effect) -> None:
        """Check an effect before the host performs it."""
        world = self.world
        number = getattr(effect, "session", 0)
        session = host.sessions.get(number)
        match effect:
            case Send(to, message):
                self.sent(host, to, message)
            case MemberChanged():
                self.changed(host, effect)
            case Notice(kind, sentence):
                world.note(f"{host} says: {kind}: {sentence}")
                self.runs.noticed(host, kind, sentence)
            case Snapshot() | ReceivePiece():
                if session is not None:
                    world.fail("a number is one session's", f"{host} is told {effect}")
            case Release():
                if session is None and (host, number) not in self.asked:
                    world.fail("one Release for each session", f"{host} is told {effect}")
                if session is not None and session.given and not session.reported and not self.returned(host, number):
                    session.given = 0
            case LeaveOut():
                if (host, number) in self.of:
                    self.of[host, number].is_partial = True
            case Transfer() | Gather() | Mix() | Merge() | Rename() | SendPiece():
                if session is None:
                    world.fail("effects refer to live sessions", f"{host} is told {effect}")
                self.session_told(host, effect, session)

    def session_told(self, host: Host, effect: Effect, session: Session) -> None:
        world = self.world
        match effect:
            case Transfer():
                if session.value is None or session.transfer is not None:
                    world.fail("nothing streams without a snapshot, or twice", f"{host} is told {effect}")
                self.began(host, effect)
                self.overlapping = max(self.overlapping, check_overlaps(world, host))
            case Gather():
                if session.value is None:
                    world.fail("nothing streams without a snapshot, or twice", f"{host} is told {effect}")
                if session.gather is None:
                    self.formed(host, effect)
                elif session.gather.members != effect.members:
                    world.fail("a group's members do not change", f"{host} is told {effect}")
            case Mix():
                if session.value is None or session.theirs is None or session in self.spent:
                    world.fail("no mix without two vectors, and none twice", f"{host} is told {effect}")
                self.spent.add(session)
                self.mixed(host, effect, Fraction(effect.weight) * (session.theirs - session.value))
            case Merge():
                received = session.theirs is not None
                value = session.theirs if received else session.value
                if value is None or session in self.spent or not effect.mass >= 0:  # A clip may leave no mass.
                    world.fail("no merge without a vector and a mass, and none twice", f"{host} is told {effect}")
                self.spent.add(session)
                self.merged(host, effect, received)
            case Rename():
                if effect.to in host.sessions or session.transfer is not None:
                    world.fail("a number is one session's", f"{host} is told {effect}")
                self.renamed(host, effect)

    def same(self, one: Fraction | float, other: Fraction | float) -> bool:
        """Return True if two sums are equal, for floats up to rounding."""
        if self.world.exact:
            return one == other
        return abs(one - other) <= ROUNDING * max(1.0, abs(one), abs(other))

    # -- sums ----------------------------------------------------------------------------------------------------
    def entered(self, host: Host, sign: int = 1) -> None:
        if not host.liar:
            mass, total = host.model.sums()
            if self.world.config.conserves:  # The shifts of a settlement count once they are applied.
                total -= host.model.mass * sum(host.model.pending)
            self.mass, self.total = self.mass + sign * mass, self.total + sign * total

    def learned(self, host: Host, grown: Fraction | float) -> None:
        if not host.liar:
            self.total += grown

    def replaced(self, host: Host, value: Fraction | float) -> None:
        """Note that other weights replace a host's, so that updates for the old ones are dropped."""
        self.entered(host, -1)
        host.model.replace(value)
        self.entered(host)
        self.voided(host)

    def ended(self, host: Host) -> None:
        """Note that a host crashes or leaves, and its weights with it."""
        self.entered(host, -1)
        self.world.truth.gone(host)
        self.voided(host, "gone")
        own = host.peer.membership.me.incarnation
        self.signed[host.id] = max(self.signed.get(host.id, 0), own)

    def voided(self, host: Host, why: str = "replaced") -> None:
        """Excuse the sides of exchanges whose host has lost its weights."""
        for (owner, _), deal in list(self.of.items()):
            if owner is host:
                deal.sides[host].excused = why
        for push in self.pushes.values():
            if push.owner is host:
                push.void = True
        if why == "gone":
            for number in [number for owner, number in self.of if owner is host]:
                self.end(host, number)

    # -- pairs and groups ----------------------------------------------------------------------------------------
    def deal(self, host: Host, session: int, members: tuple[PeerId, ...], inviter: PeerId | None) -> Side:
        deal = self.deals.setdefault((session, members), Deal(session, members, inviter))
        side = deal.sides[host] = Side(self.world.now)
        self.of[host, session] = deal
        return side

    def began(self, host: Host, effect: Transfer) -> None:
        if effect.sends and effect.receives:
            one, other = sorted((host.id, effect.partner))
            self.deal(host, effect.session, (one, other), None)

    def formed(self, host: Host, effect: Gather) -> None:
        inviter = host.peer.exchanges.table[effect.session].inviter
        self.deal(host, effect.session, effect.members, inviter)

    def sent(self, host: Host, to: PeerId, message: Any) -> None:
        if type(message) in (Offer, Joined):
            self.asked.add((host, message.session))
        if type(message) is Commit:
            self.commits.add((host.id, to, message.session))
            deal = self.of.get((host, message.session))
            if deal is not None and deal.sides[host].committed_s is None:
                deal.sides[host].committed_s = self.world.now

    def mixed(self, host: Host, effect: Mix, shift: Fraction | float) -> None:
        deal, world = self.of.get((host, effect.session)), self.world
        if deal is None:
            world.fail("nothing is mixed that was not agreed", f"{host} is told {effect}")
            return
        side = deal.sides[host]
        side.mixed, side.weight, side.shift = True, effect.weight, shift
        if host.liar:
            return
        for member in deal.members:
            if member == host.id or world.by_id[member].liar:
                continue
            if deal.inviter == host.id:  # It may go on without members that are late.
                said = any((one, host.id, effect.session) in self.commits for one in deal.members)
                deal.is_partial = deal.is_partial or (member, host.id, effect.session) not in self.commits
            elif deal.inviter is None:
                said = (member, host.id, effect.session) in self.commits
            elif member == deal.inviter:
                said = any(other.id == member and one.mixed for other, one in deal.sides.items())
            else:
                continue
            if not said:
                world.fail(
                    "nothing is applied without the other's commit", f"{host} mixes {effect}, not {member.hex()[:8]}"
                )

    def released(self, host: Host, number: int, session: Session) -> None:
        push = self.pushes.get((host.id, number))
        if push is not None and push.owner is host:
            self.settle_push(push, host, session)
        if (host, number) in self.of:
            side = self.of[host, number].sides[host]
            if not side.mixed and not side.excused:
                side.excused = self.excuse(host, side, self.of[host, number])
            self.end(host, number)

    def excuse(self, host: Host, side: Side, deal: Deal) -> str:
        """Return why a side that sent COMMIT may drop what others apply: no member that knows could be asked."""
        world, doubt_s = self.world, self.world.config.internal.doubt_s
        if side.committed_s is None:
            return "" if deal.inviter is None else "late"
        if host.peer.joining.phase is Phase.ADOPTING:
            return "replaced"  # Its weights go at its next boundary.
        asked = [member for member in deal.members if member != host.id]
        if deal.inviter is not None:
            asked = [deal.inviter]
        if all(host.peer.membership.state(member) in GONE for member in asked):
            return "dead"
        if self.crowded(host):
            return "crowded"
        if world.now - side.committed_s < doubt_s - 1e-6:
            return ""
        if deal.inviter is not None and not any(one.mixed for other, one in deal.sides.items() if other.id in asked):
            return "undecided"  # The inviter waits longer than this member, as slow exchanges have taught it.
        # A host that was restarted does not know what its earlier life said.
        over = {other.id for other in deal.sides if other.gone}
        return "doubt" if not any(self.reached(host, one, ASKED_S) for one in asked if one not in over) else ""

    def crowded(self, host: Host) -> bool:
        """Return True if an older exchange in doubt may have made way for a newer one, as their number is limited."""
        exchanges = host.peer.exchanges
        others = sum(one.transfer is not None or one.gather is not None for one in host.sessions.values())
        if host.config.mixing == "group":
            return others >= exchanges.max_doubts
        # With all neighbours at once the limit is their number, which may have grown by now.
        return others >= min(exchanges.max_doubts, 8 if host.config.partners else 2)

    def reached(self, host: Host, member: PeerId, seconds: float) -> bool:
        """Return True if the two were linked for this long, both awake."""
        world = self.world
        other, since = world.by_id[member], world.now - seconds
        if other.gone or other.stopped or other.awake_at > since or host.awake_at > since:
            return False
        asking, answering = host.links.get(member, [])[-1:], other.links.get(host.id, [])[-1:]
        return bool(asking and answering) and all(  # Each sends on its newest link, where it may wait behind a spike.
            link.other(host) is other and not link.broken and max(link.born, link.jammed_until) < since
            for link in (*asking, *answering)
        )

    def end(self, host: Host, number: int) -> None:
        deal = self.of.pop((host, number))
        side = deal.sides[host]
        side.ended = True
        if deal.settled and not host.liar:  # The others had gone on without it.
            self.moved(side.shift)
        if all(side.ended for side in deal.sides.values()):
            self.settle(deal)

    def settle(self, deal: Deal) -> None:
        """Check a deal whose sides have all ended. If another side begins later, it is checked again."""
        world = self.world
        if deal.settled:
            return
        sides = deal.sides
        mixed = [host for host, side in sides.items() if side.mixed]
        if not mixed:
            return
        deal.settled = True
        self.done += 1
        honest = {host: side for host, side in sides.items() if not host.liar}
        lied = any(world.by_id[member].liar for member in deal.members)
        dropped = [host for host, side in honest.items() if not side.mixed and not side.excused]
        shifts = sum(side.shift for side in honest.values())
        if lied:
            self.moved(shifts)
            return
        if dropped and not all(host.gone for host in mixed):
            world.fail("both or neither", f"{mixed} mixed {deal.session:x}, {dropped} did not")
        everybody = len(mixed) == len(deal.members)
        if deal.is_partial or dropped or not everybody or any(side.excused for side in sides.values()):
            self.one_sided += 1
            self.moved(shifts)
            return
        world.truth.mix(sides)
        weights = {side.weight for side in sides.values()}
        if len(weights) > 1 and not self.clips:
            world.fail("both sides take one weight", f"{mixed} mixed {deal.session:x} by {weights}")
        if len(weights) > 1:
            self.clipped += 1
            self.moved(shifts)
        elif not self.same(shifts, 0):
            world.fail("the mean is kept", f"{mixed} mixed {deal.session:x} and moved it by {float(shifts)}")

    def moved(self, shifts: Fraction | float) -> None:
        """Note what a deal has added to the sum. With masses, the hosts note it when they apply it."""
        if not self.world.config.conserves:
            self.total += shifts

    # -- pushes --------------------------------------------------------------------------------------------------
    def given(self, host: Host, number: int, session: Session) -> None:
        if self.world.config.conserves:
            self.pushes[host.id, number] = Push(host, number, session.given, session.total, self.world.now)

    def renamed(self, host: Host, effect: Rename) -> None:
        push = self.pushes.pop((host.id, effect.session), None)
        if push is not None:
            push.session = effect.to
            self.pushes[host.id, effect.to] = push

    def merged(self, host: Host, effect: Merge, received: bool) -> None:
        world = self.world
        if not world.config.conserves:
            return
        session = host.sessions[effect.session]
        owner = session.partner if received else host.id
        assert owner is not None
        if received and world.by_id[owner].liar:
            if not host.liar:
                assert session.theirs is not None
                self.mass, self.total = self.mass + effect.mass, self.total + effect.mass * session.theirs
            return
        push = self.pushes.get((owner, effect.session))
        if push is None or push.mass != effect.mass:
            world.fail("a mass arrives as it was given", f"{host} is told {effect}")
            return
        if received and push.merged:
            world.fail("a mass arrives once", f"{host} merges {effect.session:x} once more")
        if received:
            push.merged += 1
            push.stolen, push.taker = host.liar, host
            world.truth.mix((push.owner, host))  # A push moves the sample counts of both sides.
        else:
            push.back += 1
            push.doubted = self.doubted(push, session)
        # A host that ended took what it merged along, and its next life rightly answers no.
        over = push.taker is not None and push.taker.gone
        if push.merged and push.back and not (push.void or push.stolen or push.doubted or over):
            world.fail("no mass is there twice", f"{push.owner}'s {push.session:x} was merged and taken back")

    def returned(self, host: Host, number: int) -> bool:
        """Note that the driver itself puts back the mass of a push that never began. Return False if there is none."""
        push = self.pushes.get((host.id, number))
        if push is None or push.void:
            return False
        push.back += 1
        return True

    def doubted(self, push: Push, session: Session) -> bool:
        """Return True if the owner may have stopped asking for the mass: after long, or of a partner that is gone."""
        partner = session.partner
        gone = partner is not None and push.owner.peer.membership.state(partner) in GONE
        return gone or self.crowded(push.owner) or self.world.now - push.since_s >= self.world.config.internal.doubt_s

    def settle_push(self, push: Push, host: Host, session: Session) -> None:
        """Check a push that its owner has released: the partner has merged it, or it is back."""
        if push.back or push.merged or push.void or host.liar or not session.reported:
            return
        if host.peer.joining.phase is Phase.ADOPTING:
            push.void = True  # Its weights go at the next boundary.
            return
        if session.partner is None or not self.world.by_id[session.partner].liar:
            self.world.fail("no mass is lost", f"{host} gave {push.session:x} away and nobody has it")

    def sums(self) -> None:
        """Check, with no exchange in progress, the sums of all masses and of all masses times their values."""
        if self.blurred or self.world.config.mixing == "row-stochastic":
            return  # Row-stochastic mixing keeps neither sum.
        mass, total = self.mass, self.total
        for push in self.pushes.values():
            if not push.owner.liar:
                count = push.back + (push.merged and not push.stolen)
                mass, total = mass + (count - 1) * push.mass, total + (count - 1) * push.total
        have = [host.model.sums() for host in self.world.honest]
        held = sum(one for _, one in have)
        if not self.same(sum(one for one, _ in have), mass) or not self.same(held, total):
            held = float(held)
            self.world.fail("the sum is kept", f"{held} is held of {float(total)}")

    # -- members -------------------------------------------------------------------------------------------------
    def changed(self, host: Host, effect: MemberChanged) -> None:
        """Check a change of a member's state: only the member itself can bring itself back."""
        if host.liar:
            return
        world = self.world
        record, other = host.peer.membership.record(effect.peer), world.by_id.get(effect.peer)
        if record is None or other is None or other.liar:
            return
        if effect.after is not MemberState.ALIVE:
            self.lost[host, effect.peer] = record.incarnation
            return
        if record.incarnation > max(other.peer.membership.me.incarnation, self.signed.get(effect.peer, 0)):
            world.fail("only its owner raises an incarnation", f"{host} holds {record.incarnation} of {other}")
        if effect.before in GONE and record.incarnation <= self.lost.get((host, effect.peer), -1):
            world.fail("who is gone is not brought back by others", f"{host} holds {other} to be alive")
