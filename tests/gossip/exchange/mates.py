"""One peer's groups with a scripted choice of partners, and the states that tests begin with."""

from collections.abc import Collection
from dataclasses import replace

from gossip.config import Config
from gossip.effects import Gather, Send, Snapshot
from gossip.exchange import reservation
from gossip.exchange.session import Local, State
from gossip.ids import Address, PeerId
from gossip.wire.messages import Begin, Commit, Invite, Joined
from tests.gossip.exchange.sides import PlayedExchanges

A, B, C, D = (PeerId(bytes([n]) * 16) for n in (1, 2, 3, 4))


class Mates:
    """A scripted selection whose members are all within reach."""

    def __init__(self, *group: PeerId, hidden: tuple[PeerId, ...] = ()) -> None:
        self.mixes, self.mates, self.hidden = 0, list(group), hidden
        self.spare: list[PeerId] = []
        self.benched: list[PeerId] = []
        self.shunned: list[PeerId] = []  # Those members of ``benched`` whose invitations are declined too.
        self.unlinked: set[PeerId] = set()
        self.others = False

    def group(self, now: float) -> list[PeerId]:
        return self.mates

    def choose(self, asked: set[PeerId], now: float) -> PeerId | None:
        return next((peer for peer in self.spare if peer not in asked), None)

    def note_failure(self, partner: PeerId, now: float, silent: bool = False) -> None:
        self.benched.append(partner)
        if not silent:
            self.shunned.append(partner)

    def is_declined(self, sender: PeerId, now: float, forgives: bool = True) -> bool:
        return False

    is_crowding = is_declined

    def has_others(self, peers: Collection[PeerId]) -> bool:
        return self.others

    def address(self, peer: PeerId) -> Address | None:
        return None if peer in self.hidden else Address("10.0.0.1", 7700 + peer[0])

    def is_linked(self, peer: PeerId) -> bool:
        return peer not in self.unlinked

    def ignore(self, partner: PeerId | None, now: float) -> None:
        """Do nothing: this choice learns nothing from requests and mixes."""

    note_request = note_mix = ignore


def groups(me: PeerId, mates: Mates, **changes: object) -> PlayedExchanges:
    local = Local("f", 1000, 1000, run_id=b"g" * 16, version=2.0, ready=True, boundary_at=0.0)
    return PlayedExchanges(
        me, local, Config(**{"mixing": "group", **changes}), iter(range(1, 99)).__next__, mates, reservation
    )


def invite(session: int, *members: PeerId, **changes: object) -> Invite:
    return replace(Invite(session, "f", b"g" * 16, 4.0, "fp32", members), **changes)


def invited(**changes: object) -> PlayedExchanges:
    """Return the exchanges of B, which joined the group of A."""
    one = groups(B, Mates(), **changes)
    assert one.on_invite(A, invite(7, B, C), 0.0) == [Snapshot(7)]
    assert one.on_snapshotted(7, 0.1) == [Send(A, Joined(7, 2.0, "fp32"))]
    return one


def take_part(one: PlayedExchanges, session: int, now: float, *absent: PeerId) -> None:
    """Let B take part in a group of A and C up to its COMMIT, with these members absent."""
    one.on_invite(A, invite(session, B, C), now)
    one.on_snapshotted(session, now)
    one.on_begin(A, Begin(session, (A, B, C), 3.0, "fp32"), now)
    one.on_gathered(session, 1.0, 1.0, {}, [*absent], now)


def gathering(members: tuple[PeerId, ...] = (A, B, C), others: bool = False, **changes: object) -> PlayedExchanges:
    """Return the exchanges of B, whose group with A streams."""
    one = invited(**changes)
    one.partners.others = others
    assert isinstance(one.on_begin(A, Begin(7, members, 3.0, "fp32"), 0.2)[-1], Gather)
    return one


def verified(*how: object, **changes: object) -> PlayedExchanges:
    one = gathering(*how, **changes)
    assert one.on_gathered(7, 1.0, 1.0, {}, [], 0.3) == [Send(A, Commit(7))]
    return one


def inviting(state: State = State.STREAMING) -> PlayedExchanges:
    """Return the exchanges of A, whose own group with B and C is in this state."""
    one = groups(A, Mates(B, C))
    one.begin_mix(0.0)
    one.on_snapshotted(1, 0.1)
    if state is not State.OFFERED:
        one.on_joined(B, Joined(1, 4.0, "fp32"), 0.2)
        one.on_joined(C, Joined(1, 6.0, "fp32"), 0.2)
    if state is State.VERIFIED:
        one.on_gathered(1, 1.0, 1.0, {}, [], 0.3)
    assert one.table[1].state is state
    return one
