"""The events of a node, for programs. ``str(event)`` is a sentence for users."""

from dataclasses import dataclass

__all__ = ["ExchangeEvent", "MemberEvent", "NodeEvent", "NoticeEvent", "RunEvent", "SettledEvent", "StalledEvent"]

STATE_TEXTS = {"alive": "is alive", "suspect": "does not answer", "dead": "is dead", "left": "has left"}


@dataclass(frozen=True, slots=True)
class NodeEvent:
    """The base of all events. ``kind`` is one of :data:`node.observe.notices.LEVELS`; ``at_s`` is in unix seconds."""

    kind: str
    at_s: float


@dataclass(frozen=True, slots=True)
class NoticeEvent(NodeEvent):
    """A notice for the user, as the log has it: alone, together, refused, seed, loss, state, suspicious, ..."""

    sentence: str

    def __str__(self) -> str:
        return self.sentence


@dataclass(frozen=True, slots=True)
class RunEvent(NoticeEvent):
    """An event of the run that this node holds: started, joined, merged, put back, finished."""

    run: str  # 32 hexadecimal digits.


@dataclass(frozen=True, slots=True)
class StalledEvent(NoticeEvent):
    """A loop that has reached no step boundary for ``seconds`` (``stalled``), or reaches one again (``moving``)."""

    seconds: float


@dataclass(frozen=True, slots=True)
class SettledEvent(NoticeEvent):
    """The end of ``node.settle``.

    Attributes:
        distance: The largest difference of a tensor from the last partners', relative to its norm: 0 if all nodes have
            the same weights. None if it is unknown.
        tensor: The name of that tensor; "" if there is none.
        digest: BLAKE2b-64 of the averaged weights as little-endian float32, 16 hexadecimal digits.
    """

    distance: float | None
    tensor: str
    digest: str


@dataclass(frozen=True, slots=True)
class MemberEvent(NodeEvent):
    """A change of a member's state: alive, suspect, dead or left. With ``before`` None the member is new."""

    id: str  # 32 hexadecimal digits.
    before: str | None
    after: str

    def __str__(self) -> str:
        return f"Member {self.id[:8]} {STATE_TEXTS[self.after]}."


@dataclass(frozen=True, slots=True)
class ExchangeEvent(NodeEvent):
    """An exchange: ``exchange.begun`` when its streams begin, then ``exchange.done`` or ``exchange.failed``.

    An unanswered offer fails without having begun.

    Attributes:
        session: The session's number, the same in all events of an exchange.
        partners: Ids of 32 hexadecimal digits: one, or the others of a group. Empty if the partner that did not answer
            is unknown.
        codec: The codec of the weights.
        seconds: The time since the exchange asked for a snapshot.
        bytes_sent: Encoded weights, without framing.
        bytes_received: The same for the other direction.
        distance: The distance from the partner's weights, or from a group's mean, if they arrived whole. A subset's
            distance is scaled up to all weights. None if it is unknown.
        reason: Why it failed: one of gossip.exchange.session_table.REASONS, or "other".
    """

    session: int
    partners: tuple[str, ...]
    codec: str
    seconds: float = 0.0
    bytes_sent: int = 0
    bytes_received: int = 0
    distance: float | None = None
    reason: str = ""

    @property
    def partner(self) -> str:
        """Return the first partner, or "" if none is known."""
        return self.partners[0] if self.partners else ""

    def __str__(self) -> str:
        partners = " and ".join(partner[:8] for partner in self.partners) or "an unknown partner"
        match self.kind:
            case "exchange.begun":
                return f"Exchange with {partners} begins, in {self.codec}."
            case "exchange.done":
                moved = f"{self.bytes_sent / 1e6:.3g} MB out, {self.bytes_received / 1e6:.3g} MB in"
                apart = "" if self.distance is None else f", {self.distance:.3g} apart"
                return f"Exchange with {partners} done in {self.seconds:.3f} s, {moved}{apart}."
        return f"Exchange with {partners} failed after {self.seconds:.3f} s: {self.reason}."
