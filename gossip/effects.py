"""Effects: the actions that a peer asks its driver for.

The driver performs them in order and never awaits between. Methods ``on_...`` are reports: the driver calls them on the
peer when an action has ended. CONTRACT.md lists the reports of each effect, failures included.

Terms:

- A *session* is the number under which a peer carries out one exchange, or one transfer of a piece to a newcomer.
- A *step boundary* is the moment inside ``node.step()`` at which the weights do not change. Only there the driver may
  copy or change weights that are trained.
- A *snapshot* is a copy that is taken at a boundary; ``on_snapshotted`` reports it, and with it that the training loop
  goes on. ``on_recalled`` reports a copy that needed no boundary: an earlier snapshot, or frozen weights. The loop may
  be paused.
- A *newcomer* fetches the state of a run, weights and optimizer state, from its *donors* into a *joining vector*. A
  *piece* is a range of this state.
- In a *trial* another run's weights replace ours, and the training losses decide whether they stay.
"""

from dataclasses import dataclass
from enum import Enum

from gossip.arithmetic.moments import MomentForm
from gossip.arithmetic.subsets import ALL, Subset
from gossip.ids import Address, PeerId
from gossip.wire.messages import Message


class MemberState(Enum):
    """The state of a member, as far as we know."""

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
class OpenPort:
    """Ask our router to pass connections to a port of ours on; report ``on_port``, then and when that changes.

    Port 0 gives the opened port back.
    """

    port: int


@dataclass(frozen=True, slots=True)
class Punch:
    """Open a link to an undialable member, while it does the same; report ``on_linked`` or ``on_not_met``.

    Connect from the local port of the link to ``via``, again and again for a few seconds. ``via`` None: from any port,
    since the member is in the same network. The side that ``dials`` plays the dialler's part in the handshake.
    """

    peer: PeerId
    address: Address
    via: PeerId | None
    dials: bool


@dataclass(frozen=True, slots=True)
class Tunnel:
    """Open a link to a member through a relay, while it does the same; report ``on_linked`` or ``on_not_met``.

    Both open a connection to the relay's ``address`` that joins under ``name``. The relay passes their bytes on.
    """

    peer: PeerId
    relay: PeerId
    address: Address
    name: bytes
    dials: bool


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Copy the weights that exchanges carry at the next step boundary for this session; report ``on_snapshotted``.

    ``part`` names the elements that the exchange mixes; the others may be left out. ``pushes`` is the number of
    partners that this snapshot is pushed to (0: it is exchanged). Take the mass that they get from the model's mass at
    the same boundary, and report it.
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

    If there is none, take one at the next boundary and report ``on_snapshotted``, as for Snapshot.
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
    ``on_failed``; the latter alone if nothing comes back. ``has_statistics``: False where statistics are mixed as
    weights are, since no local step moves them.
    """

    session: int
    partner: PeerId
    codec: str
    part: Subset = ALL
    sends: bool = True
    receives: bool = True
    has_statistics: bool = True


@dataclass(frozen=True, slots=True)
class LeaveOut:
    """Go on with a group's average without some members: without their values, and with ``means`` without their means.

    Where a mean is missing our weights stay as they are. ``on_gathered`` names the members that were left out.
    """

    session: int
    peers: tuple[PeerId, ...] | None  # None: all members whose values or means have not come.
    means: bool


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
    """Mix the session's vectors into the weights at the next step boundary, since all sides have committed.

    The *difference* is the partner's vector (in a group: the mean) minus the session's snapshot. The outer step turns
    ``weight`` times the difference into a shift (:meth:`gossip.arithmetic.outer_step.OuterStep.shift`); ``weight`` is a
    share from 0 to 1. Add the shift to the weights and overwrite nothing, so that steps taken meanwhile are kept.

    ``plain``: leave out the outer momentum, so that the shift is the weighted difference itself. ``joins``: take all
    of the partner's vector or nothing of it, as :func:`gossip.arithmetic.mixing.join_weight` says, instead of
    ``weight``. The other two fields are for :meth:`gossip.arithmetic.correction.Correction.learn`. ``credit``: how much
    the correction learns from this mix, from 0 to 1. ``interval_steps``: the number of local steps between two mixes
    from now on (0: as before).
    """

    session: int
    weight: float
    plain: bool = False
    credit: float = 0.0
    interval_steps: int = 0
    joins: bool = False


@dataclass(frozen=True, slots=True)
class Merge:
    """Merge a pushed vector into the weights at the next step boundary: ``x += m / (M + m) (p - x)``, then ``M += m``.

    ``x`` are the weights, ``M`` is the model's mass, and ``m`` is ``mass``, which came with the vector ``p``. A session
    without a received vector is a failed push of ours. Its own snapshot is then ``p``, so that the mass that it took
    comes back.
    """

    session: int
    mass: float


@dataclass(frozen=True, slots=True)
class Rename:
    """Move the snapshot of ``session`` to the new session number ``to``, and drop data that arrives for ``session``.

    The snapshot goes to another partner. The last one knows only the old number, so that its late messages and chunks
    cannot count as the next one's.
    """

    session: int
    to: int


@dataclass(frozen=True, slots=True)
class Release:
    """End the session: stop its streams and free its buffers. After a Mix, free them once the mix is applied."""

    session: int


@dataclass(frozen=True, slots=True)
class SendPiece:
    """Stream elements [start, stop) of the session's copy to a newcomer, as raw float32.

    Report ``on_served`` at the end, or ``on_failed``. ReceivePiece is the newcomer's end.
    """

    session: int
    partner: PeerId
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class ReceivePiece:
    """Receive elements [start, stop) from a donor into the joining vector, which has ``size`` elements.

    Report ``on_collected`` as chunks arrive, or ``on_failed`` if they stop. ``compare``: leave the vector unchanged,
    and report ``on_compared`` with the distance of the received elements from it. SendPiece is the donor's end.
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

    The vector is complete; do so at the next step boundary. ``trial``: keep the old weights until Confirm or Restore,
    and report their distance from the new ones. If they cannot be kept, do not overwrite them; report ``on_not_kept``.
    ``frozen``: False if the vector lacks the frozen weights, so that the present ones stay.
    """

    optimizer_keys: tuple[str, ...]
    optimizer_scalars: tuple[tuple[str, float], ...]
    trial: bool = False
    frozen: bool = True


@dataclass(frozen=True, slots=True)
class CopyMoments:
    """Copy elements [start, stop) of each of the optimizer's moments for a member, at the next step boundary.

    Encode the copy (:meth:`gossip.arithmetic.moments.MomentForm.encode`) and report ``on_snapshotted``, or
    ``on_not_taken``.
    """

    session: int
    form: MomentForm
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class SendMoments:
    """Stream the session's moments to the member. Report ``on_served`` at the end, or ``on_failed``."""

    session: int
    partner: PeerId
    form: MomentForm
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class ReceiveMoments:
    """Receive elements [start, stop) of each of a partner's moments; report ``on_moments``, or ``on_failed``.

    SendMoments is the partner's end.
    """

    session: int
    partner: PeerId
    form: MomentForm
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class MixMoments:
    """Mix the session's moments into the optimizer's at the next step boundary."""

    session: int


@dataclass(frozen=True, slots=True)
class Confirm:
    """End a trial and keep the new weights; free the old ones."""


@dataclass(frozen=True, slots=True)
class Restore:
    """End a trial and restore the old weights at the next step boundary; report ``on_restored``."""


@dataclass(frozen=True, slots=True)
class MemberChanged:
    """The state of a contacted member changed. ``before`` is None for a new contact."""

    peer: PeerId
    before: MemberState | None
    after: MemberState


@dataclass(frozen=True, slots=True)
class Notice:
    """A message that the user sees once: a kind for logs, and a sentence.

    With a ``session``, ``{tensor}`` in the sentence stands for what carries most of that session's difference.
    """

    kind: str
    sentence: str
    session: int | None = None


Effect = (
    Send | Dial | LookUp | TryDial | Punch | Tunnel | OpenPort | Snapshot | CopyPiece | UseLastSnapshot | CopyFrozen
    | HashFrozen | Transfer | Gather | LeaveOut | Mix | Merge | Rename | Release | SendPiece | ReceivePiece | Adopt
    | Confirm | Restore | MemberChanged | Notice | CopyMoments | SendMoments | ReceiveMoments | MixMoments
)  # fmt: skip
