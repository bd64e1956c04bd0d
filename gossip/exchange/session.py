"""What pairs, pushes and groups have in common: one exchange as one side of it has it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar

from gossip.codecs import COMPILED, Machine
from gossip.config import Config
from gossip.config.mixings import MIXINGS
from gossip.effects import Effect, MemberState, Send
from gossip.exchange.progress import RunProgress
from gossip.exchange.transitions import Event, State, Table
from gossip.ids import UNSTATED, Claim, PeerId
from gossip.wire.messages import Invite, Offer, Refuse

if TYPE_CHECKING:
    from gossip.exchange.exchanges import Exchanges

__all__ = [
    "AT_ONCE",
    "MAX_GAP",
    "MAX_VERSION",
    "Event",
    "Local",
    "Session",
    "State",
    "kind_of",
    "version_gap",
    "within",
]

AT_ONCE = 32  # of the neighbours with all of whom a mix is, so many at most: a vector each. Others the next time
MAX_VERSION = 2**53  # what a record may hold: a mean with more would make our own record unacceptable to everybody
MAX_GAP = 1_000.0  # rounds that one exchange counts for: few mixes bring back who was long away, none reach 2^53


def within(version: float) -> float:
    """A version that we may sign: of no member's making can ours become one that others refuse."""
    return min(max(0.0, version), MAX_VERSION / 2)  # of nan 0


def version_gap(theirs: float, ours: float) -> float:
    """How much older their weights are than ours, in mixing rounds, of which one exchange counts ``MAX_GAP`` at most:
    weights travel no further in one exchange either, and a version is a claim."""
    return min(max(theirs - ours, -MAX_GAP), MAX_GAP)


@dataclass(slots=True, eq=False, kw_only=True)
class Session:
    """One side's view. ``ours`` is the version that its Offer or Accept states, and ``claim`` the progress."""

    # For the initiator and for the responder: what may happen in each state, and what state may be next. Nothing else
    # happens to a session, whoever says it: Exchanges asks here before it hands anything on.
    TRANSITIONS: ClassVar[Table]
    MANY: ClassVar[bool] = False  # more than two take part

    exchanges: Exchanges[Any] = field(repr=False)  # the table that it is in
    session: int
    initiator: bool
    since: float
    deadline: float
    state: State = State.PREPARING
    ours: float = 0.0
    claim: Claim = UNSTATED
    steps: int = 0  # of the training loop at the snapshot
    parked: bool = False

    @property
    def others(self) -> tuple[PeerId, ...]:
        """With whom, as far as that is known."""
        raise NotImplementedError

    @property
    def idle(self) -> bool:
        """Whether it takes no slot."""
        return self.state is State.DOUBT

    # -- how one begins ------------------------------------------------------------------------------------------
    @classmethod
    def start(cls, exchanges: Exchanges[Any], now: float) -> list[Effect]:
        """A mix of our own is due: begin it, where there is room and somebody to ask."""
        raise NotImplementedError

    @classmethod
    def answer(cls, exchanges: Exchanges[Any], sender: PeerId, offer: Offer, now: float) -> list[Effect]:
        """Another offers a pair or a push."""
        return [Send(sender, Refuse(offer.session, "mixing"))]

    @classmethod
    def invite(cls, exchanges: Exchanges[Any], sender: PeerId, invite: Invite, now: float) -> list[Effect]:
        """Another invites to a group."""
        return [Send(sender, Refuse(invite.session, "mixing"))]

    @staticmethod
    def most_doubts(exchanges: Exchanges[Any]) -> int:
        """How many are asked after at once: each holds two vectors."""
        raise NotImplementedError

    # -- what is said and found out ------------------------------------------------------------------------------
    def hears(self, event: Event, sender: PeerId) -> bool:
        """Whether it is this member's to say."""
        raise NotImplementedError

    @classmethod
    def unheard(cls, exchanges: Exchanges[Any], event: Event, sender: PeerId, session: int) -> list[Effect]:
        """What a member is answered that says something of a session which is over, or none of its own, or not where
        it stands."""
        raise NotImplementedError

    def lost(self, state: Callable[[PeerId], MemberState | None]) -> list[PeerId]:
        """Those that it waits for in vain, by what is held of members."""
        return []

    def orphaned(self, state: Callable[[PeerId], MemberState | None]) -> bool:
        """Whether nobody is left who knows how it ended."""
        return False

    def without(self, peer: PeerId, now: float) -> list[Effect]:
        """There is no link to this member, and perhaps none can be made."""
        raise NotImplementedError

    def allows(self, event: Event) -> bool:
        """Whether this may happen now."""
        here = self.TRANSITIONS[self.initiator].get(self.state)
        return here is not None and event in here

    def happens(self, event: Event, *what: Any) -> list[Effect]:
        """The method of the event's name does what follows."""
        effects: list[Effect] = getattr(self, event)(*what)
        return effects

    def end(self, state: State) -> list[Effect]:
        """It is over: DONE or DROPPED."""
        self.state = state
        return self.exchanges.end(self)


@dataclass(slots=True)
class Local:
    """What the exchanges need to know of their own node at the moment; owned and updated by Peer."""

    fingerprint: str
    elements: int  # of the weights that exchanges carry
    trained_elements: int  # of one optimizer key
    frozen_elements: int = 0  # of the weights that nobody changes, which a newcomer gets behind the others
    genesis: bytes = b""
    version: float = 0.0
    ready: bool = False
    sound: bool = True  # no weight is NaN or infinite, as far as is known; an unsound peer is not ready
    optimizer_keys: tuple[str, ...] = ()
    settling: bool = False
    boundary_at: float = 0.0  # when the training loop was last seen at a step boundary
    steps: int = 0  # of the training loop
    mixed_steps: int = 0  # of them, those that the weights held at the snapshot of the last finished exchange
    finished: bool = False  # the run has reached its end
    machine: Machine = COMPILED  # what codecs cost here
    every: int | None = None  # local steps from one mix to the next at present
    progress: RunProgress = field(default_factory=RunProgress)

    @property
    def weights(self) -> int:
        """Elements of all weights."""
        return self.elements + self.frozen_elements


def kind_of(config: Config) -> type[Session]:
    """What the exchanges of this configuration are: ``MIXINGS`` says where each class lies."""
    module, _, name = MIXINGS[config.mixing].home.partition(":")
    kind: type[Session] = getattr(import_module(f"gossip.exchange.{module}"), name)
    return kind
