"""The base class of pairs, pushes and groups, and the state of the node that exchanges read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, ClassVar, Protocol

from gossip.codecs import COMPILED, Machine
from gossip.config import Config
from gossip.config.mixings import MIXINGS
from gossip.effects import Effect, MemberState, Send
from gossip.exchange.progress import RunProgress
from gossip.exchange.transitions import Event, State, Table
from gossip.ids import UNSTATED, Claim, PeerId
from gossip.wire.messages import Invite, Offer, Refuse

__all__ = [
    "AT_ONCE",
    "MAX_GAP",
    "MAX_VERSION",
    "Event",
    "Local",
    "LocalModel",
    "Session",
    "State",
    "kind_of",
    "version_gap",
    "within",
]

AT_ONCE = 32  # Limit of a mix with all neighbours: each needs a vector. Other neighbours follow the next time.
MAX_VERSION = 2**53  # Limit of a record: with a larger mean, all others would refuse our own record.
# Most rounds by which one exchange moves a version: few mixes bring back a member that was away, none reach 2^53.
MAX_GAP = 1_000.0


def within(version: float) -> float:
    """Clamp the version, so that no peer can push ours beyond what others accept."""
    return min(max(0.0, version), MAX_VERSION / 2)  # NaN becomes 0.


def version_gap(theirs: float, ours: float) -> float:
    """Return the staleness of our weights against theirs in mixing rounds, within ``MAX_GAP`` either way.

    The bound is needed because a version is only the partner's claim.
    """
    return min(max(theirs - ours, -MAX_GAP), MAX_GAP)


class SessionTable(Protocol):
    """The table that holds a session: a :class:`gossip.exchange.exchanges.Exchanges`."""

    def end(self, one: Session) -> list[Effect]:
        """Forget a session that has ended, and release what belongs to it."""


@dataclass(slots=True, eq=False, kw_only=True)
class Session:
    """One side of an exchange.

    ``ours`` and ``claim`` are the version and the progress that its Offer or Accept states.
    """

    # The events that each state of the initiator and of the responder allows, and the next states. Exchanges checks
    # them before it passes any event on.
    TRANSITIONS: ClassVar[Table]
    MANY: ClassVar[bool] = False  # True if more than two members take part.

    exchanges: SessionTable = field(repr=False)  # The table that holds it.
    session: int
    initiator: bool
    since: float
    deadline: float
    state: State = State.PREPARING
    ours: float = 0.0
    claim: Claim = UNSTATED
    steps: int = 0  # Step of the training loop at the snapshot.
    parked: bool = False

    @property
    def others(self) -> tuple[PeerId, ...]:
        """Return the other members, as far as they are known."""
        raise NotImplementedError

    @property
    def idle(self) -> bool:
        """Return True if it takes no slot."""
        return self.state is State.IN_DOUBT

    # -- beginning -----------------------------------------------------------------------------------------------
    @classmethod
    def start(cls, exchanges: Any, now: float) -> list[Effect]:
        """Begin a mix of our own, if there is room and a partner to ask."""
        raise NotImplementedError

    @classmethod
    def answer(cls, exchanges: Any, sender: PeerId, offer: Offer, now: float) -> list[Effect]:
        """Answer an offer of a pair or a push."""
        return [Send(sender, Refuse(offer.session, "mixing"))]

    @classmethod
    def invite(cls, exchanges: Any, sender: PeerId, invite: Invite, now: float) -> list[Effect]:
        """Answer an invitation to a group."""
        return [Send(sender, Refuse(invite.session, "mixing"))]

    @staticmethod
    def most_doubts(exchanges: Any) -> int:
        """Return how many exchanges may be in doubt at once: each holds two vectors."""
        raise NotImplementedError

    # -- messages and events -------------------------------------------------------------------------------------
    def accepts_from(self, event: Event, sender: PeerId) -> bool:
        """Return True if this event may come from this sender."""
        raise NotImplementedError

    @classmethod
    def on_stray(cls, exchanges: Any, event: Event, sender: PeerId, session: int) -> list[Effect]:
        """Answer a message about a session that has ended, is not the sender's, or does not allow the event now."""
        raise NotImplementedError

    def lost(self, state: Callable[[PeerId], MemberState | None]) -> list[PeerId]:
        """Return the members that it waits for in vain, given what we know of members."""
        return []

    def orphaned(self, state: Callable[[PeerId], MemberState | None]) -> bool:
        """Return True if no member is left that knows the outcome."""
        return False

    def without(self, peer: PeerId, now: float) -> list[Effect]:
        """Handle the loss of the last link to ``peer``; perhaps none can be made."""
        raise NotImplementedError

    def allows(self, event: Event) -> bool:
        """Return True if the transition table allows the event in this state."""
        here = self.TRANSITIONS[self.initiator].get(self.state)
        return here is not None and event in here

    def happens(self, event: Event, *what: Any) -> list[Effect]:
        """Call the method with the name of the event."""
        effects: list[Effect] = getattr(self, event)(*what)
        return effects

    def end(self, state: State) -> list[Effect]:
        """End the session as DONE or DROPPED."""
        self.state = state
        return self.exchanges.end(self)


@dataclass(frozen=True, slots=True)
class LocalModel:
    """The model of a peer, as others see it, and the cost of its exchanges on this machine.

    Attributes:
        fingerprint: The same for all members of a swarm.
        elements: Float32 elements of the weights that exchanges carry.
        trained_elements: Elements of one optimizer key.
        frozen_elements: Elements of the weights that only a newcomer gets.
        machine: The costs of an exchange here.
    """

    fingerprint: str
    elements: int
    trained_elements: int = 0
    frozen_elements: int = 0
    machine: Machine = COMPILED


@dataclass(slots=True)
class Local:
    """The current state of the node, as exchanges read it. Peer owns and updates it."""

    fingerprint: str
    elements: int  # Weights that exchanges carry.
    trained_elements: int  # Elements of one optimizer key.
    frozen_elements: int = 0  # Frozen weights, which a newcomer gets after the others.
    frozen_hash: bytes | None = b""  # Hash of the frozen weights; None while it is computed, empty if there is none.
    run_id: bytes = b""
    version: float = 0.0
    ready: bool = False
    sound: bool = True  # No weight is known to be NaN or infinite; an unsound peer is not ready.
    optimizer_keys: tuple[str, ...] = ()  # The parts of the optimizer's state that a newcomer can get.
    optimizer_scalars: tuple[tuple[str, float], ...] = ()
    settling: bool = False
    boundary_at: float = 0.0  # Time at which the training loop was last at a step boundary.
    steps: int = 0  # Steps of the training loop in this life, as last reported.
    samples: int = 0  # Samples of these steps.
    mixed_steps: int = 0  # Steps that the weights held at the snapshot of the last finished exchange.
    finished: bool = False  # The run has reached its end.
    left: bool = False  # This peer has said LEFT.
    machine: Machine = COMPILED  # Cost of codecs on this machine.
    every: int | None = None  # Local steps from one mix to the next at present.
    progress: RunProgress = field(default_factory=RunProgress)

    @property
    def weights(self) -> int:
        """Return the number of elements of all weights."""
        return self.elements + self.frozen_elements


def kind_of(config: Config) -> type[Session]:
    """Return the session class of this configuration; ``MIXINGS`` names its module."""
    module, _, name = MIXINGS[config.mixing].home.partition(":")
    kind: type[Session] = getattr(import_module(f"gossip.exchange.{module}"), name)
    return kind
