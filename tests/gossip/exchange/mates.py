"""One peer's groups with a scripted choice of partners, and the states that tests begin with."""

from __future__ import annotations

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

    def __init__(self, *group: PeerId, spare: tuple[PeerId, ...] = (), hidden: tuple[PeerId, ...] = ()) -> None:
        self.mixes, self.mates, self.spare, self.hidden = 0, list(group), list(spare), hidden
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

    def is_crowding(self, sender: PeerId, now: float) -> bool:
        return False

    def note_request(self, asker: PeerId | None, now: float) -> None:
        pass

    def is_declined(self, sender: PeerId, now: float, forgives: bool = True) -> bool:
        return False

    def has_others(self, peers: Collection[PeerId]) -> bool:
        return self.others

    def note_mix(self, partner: PeerId, now: float) -> None:
        """Do nothing: ``partner`` is the inviter."""

    def address(self, peer: PeerId) -> Address | None:
        return None if peer in self.hidden else Address("10.0.0.1", 7700 + peer[0])

    def is_linked(self, peer: PeerId) -> bool:
        return peer not in self.unlinked


def groups(me: PeerId, mates: Mates, **changes: object) -> PlayedExchanges:
    local = Local("f", 1000, 1000, run_id=b"g" * 16, version=2.0, ready=True, boundary_at=0.0)
    return PlayedExchanges(
        me, local, Config(**{"mixing": "group", **changes}), iter(range(1, 99)).__next__, mates, reservation
    )


def invite(session: int, *members: PeerId, **changes: object) -> Invite:
    return replace(Invite(session, "f", b"g" * 16, 4.0, "fp32", members), **changes)


def invited(me: PeerId = B, inviter: PeerId = A, **changes: object) -> PlayedExchanges:
    """Return the exchanges of a member that joined the group of ``inviter``."""
    one = groups(me, Mates(), **changes)
    assert one.on_invite(inviter, invite(7, B, C), 0.0) == [Snapshot(7)]
    assert one.on_snapshotted(7, 0.1) == [Send(inviter, Joined(7, 2.0, "fp32"))]
    return one


def verified() -> PlayedExchanges:
    one = invited()
    assert isinstance(one.on_begin(A, Begin(7, (A, B, C), 3.0, "fp32"), 0.2)[-1], Gather)
    assert one.on_gathered(7, 1.0, 1.0, {}, [], 0.3) == [Send(A, Commit(7))]
    return one


def inviting(state: State = State.STREAMING, **changes: object) -> PlayedExchanges:
    """Return the exchanges of A, whose own group with B and C is in this state."""
    one = groups(A, Mates(B, C), **changes)
    one.begin_mix(0.0)
    one.on_snapshotted(1, 0.1)
    if state is not State.OFFERED:
        one.on_joined(B, Joined(1, 4.0, "fp32"), 0.2)
        one.on_joined(C, Joined(1, 6.0, "fp32"), 0.2)
    if state is State.VERIFIED:
        one.on_gathered(1, 1.0, 1.0, {}, [], 0.3)
    assert one.table[1].state is state
    return one
