"""The base class of pairs, pushes and groups, and the state of the node that exchanges read.

A *round* is the local training from one mix of a member to its next. The *version* of weights is the number of rounds
behind them; an exchange averages versions as it does weights. *Slots* limit how many exchanges are in progress at once.
A session is *in doubt* while we cannot know whether the other side has committed, for example after a broken link. It
then takes no slot, and asks for the outcome (:mod:`gossip.exchange.transitions`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, ClassVar, Protocol, TypeAlias

from gossip.codecs import COMPILED, Machine
from gossip.config import Config
from gossip.config.mixings import MIXINGS
from gossip.effects import Effect, MemberState, Send
from gossip.exchange.progress import RunProgress
from gossip.exchange.transitions import HANDLERS, Event, State, Table
from gossip.ids import UNSTATED, Claim, PeerId
from gossip.wire.messages import Invite, Offer, Refuse

MAX_NEIGHBOURS = 32  # Partners of one mix with all neighbours: each needs a vector. Others follow the next time.
MAX_VERSION = 2**53  # Limit of a version in a member record: peers refuse a record with a larger one.
# The largest difference of two versions, in rounds, that one exchange counts. A member that was away still catches up
# within a few mixes. A partner that states large versions cannot bring ours to MAX_VERSION.
MAX_GAP_ROUNDS = 1_000.0


def clamp_version(version: float) -> float:
    """Clamp the version to half of MAX_VERSION, so that no peer can push ours near the limit of what others accept."""
    return min(max(0.0, version), MAX_VERSION / 2)  # NaN becomes 0.


def version_gap(theirs: float, ours: float) -> float:
    """Return the staleness of our weights against theirs in mixing rounds, within ``MAX_GAP_ROUNDS`` either way.

    The bound is needed because a version is only the partner's claim.
    """
    return min(max(theirs - ours, -MAX_GAP_ROUNDS), MAX_GAP_ROUNDS)


AnyExchanges: TypeAlias = Any
"""A :class:`gossip.exchange.exchanges.Exchanges`; untyped here, because that module imports this one."""


class SessionTable(Protocol):
    """The table that holds a session: a :class:`gossip.exchange.exchanges.Exchanges`."""

    def remove(self, session: Session) -> list[Effect]:
        """Forget a session that has ended, and release what belongs to it."""


@dataclass(slots=True, eq=False, kw_only=True)
class Session:
    """One side of an exchange.

    A subclass has a transition table and a handler ``on_<event>`` for each event in it. ``Exchanges`` calls a handler
    only if the table allows the event in the present state. The handler changes the state and returns effects.

    ``our_version`` and ``our_claim`` are the version and the progress that our Offer, Accept or Joined states.
    """

    MIXING: ClassVar[str] = ""  # The name of this kind of exchange in an Offer; groups are invited.
    TRANSITIONS: ClassVar[Table]  # The events that each state allows, and the next states.
    IS_GROUP: ClassVar[bool] = False  # True if more than two members take part.

    exchanges: SessionTable = field(repr=False)  # The table that holds it.
    session: int  # The session number, which all messages about it carry.
    is_initiator: bool
    phase_began_at: float  # Time of the latest of these: creation, offer, begin of the streams, entry of IN_DOUBT.
    timer_at: float  # Time of the next ``on_late``.
    state: State = State.PREPARING
    our_version: float = 0.0
    our_claim: Claim = UNSTATED
    snapshot_steps: int = 0  # Step count of the training loop at the snapshot.
    is_backgrounded: bool = False  # It has freed its slot, because its partner takes longer than usual.

    @property
    def counterparts(self) -> tuple[PeerId, ...]:
        """Return the known participants: without us, except in a group that has begun."""
        raise NotImplementedError

    @property
    def has_slot(self) -> bool:
        """Return True if it takes one of the node's slots."""
        return self.state is not State.IN_DOUBT

    @property
    def is_reserved(self) -> bool:
        """Return True if the exchange was reserved ahead and its streams have not begun."""
        return False

    def withdrawal(self, code: str) -> list[Effect]:
        """Return the Abort for a peer that is asked for a reservation, or nothing."""
        return []

    # -- beginning -----------------------------------------------------------------------------------------------
    @classmethod
    def begin_mix(cls, exchanges: AnyExchanges, now: float) -> list[Effect]:
        """Begin a mix of our own, if there is room and a partner to ask."""
        raise NotImplementedError

    @classmethod
    def answer_offer(cls, exchanges: AnyExchanges, sender: PeerId, offer: Offer, now: float) -> list[Effect]:
        """Answer an offer of a pair or a push."""
        return [Send(sender, Refuse(offer.session, "mixing"))]

    @classmethod
    def answer_invitation(cls, exchanges: AnyExchanges, sender: PeerId, invite: Invite, now: float) -> list[Effect]:
        """Answer an invitation to a group."""
        return [Send(sender, Refuse(invite.session, "mixing"))]

    @staticmethod
    def max_doubts(exchanges: AnyExchanges) -> int:
        """Return how many exchanges may be in doubt at once: each holds two vectors."""
        raise NotImplementedError

    # -- messages and events -------------------------------------------------------------------------------------
    def accepts_from(self, event: Event, sender: PeerId) -> bool:
        """Return True if this event may come from this sender."""
        raise NotImplementedError

    @classmethod
    def on_stray(cls, exchanges: AnyExchanges, event: Event, sender: PeerId, session: int) -> list[Effect]:
        """Answer a message about a session that has ended, is not the sender's, or does not allow the event now."""
        raise NotImplementedError

    def lost_peers(self, state: Callable[[PeerId], MemberState | None]) -> list[PeerId]:
        """Return the members that it waits for in vain, given what we know of members."""
        return []

    def is_orphaned(self, state: Callable[[PeerId], MemberState | None]) -> bool:
        """Return True if no member is left that knows the outcome."""
        return False

    def on_link_lost(self, peer: PeerId, now: float) -> list[Effect]:
        """Handle the loss of the last link to ``peer``, or a dial of it that failed."""
        raise NotImplementedError

    def allows(self, event: Event) -> bool:
        """Return True if the transition table allows the event in this state."""
        events = self.TRANSITIONS[self.is_initiator].get(self.state)
        return events is not None and event in events

    def handle(self, event: Event, *arguments: Any) -> list[Effect]:
        """Call the handler of the event."""
        effects: list[Effect] = getattr(self, HANDLERS[event])(*arguments)
        return effects

    def end(self, state: State) -> list[Effect]:
        """End the session as DONE or DROPPED."""
        self.state = state
        return self.exchanges.remove(self)


@dataclass(frozen=True, slots=True)
class LocalModel:
    """The model of a peer, as others see it, and the cost of its exchanges on this machine.

    Attributes:
        fingerprint: The same for all members of a swarm.
        elements: Float32 elements of the weights that exchanges carry.
        trained_elements: Elements of one optimizer key. A key names one part of the optimizer's state, for example
            Adam's first moments, which has a value for each trained weight.
        frozen_elements: Elements of the weights that only a newcomer gets, unless its own are the same.
        bits_elements: Elements of the bits of other tensors, which only a newcomer gets.
        machine: The costs of an exchange here.
    """

    fingerprint: str
    elements: int
    trained_elements: int = 0
    frozen_elements: int = 0
    bits_elements: int = 0
    machine: Machine = COMPILED


@dataclass(slots=True)
class Local:
    """The current state of the node, as exchanges read it. Peer owns and updates it.

    It holds facts about the model, the run and its weights, the training loop, the member's standing and the machine.
    """

    fingerprint: str
    elements: int  # Weights that exchanges carry.
    trained_elements: int  # Elements of one optimizer key, as in LocalModel.
    frozen_elements: int = 0  # Frozen weights, which a newcomer gets after the others.
    bits_elements: int = 0  # The bits of other tensors, which a newcomer gets after those.
    frozen_hash: bytes | None = b""  # Hash of the frozen weights; None while it is computed, empty if there is none.
    run_id: bytes = b""  # Empty before the node has a run.
    version: float = 0.0
    ready: bool = False  # The node holds the weights of its run, and may train, mix and give them.
    sound: bool = True  # No weight is known to be NaN or infinite; an unsound peer is not ready.
    optimizer_keys: tuple[str, ...] = ()  # The parts of the optimizer's state that a newcomer can get.
    optimizer_scalars: tuple[tuple[str, float], ...] = ()  # Its single numbers by name, for example the step count.
    settling: bool = False  # ``node.settle`` mixes all members with the plain mean until they agree.
    paused: bool = False  # No exchange begins: before and after it settles, the loop's weights stay as they are.
    boundary_at: float = 0.0  # Time at which the training loop was last at a step boundary.
    steps: int = 0  # Steps of the training loop in this life, as last reported.
    samples: int = 0  # Samples of these steps.
    last_mixes: int = 0  # Mixes that we still want before we leave; 0 unless we do.
    mixed_steps: int = 0  # Steps that the weights held at the snapshot of the last finished exchange.
    finished: bool = False  # The run has reached its end.
    left: bool = False  # This peer has told the others that it leaves.
    machine: Machine = COMPILED  # Cost of codecs on this machine.
    steps_per_mix: int | None = None  # Local steps from one mix to the next at present; None if a clock times mixes.
    progress: RunProgress = field(default_factory=RunProgress)

    @property
    def weights(self) -> int:
        """Return the number of elements of all weights and bits."""
        return self.frozen_stop + self.bits_elements

    @property
    def frozen_stop(self) -> int:
        """Return the end of the frozen weights, where the bits begin."""
        return self.elements + self.frozen_elements


def session_class(config: Config) -> type[Session]:
    """Return the session class of this configuration; ``MIXINGS`` names its module."""
    return class_at(MIXINGS[config.mixing].home)


def settlement_class() -> type[Session]:
    """Return the session class of members that settle, whatever their configuration."""
    return class_at("settling.settlement:Settlement")


def class_at(home: str) -> type[Session]:
    module, _, name = home.partition(":")
    kind: type[Session] = getattr(import_module(f"gossip.exchange.{module}"), name)
    return kind
