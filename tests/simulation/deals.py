"""The judge's records of one exchange: all sides of a pair or group, and the place of a push's mass."""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING

from gossip.ids import PeerId

if TYPE_CHECKING:
    from tests.simulation.host import Host


class Side:
    """One host's part in an exchange of vectors."""

    __slots__ = ("begun_s", "committed_s", "ended", "excused", "mixed", "shift", "weight")

    def __init__(self, now: float) -> None:
        self.begun_s = now
        self.committed_s: float | None = None
        self.mixed = self.ended = False
        self.excused = ""  # why this side alone may have ended otherwise
        self.weight = 0.0
        self.shift: Fraction | float = 0


class Deal:
    """One exchange of a pair or group, with the records of all its sides."""

    __slots__ = ("inviter", "is_partial", "members", "session", "settled", "sides")

    def __init__(self, session: int, members: tuple[PeerId, ...], inviter: PeerId | None) -> None:
        self.session, self.members, self.inviter = session, members, inviter
        self.sides: dict[Host, Side] = {}
        self.settled = False
        self.is_partial = False  # A group that went on without members that were late, so that its mean may move.


class Push:
    """A mass on its way from its owner to a partner or back."""

    __slots__ = ("back", "doubted", "mass", "merged", "owner", "session", "since_s", "stolen", "taker", "total", "void")

    def __init__(self, owner: Host, session: int, mass: Fraction | float, total: Fraction | float, now: float) -> None:
        self.owner, self.session, self.mass, self.total, self.since_s = owner, session, mass, total, now
        self.merged = self.back = 0
        self.doubted = False  # taken back because the outcome could not be learned
        self.void = False  # its owner's weights have been replaced since
        self.stolen = False  # a liar has it
        self.taker: Host | None = None  # the host that merged it
