"""The donor: it copies each piece that a newcomer fetches, at most two at once."""

from __future__ import annotations

import math

from gossip.config import Config
from gossip.effects import CopyFrozen, CopyPiece, Effect, Release, Send, Serve, Snapshot, UseLastSnapshot
from gossip.exchange.session import Local
from gossip.ids import PeerId
from gossip.wire.messages import Abort, Busy, Fetch, Refuse, Serving

__all__ = ["Donating", "allowed_s", "most_elements"]

STANDS = "asleep"  # code of a Refuse: the loop is paused, and without a step there is no optimizer state to copy
SERVED_AT_ONCE = 2  # Pieces that a donor streams at once. Each has its own memory.
PIECE_ELEMENTS = 6 << 20  # elements of the largest piece: 25 MB, which a step boundary copies in a few milliseconds
PIECES = 16  # Pieces of a larger model's weights. A newcomer waits for this many step boundaries of each donor.


class Donating:
    """The donor's side: the pieces that are served, at most two at once."""

    def __init__(self, local: Local, config: Config) -> None:
        self.local, self.config = local, config
        self.table: dict[int, tuple[PeerId, Fetch, float]] = {}
        self.awaited: dict[int, float] = {}  # sessions without a snapshot yet, and how long to wait for the loop

    def on_fetch(self, sender: PeerId, fetch: Fetch, now: float, swarm_samples: int = 0) -> list[Effect]:
        local = self.local
        if not local.ready:
            return [Send(sender, Refuse(fetch.session, "not-ready"))]
        if fetch.start == fetch.stop:
            keys, finished = local.optimizer_keys, local.finished
            scalars = local.optimizer_scalars
            base = local.frozen_hash or b""
            answer = Serving(fetch.session, local.version, local.run_id, keys, scalars, swarm_samples, finished, base)
            return [Send(sender, answer)]
        size = local.weights + len(fetch.optimizer_keys) * local.trained_elements
        inside = 0 <= fetch.start < fetch.stop <= size and fetch.stop - fetch.start <= most_elements(local.weights)
        crosses = any(fetch.start < edge < fetch.stop for edge in (local.elements, local.weights))
        if not inside or crosses or fetch.optimizer_keys not in ((), local.optimizer_keys):
            return [Send(sender, Refuse(fetch.session, "range"))]
        asleep = now - local.boundary_at > self.config.boundary_patience_s
        if len(self.table) >= SERVED_AT_ONCE or fetch.session in self.table:
            return [Send(sender, Busy(fetch.session))]
        seconds = allowed_s(self.config, fetch.stop - fetch.start)
        self.table[fetch.session] = (sender, fetch, now + seconds)
        if fetch.start >= local.weights:
            # Half the time-out, so that the newcomer learns of a refusal in time.
            self.awaited[fetch.session] = now + self.config.reply_timeout_s / 2
            return [CopyPiece(fetch.session, fetch.start, fetch.stop)]
        if fetch.start >= local.elements:
            self.awaited[fetch.session] = math.inf  # frozen elements never change
            return [CopyFrozen(fetch.session, fetch.start, fetch.stop)]
        self.awaited[fetch.session] = now + self.config.boundary_patience_s
        if asleep:
            return self.handle_asleep(fetch.session)
        if local.elements <= PIECE_ELEMENTS:  # the piece is the whole model, and an exchange may use the same snapshot
            return [Snapshot(fetch.session)]
        return [CopyPiece(fetch.session, fetch.start, fetch.stop)]

    def handle_asleep(self, session: int) -> list[Effect]:
        """Handle a training loop that reaches no step boundary, so that it takes no snapshot.

        An earlier snapshot of the weights may exist. There is none of the optimizer's state.
        """
        sender, fetch, _ = self.table[session]
        if fetch.stop <= self.local.elements:
            self.awaited[session] = math.inf
            return [UseLastSnapshot(session)]
        return [Send(sender, Refuse(session, STANDS)), *self.end(session)]

    def snapshotted(self, session: int) -> list[Effect]:
        if self.awaited.pop(session, None) is None:
            return []
        sender, fetch, _ = self.table[session]
        local = self.local
        return [
            Send(sender, Serving(session, local.version, local.run_id, fetch.optimizer_keys, ())),
            Serve(session, sender, fetch.start, fetch.stop),
        ]

    def end(self, session: int) -> list[Effect]:
        """End a session: it is served, the stream broke, or the newcomer fetches the piece elsewhere."""
        self.awaited.pop(session, None)
        return [Release(session)] if self.table.pop(session, None) is not None else []

    def unlinked(self, peer: PeerId) -> list[Effect]:
        return [e for session in [s for s, (p, _, _) in self.table.items() if p == peer] for e in self.end(session)]

    def tick(self, now: float) -> list[Effect]:
        late = self.abandon([session for session, (_, _, deadline) in self.table.items() if deadline <= now])
        asleep = [session for session, until in self.awaited.items() if until <= now]
        return late + [effect for session in asleep for effect in self.handle_asleep(session)]

    def abandon(self, sessions: list[int]) -> list[Effect]:
        """End these sessions, and tell each newcomer to ask another donor at once."""
        effects: list[Effect] = []
        for session in sessions:
            effects.append(Send(self.table[session][0], Abort(session, "ended")))
            effects += self.end(session)
        return effects

    @property
    def deadline(self) -> float:
        deadlines = [deadline for _, _, deadline in self.table.values()]
        return min([*deadlines, *self.awaited.values()], default=math.inf)


def most_elements(weights: int) -> int:
    """Return the elements of the largest piece. A donor holds it in memory in addition to its exchanges."""
    return max(PIECE_ELEMENTS, weights // PIECES)


def allowed_s(config: Config, elements: int) -> float:
    """Return the seconds that a donor has for this many float32 elements."""
    return config.reply_timeout_s + 4 * elements / (config.slowest_rate_mb_s * 1e6)
