"""What a peer wants done. A driver performs effects in order, without awaiting between them; a peer calls nobody."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from gossip.arithmetic.subsets import ALL, Subset
from gossip.ids import Address, PeerId
from gossip.wire.messages import Message

__all__ = [
    "Adopt", "Collect", "Confirm", "CopyFrozen", "CopyPiece", "Dial", "Effect", "Gather", "LookUp", "MemberChanged",
    "MemberState", "Merge", "Mix", "Notice", "Recall", "Release", "Rename", "Restore", "Send", "Serve", "Snapshot",
    "Transfer", "TryDial",
]  # fmt: skip


class MemberState(Enum):
    """What we hold a member to be."""

    ALIVE = "alive"
    SUSPECT = "suspect"
    DEAD = "dead"
    LEFT = "left"


@dataclass(frozen=True, slots=True)
class Send:
    """Send a message to a peer: over the link its session began on, else over the newest link, else dial the address in
    its record first (where there is none, drop the message). What asks how an exchange ended, and the answer, go over
    the newest link as an offer does: the old one may be the reason for asking."""

    to: PeerId
    message: Message


@dataclass(frozen=True, slots=True)
class Dial:
    """Open a link to an address; ``expect`` is the id that must answer there, None for a seed."""

    address: Address
    expect: PeerId | None = None


@dataclass(frozen=True, slots=True)
class LookUp:
    """Look up where the seeds are, and report them with ``seeded``. Said while a look is under way, it asks for no
    second one. Only a peer that was told that its seeds are looked up says it."""


@dataclass(frozen=True, slots=True)
class TryDial:
    """Find out whether ``address`` accepts a TCP connection, for a member that asked; report with ``dial_tried``."""

    asker: PeerId
    address: Address


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Copy the live weights that exchanges carry at the next step boundary and keep them under this session; report
    with ``snapshotted``. ``part``: which elements of them the exchange mixes; no others are asked for.

    ``pushes``: this snapshot is given away to so many partners (0: it is exchanged). The mass that this one carries is
    taken from the model's at the same boundary, and reported.
    """

    session: int
    pushes: int = 0
    part: Subset = ALL


@dataclass(frozen=True, slots=True)
class CopyPiece:
    """A newcomer waits for elements [start, stop) of what it takes, all of the weights that exchanges carry or all of
    the optimizer's state: copy them at the next step boundary, keep them under this session and report with
    ``snapshotted``."""

    session: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Recall:
    """The training loop stands, and a newcomer waits: keep the last snapshot of the weights that there is under this
    session, in place of one of the next boundary, and report with ``recalled``. Where there is none, that of the next
    boundary is taken, as Snapshot says."""

    session: int


@dataclass(frozen=True, slots=True)
class CopyFrozen:
    """A newcomer waits for elements [start, stop) of the weights, of which nobody changes any: copy them for this
    session beside the training loop, at its boundary or not, and report with ``recalled``."""

    session: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Transfer:
    """Stream the session's snapshot to the partner and theirs to us at once, the elements of ``part`` alone; report
    ``streamed`` (or ``pushed``, when nothing comes back) or ``failed``."""

    session: int
    partner: PeerId
    codec: str
    part: Subset = ALL
    sends: bool = True
    receives: bool = True


@dataclass(frozen=True, slots=True)
class Gather:
    """Send each of ``members`` its slice of the session's snapshot, make ours the mean of what comes
    (:func:`gossip.arithmetic.group_mean.group_mean`), send that to all, and report ``gathered`` when all slices are
    means; or ``failed``. We are the ``place``-th of them. Said again when there is a link to one to whom there was
    none."""

    session: int
    members: tuple[PeerId, ...]
    place: int
    codec: str


@dataclass(frozen=True, slots=True)
class Mix:
    """Both sides committed: at the next step boundary apply ``x += shift(snapshot, difference, weight)``.

    ``plain``: without outer momentum, the mean. ``credit``: how far it teaches
    :class:`gossip.arithmetic.correction.Correction` anything, which counts in intervals of ``every`` local steps from
    then on; 0: as before.
    """

    session: int
    weight: float
    plain: bool = False
    credit: float = 0.0
    every: int = 0


@dataclass(frozen=True, slots=True)
class Merge:
    """A vector with a mass is ours: at the next step boundary ``x += m / (M + m) (p - x)``, then ``M += m``, with ``M``
    the model's mass. ``p`` is what the session received; where it received nothing, its own snapshot comes back."""

    session: int
    mass: float


@dataclass(frozen=True, slots=True)
class Rename:
    """The snapshot of ``session`` is from now on that of ``to``, a number that no other partner knows; what still comes
    for the old number belongs to nothing."""

    session: int
    to: int


@dataclass(frozen=True, slots=True)
class Release:
    """The session is over: stop its streams and forget its buffers (after Mix: once it is applied)."""

    session: int


@dataclass(frozen=True, slots=True)
class Serve:
    """Stream elements [start, stop) of the session's snapshot to a newcomer, as raw float32."""

    session: int
    partner: PeerId
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Collect:
    """Receive elements [start, stop) into the joining vector of ``size`` elements; report ``collected`` as chunks
    arrive, and ``failed`` when they stop. ``compare``: leave the vector as it is, and report with ``compared`` how far
    what came is from what it holds there."""

    session: int
    partner: PeerId
    start: int
    stop: int
    size: int
    compare: bool = False


@dataclass(frozen=True, slots=True)
class Adopt:
    """The joining vector is whole: overwrite the live weights (and optimizer state) with it at the next step boundary,
    and report with ``adopted``. ``trial``: keep those that were there until Confirm or Restore, and report how far the
    two are apart; what could not be kept is not overwritten, and reported with ``not_kept``."""

    optimizer_keys: tuple[str, ...]
    optimizer_scalars: tuple[tuple[str, float], ...]
    trial: bool = False


@dataclass(frozen=True, slots=True)
class Confirm:
    """The weights on trial stay: those kept may go."""


@dataclass(frozen=True, slots=True)
class Restore:
    """The weights on trial go: overwrite them with those kept at the next step boundary, and report ``restored``."""


@dataclass(frozen=True, slots=True)
class MemberChanged:
    """The state in which we hold a member that we met changed; ``before`` is None for one that we have just met."""

    peer: PeerId
    before: MemberState | None
    after: MemberState


@dataclass(frozen=True, slots=True)
class Notice:
    """Something a person should read, once: a kind for logs, and a sentence."""

    kind: str
    sentence: str


Effect = (
    Send | Dial | LookUp | TryDial | Snapshot | CopyPiece | Recall | CopyFrozen | Transfer | Gather | Mix | Merge
    | Rename | Release | Serve | Collect | Adopt | Confirm | Restore | MemberChanged | Notice
)  # fmt: skip
