"""Planted bugs that the search must find.

Each is a small change of one rule of the core, for as long as its context lasts. None of them shows in a schedule
without faults.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from gossip.effects import Effect, MemberState, Send
from gossip.exchange.durations import Durations
from gossip.exchange.exchanges import Exchanges
from gossip.exchange.groups.group import Group
from gossip.exchange.offer import Exchange
from gossip.exchange.pair import Pair
from gossip.exchange.push import Push
from gossip.exchange.session import Event, State
from gossip.exchange.session_table import Ledger
from gossip.membership.self_record import OwnRecord
from gossip.membership.states import MemberStates
from gossip.state_transfer.ending import Ending
from gossip.state_transfer.joining import Newcomer
from gossip.wire.messages import Abort, Settled

Wrapper = Callable[[Callable[..., Any]], Callable[..., Any]]
MUTANTS: dict[str, tuple[type, str, Wrapper]] = {}


def mutant(owner: type, method: str) -> Callable[[Wrapper], Wrapper]:
    """Register a mutant by the name of its function; ``wrapper(original)`` replaces the method."""

    def register(wrapper: Wrapper) -> Wrapper:
        MUTANTS[wrapper.__name__] = owner, method, wrapper
        return wrapper

    return register


@contextmanager
def planted(name: str) -> Iterator[None]:
    owner, method, wrapper = MUTANTS[name]
    inherited = method not in vars(owner)
    original = getattr(owner, method)
    setattr(owner, method, wrapper(original))
    try:
        yield
    finally:
        if inherited:
            delattr(owner, method)
        else:
            setattr(owner, method, original)


# -- exchanges -------------------------------------------------------------------------------------------------------
@mutant(Pair, "on_streamed")
def commit_alone(original: Callable[..., Any]) -> Callable[..., Any]:
    """Mix as soon as the streams are whole, without the partner's COMMIT."""

    def on_streamed(self: Any, difference_sq: float, own_sq: float, now: float, sketch: Any = None) -> list[Effect]:
        effects = original(self, difference_sq, own_sq, now, sketch)
        return [*effects, *self.finish(now)] if self.state is State.VERIFIED else effects

    return on_streamed


@mutant(Exchange, "on_accept")
def weight_on_retry(original: Callable[..., Any]) -> Callable[..., Any]:
    """Take another weight than was agreed if a second partner was asked."""

    def on_accept(self: Any, sender: Any, accept: Any, now: float) -> list[Effect]:
        effects = original(self, sender, accept, now)
        if self.state is State.STREAMING and len(self.asked_peers) > 1:
            self.weight *= 0.5
        return effects

    return on_accept


@mutant(Ledger, "remember_outcome")
def forgotten_verdict(original: Callable[..., Any]) -> Callable[..., Any]:
    """Forget how an exchange ended, so that no member can learn it."""
    return lambda self, *key_and_end: None


@mutant(Pair, "on_failed")
def no_doubt(original: Callable[..., Any]) -> Callable[..., Any]:
    """End an exchange whose link breaks behind our COMMIT, and ask for no outcome."""

    def on_failed(self: Any, code: str, now: float) -> list[Effect]:
        return self.fail(code, now) if self.state is State.VERIFIED else original(self, code, now)

    return on_failed


@mutant(Push, "on_settled")
def double_merge(original: Callable[..., Any]) -> Callable[..., Any]:
    """Take a mass back although the partner says that it has it."""
    return lambda self, sender, settled, now: self.drop()


@mutant(Push, "drop")
def lost_mass(original: Callable[..., Any]) -> Callable[..., Any]:
    """Keep no mass of a push that came to nothing."""
    return lambda self: self.end(State.DROPPED)


@mutant(Exchange, "fail")
def endless_doubt(original: Callable[..., Any]) -> Callable[..., Any]:
    """Ask about a doubt for ever."""

    def fail(self: Any, code: str, now: float) -> list[Effect]:
        return self.ask_outcome(now) if code == "doubt" else original(self, code, now)

    return fail


@mutant(Exchange, "ask_outcome")
def stuck_deadline(original: Callable[..., Any]) -> Callable[..., Any]:
    """Keep a deadline that is past when a doubt begins."""

    def ask_outcome(self: Any, now: float) -> list[Effect]:
        before = self.timer_at
        effects = original(self, now)
        self.timer_at = before
        return effects

    return ask_outcome


@mutant(Exchange, "start_streams")
def no_deadline(original: Callable[..., Any]) -> Callable[..., Any]:
    """Let a stream take for ever."""

    def start_streams(self: Any, now: float) -> Any:
        effect = original(self, now)
        self.timer_at = math.inf
        return effect

    return start_streams


@mutant(Pair, "on_abort")
def abort_ignored(original: Callable[..., Any]) -> Callable[..., Any]:
    """Take a partner's refusal of our vector, sent behind our COMMIT, for its COMMIT."""

    def on_abort(self: Any, sender: Any, code: str, now: float) -> list[Effect]:
        return self.finish(now) if self.state is State.VERIFIED else original(self, sender, code, now)

    return on_abort


@mutant(Exchanges, "route_message")
def commit_carried(original: Callable[..., Any]) -> Callable[..., Any]:
    """Count a COMMIT sent before BUSY for the next partner that is asked."""

    def route_message(self: Any, event: Event, sender: Any, session: int, *what: Any) -> list[Effect]:
        one = self.table.get(session)
        if event is Event.COMMIT and isinstance(one, Pair) and one.partner == sender and one.state is State.OFFERED:
            one.has_partner_committed = True
        return original(self, event, sender, session, *what)

    return route_message


@mutant(Durations, "add")
def unbounded_table(original: Callable[..., Any]) -> Callable[..., Any]:
    """Keep the durations of all exchanges for ever."""

    def add(self: Any, partner: Any, seconds: float, moved_bytes: int = 0) -> None:
        before = self.durations_s.get(partner, [])
        original(self, partner, seconds, moved_bytes)
        self.durations_s[partner] = [*before, seconds]

    return add


# -- overlapping mixes -----------------------------------------------------------------------------------------------
@mutant(Pair, "precedence")
def partner_twice(original: Callable[..., Any]) -> Callable[..., Any]:
    """Let a partner whose mix with us streams begin a second one."""

    def precedence(exchanges: Any, sender: Any) -> tuple[list[Exchange], bool]:
        leaving, waiting = original(exchanges, sender)
        return leaving, waiting and not exchanges.is_overlapping

    return staticmethod(precedence)


@mutant(Exchanges, "max_overlaps")
def one_too_many(original: Any) -> Any:
    """Let one mix more overlap than the limit allows."""
    return property(lambda self: original.fget(self) + 1)


# -- groups ----------------------------------------------------------------------------------------------------------
@mutant(Group, "finish_if_complete")
def half_a_group(original: Callable[..., Any]) -> Callable[..., Any]:
    """Let the inviter tell the first member to drop a group that all have committed."""

    def finish_if_complete(self: Any, now: float) -> list[Effect]:
        if self.state is not State.VERIFIED or len(self.committed_members) < len(self.members) - 1:
            return []
        told: list[Effect] = [
            Send(peer, Settled(self.session, True) if number else Abort(self.session, "late"))
            for number, peer in enumerate(self.other_members)
        ]  # fmt: skip
        return [*told, *self.finish(now)]

    return finish_if_complete


@mutant(Group, "ask_outcome")
def group_gives_up(original: Callable[..., Any]) -> Callable[..., Any]:
    """Let a member that has committed drop the group when it loses its inviter."""
    return lambda self, now: self.fail("broken")


# -- members and joins -----------------------------------------------------------------------------------------------
@mutant(OwnRecord, "on_accusation")
def lost_refutation(original: Callable[..., Any]) -> Callable[..., Any]:
    """Answer no accusation."""
    return lambda self, now: False


@mutant(MemberStates, "apply_record")
def resurrected_member(original: Callable[..., Any]) -> Callable[..., Any]:
    """Let progress that is told late bring a DEAD member back."""

    def hear(self: Any, record: Any, now: float, *arguments: Any, **options: Any) -> None:
        original(self, record, now, *arguments, **options)
        entry = self._table.entries.get(record.id)
        if entry is not None and entry.state is MemberState.DEAD and not record.left and not entry.is_restored:
            self.change_state(entry, entry.record, MemberState.ALIVE, now)

    return hear


@mutant(Newcomer, "on_failed")
def lost_piece(original: Callable[..., Any]) -> Callable[..., Any]:
    """Ask no other donor for what a failed donor did not send."""

    def on_failed(self: Any, session: int, now: float, tell: bool = True) -> list[Effect]:
        piece = self.pieces.get(session)
        if piece is not None:
            piece.start = piece.stop
        return original(self, session, now, tell)

    return on_failed


@mutant(Ending, "stranger_count")
def ended_by_few(original: Callable[..., Any]) -> Callable[..., Any]:
    """Ignore half of the members met when asking whether most hold their run to be finished."""
    return lambda self, present: -(len(present) // 2)
