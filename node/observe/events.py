"""What happens to a node, for programs: what each event says. ``str(event)`` is the sentence for people."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ExchangeEvent", "MemberEvent", "NodeEvent", "NoticeEvent", "RunEvent", "StalledEvent"]

SAID = {"alive": "is alive", "suspect": "does not answer", "dead": "is dead", "left": "has left"}


@dataclass(frozen=True, slots=True)
class NodeEvent:
    """``kind``: one of :data:`node.observe.notices.LEVELS`; ``at_s``: unix seconds."""

    kind: str
    at_s: float


@dataclass(frozen=True, slots=True)
class NoticeEvent(NodeEvent):
    """What a person should read, as the log has it: alone, together, refused, seed, loss, state, suspicious, ..."""

    sentence: str

    def __str__(self) -> str:
        return self.sentence


@dataclass(frozen=True, slots=True)
class RunEvent(NoticeEvent):
    """Of the run that this node holds: started, joined, merged, put back, finished."""

    run: str  # 32 hexadecimal digits


@dataclass(frozen=True, slots=True)
class StalledEvent(NoticeEvent):
    """The loop reaches no step boundary (``stalled``), or does so again (``moving``), after so many seconds."""

    seconds: float


@dataclass(frozen=True, slots=True)
class MemberEvent(NodeEvent):
    """Another is held to be in another state than before: alive, suspect, dead, left; ``before`` None: just met."""

    id: str  # 32 hexadecimal digits
    before: str | None
    after: str

    def __str__(self) -> str:
        return f"Member {self.id[:8]} {SAID[self.after]}."


@dataclass(frozen=True, slots=True)
class ExchangeEvent(NodeEvent):
    """An exchange: ``exchange.begun`` when its streams begin, then ``exchange.done`` or ``exchange.failed``. An offer
    that nobody answered has failed and never begun.

    ``partners``: one, or the others of a group; none, where who did not answer is not known. ``seconds``: since the
    wish for a snapshot. Bytes are those of weights, encoded, without what goes around them. ``distance``: from the
    partner's weights, of a group from its mean, where they came whole; of a part as if it were of all.
    """

    session: int  # begun and done have the same
    partners: tuple[str, ...]  # 32 hexadecimal digits each
    codec: str
    seconds: float = 0.0
    bytes_sent: int = 0
    bytes_received: int = 0
    distance: float | None = None
    reason: str = ""  # why it failed: one of gossip.exchange.session_table.REASONS, or "other"

    @property
    def partner(self) -> str:
        """The first of them, "" where none is known."""
        return self.partners[0] if self.partners else ""

    def __str__(self) -> str:
        who = " and ".join(partner[:8] for partner in self.partners) or "nobody known"
        match self.kind:
            case "exchange.begun":
                return f"Exchange with {who} begins, in {self.codec}."
            case "exchange.done":
                moved = f"{self.bytes_sent / 1e6:.3g} MB out, {self.bytes_received / 1e6:.3g} MB in"
                apart = "" if self.distance is None else f", {self.distance:.3g} apart"
                return f"Exchange with {who} done in {self.seconds:.3f} s, {moved}{apart}."
        return f"Exchange with {who} failed after {self.seconds:.3f} s: {self.reason}."
