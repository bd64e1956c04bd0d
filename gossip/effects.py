"""Effects: the actions that a peer asks its driver for. The driver performs them in order and never awaits between."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from gossip.arithmetic.subsets import ALL, Subset
from gossip.ids import Address, PeerId
from gossip.wire.messages import Message

__all__ = [
    "Adopt", "Confirm", "CopyFrozen", "CopyPiece", "Dial", "Effect", "Gather", "HashFrozen", "LookUp",
    "MemberChanged", "MemberState", "Merge", "Mix", "Notice", "ReceivePiece", "Release", "Rename", "Restore", "Send",
    "Serve", "Snapshot", "Transfer", "TryDial", "UseLastSnapshot",
]  # fmt: skip


class MemberState(Enum):
    """The state in which we hold a member."""

    ALIVE = "alive"
    SUSPECT = "suspect"
    DEAD = "dead"
    LEFT = "left"


@dataclass(frozen=True, slots=True)
class Send:
    """Send a message to a peer.

    It goes over the link on which its session began, else over the newest link. Without a link, dial the address in its
    record first; without an address, drop the message. Outcome and Settled go over the newest link, like an Offer: the
    old link may have broken.
    """

    to: PeerId
    message: Message


@dataclass(frozen=True, slots=True)
class Dial:
    """Open a link to an address. ``expect`` is the id that must answer there; None for a seed."""

    address: Address
    expect: PeerId | None = None


@dataclass(frozen=True, slots=True)
class LookUp:
    """Look up the seeds and report ``on_seeds_found``; do nothing if a look-up is in progress.

    Only a peer whose ``Bootstrap.looks_up`` is set emits it.
    """


@dataclass(frozen=True, slots=True)
class TryDial:
    """Find out for ``asker`` whether ``address`` accepts a TCP connection; report with ``on_dial_tried``."""

    asker: PeerId
    address: Address


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Copy the weights that exchanges carry at the next step boundary for this session; report ``on_snapshotted``.

    ``part`` names the elements that the exchange mixes; the others may be left out. ``pushes`` is the number of
    partners that this snapshot is pushed to (0: it is exchanged). The mass that they get is taken from the model's at
    the same boundary, and reported.
    """

    session: int
    pushes: int = 0
    part: Subset = ALL


@dataclass(frozen=True, slots=True)
class CopyPiece:
    """Copy elements [start, stop) for a newcomer at the next step boundary; report ``on_snapshotted``.

    The range lies within the weights that exchanges carry, or within the optimizer's state.
    """

    session: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class UseLastSnapshot:
    """Use the last snapshot of the weights for this session, since the training loop is paused; report ``on_recalled``.

    If there is none, take one at the next boundary, as for Snapshot.
    """

    session: int


@dataclass(frozen=True, slots=True)
class CopyFrozen:
    """Copy frozen elements [start, stop) for a newcomer, at any time: no step changes them. Report ``on_recalled``."""

    session: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class HashFrozen:
    """Hash the frozen weights, elements [start, stop), at any time; report ``on_frozen_hashed``, empty if that fails.

    The hash is BLAKE2b-256 of the values as little-endian float32. A new request replaces one in progress.
    """

    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Transfer:
    """Stream the session's snapshot to the partner and receive the partner's at the same time.

    Both streams hold only the elements of ``part``. Report ``on_streamed`` once all that comes back is complete, or
    ``on_failed``; the latter alone if nothing comes back.
    """

    session: int
    partner: PeerId
    codec: str
    part: Subset = ALL
    sends: bool = True
    receives: bool = True


@dataclass(frozen=True, slots=True)
class Gather:
    """Average with a group, as member number ``place``.

    Send each of ``members`` its slice of the session's snapshot. Average the received slices
    (:func:`gossip.arithmetic.group_mean.group_mean`) and send the mean to all. Report ``on_gathered`` when all means
    are complete, or ``on_failed``. The effect is repeated once a missing link exists.
    """

    session: int
    members: tuple[PeerId, ...]
    place: int
    codec: str


@dataclass(frozen=True, slots=True)
class Mix:
    """Apply ``x += shift(snapshot, difference, weight)`` at the next step boundary, since all sides have committed.

    ``plain``: take the mean, without outer momentum. ``credit``: the weight of this mix in
    :class:`gossip.arithmetic.correction.Correction`. ``every``: the local steps of an interval from now on, for the
    correction (0: no change).
    """

    session: int
    weight: float
    plain: bool = False
    credit: float = 0.0
    every: int = 0


@dataclass(frozen=True, slots=True)
class Merge:
    """Apply a pushed vector: at the next step boundary ``x += m / (M + m) (p - x)``, then ``M += m``.

    ``M`` is the model's mass and ``p`` the received vector. If the session received no vector, a push of ours
    failed, and its own snapshot is merged back.
    """

    session: int
    mass: float


@dataclass(frozen=True, slots=True)
class Rename:
    """Move the snapshot of ``session`` to ``to``, a session number that the last partner does not know.

    Drop data that still arrives for ``session``.
    """

    session: int
    to: int


@dataclass(frozen=True, slots=True)
class Release:
    """End the session: stop its streams and free its buffers. After a Mix, free them once the mix is applied."""

    session: int


@dataclass(frozen=True, slots=True)
class Serve:
    """Stream elements [start, stop) of the session's snapshot to a newcomer, as raw float32."""

    session: int
    partner: PeerId
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class ReceivePiece:
    """Receive elements [start, stop) into the joining vector of ``size`` elements.

    Report ``on_collected`` as chunks arrive, and ``on_failed`` if they stop. ``compare``: leave the vector unchanged,
    and report ``on_compared`` with the distance of the received elements from it.
    """

    session: int
    partner: PeerId
    start: int
    stop: int
    size: int
    compare: bool = False


@dataclass(frozen=True, slots=True)
class Adopt:
    """Overwrite the weights (and optimizer state) with the joining vector; report ``on_adopted``.

    Do so at the next step boundary: the vector is complete. ``trial``: keep the old weights until Confirm or Restore,
    and report their distance from the new ones. If they cannot be kept, do not overwrite them; report ``on_not_kept``.
    ``frozen``: False if the vector lacks the frozen weights, and those that are here stay.
    """

    optimizer_keys: tuple[str, ...]
    optimizer_scalars: tuple[tuple[str, float], ...]
    trial: bool = False
    frozen: bool = True


@dataclass(frozen=True, slots=True)
class Confirm:
    """End a trial with the new weights: the old ones may be freed."""


@dataclass(frozen=True, slots=True)
class Restore:
    """End a trial with the old weights: restore them at the next step boundary, and report ``on_restored``."""


@dataclass(frozen=True, slots=True)
class MemberChanged:
    """The state of a contacted member changed. ``before`` is None for a new contact."""

    peer: PeerId
    before: MemberState | None
    after: MemberState


@dataclass(frozen=True, slots=True)
class Notice:
    """A message that the user sees once: a kind for logs, and a sentence."""

    kind: str
    sentence: str


Effect = (
    Send | Dial | LookUp | TryDial | Snapshot | CopyPiece | UseLastSnapshot | CopyFrozen | HashFrozen | Transfer
    | Gather | Mix | Merge | Rename | Release | Serve | ReceivePiece | Adopt | Confirm | Restore | MemberChanged
    | Notice
)  # fmt: skip
