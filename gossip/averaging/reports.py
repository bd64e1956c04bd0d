"""The peer of an averager: the reports that it gets, and the facts that are read from it."""

from __future__ import annotations

import math
from typing import Protocol

from gossip.arithmetic.sketch import Floats
from gossip.effects import Effect
from gossip.ids import PeerId

__all__ = ["AveragerView", "Reports"]


class AveragerView(Protocol):
    """The facts about the peer that an averager reads, of :class:`gossip.view.PeerView`."""

    @property
    def elements(self) -> int: ...
    @property
    def ready(self) -> bool: ...
    @property
    def is_joining(self) -> bool: ...
    def needs_snapshot(self, session: int) -> bool: ...
    def has_exchange(self, session: int) -> bool: ...
    def has_donation(self, session: int) -> bool: ...


class Reports(Protocol):
    """The receiver of reports, a :class:`gossip.peer.Peer`. The effects of each report are performed at once.

    ``now`` is in seconds. ``difference_sq`` is ``|theirs - ours|^2`` and ``own_sq`` is ``|ours|^2``.
    """

    @property
    def view(self) -> AveragerView: ...
    def update_counts(self, steps: int, samples: int) -> None:
        """Note the training loop's counts, which other reports then state."""

    def on_stepped(self, steps: int, samples: int, loss: float | None, now: float) -> list[Effect]:
        """Handle a step boundary; ``loss`` is the last training loss, None if unknown."""

    def on_snapshotted(self, session: int, now: float, mass: float = 0.0, moved: float = math.nan) -> list[Effect]:
        """Handle a snapshot that took push-sum ``mass`` from the model, which has 1 at first.

        ``moved`` is the norm of the local steps since the last snapshot; NaN if unknown.
        """

    def on_recalled(self, session: int, now: float) -> list[Effect]:
        """Handle a copy for a newcomer that needed no boundary: an earlier snapshot, or frozen weights."""

    def on_spoiled(self, session: int | None, now: float, tensor: str = "") -> list[Effect]:
        """Handle NaN or infinity in the snapshot of this session; None: in the live weights. ``tensor`` names where."""

    def on_not_taken(self, session: int, now: float) -> list[Effect]:
        """Handle a snapshot that could not be taken for lack of memory."""

    def on_streamed(
        self, session: int, difference_sq: float, own_sq: float, now: float, sketch: Floats | None = None
    ) -> list[Effect]:  # fmt: skip
        """Handle the partner's vector, which has arrived whole. ``sketch`` is that of the difference, if it has one."""

    def on_failed(self, session: int, code: str, now: float) -> list[Effect]:
        """Handle streams that ended early; ``code`` names the reason, as in an Abort."""

    def on_gathered(
        self, session: int, difference_sq: float, own_sq: float, refused: dict[PeerId, str],
        absent: list[PeerId], now: float,
    ) -> list[Effect]:  # fmt: skip
        """Handle a complete group average, without what ``refused`` members sent and ``absent`` ones did not."""

    def on_collected(self, session: int, position: int, now: float) -> list[Effect]:
        """Handle arrived elements of a fetched piece: those before index ``position`` of the vector are complete."""

    def on_moments(self, session: int, is_sound: bool, now: float) -> list[Effect]:
        """Handle a partner's moments, which have arrived whole; they cannot be mixed unless they are sound."""

    def on_compared(self, session: int, difference_sq: float, own_sq: float, now: float) -> list[Effect]:
        """Handle a fetched piece that was compared with the joining vector, ours here."""

    def on_adopted(self, now: float, difference_sq: float = 0.0, own_sq: float = 0.0) -> list[Effect]:
        """Handle the joining vector, theirs here, in the place of our weights. Both squares are 0 without a trial."""

    def on_frozen_hashed(self, digest: bytes, now: float) -> list[Effect]:
        """Handle the hash of the frozen weights; empty if it could not be computed."""

    def on_not_kept(self, now: float) -> list[Effect]:
        """Handle a trial of another run's weights that did not start: no backup of ours could be made, so ours stay."""

    def on_restored(self, now: float) -> list[Effect]:
        """Handle the old weights, which have replaced those on trial."""
