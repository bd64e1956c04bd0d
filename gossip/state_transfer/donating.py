"""A member gives its weights to newcomers: a copy of each piece that one asks for, at most two at once."""

from __future__ import annotations

import math

from gossip.config import Config
from gossip.effects import CopyFrozen, CopyPiece, Effect, Recall, Release, Send, Serve, Snapshot
from gossip.exchange.session import Local
from gossip.ids import PeerId
from gossip.wire.messages import Abort, Busy, Fetch, Refuse, Serving

__all__ = ["Donating", "allowed_s", "most_elements"]

STANDS = "asleep"  # a donor's reason: the state of its optimizer is not to be had until its loop takes a step
SERVED_AT_ONCE = 2  # pieces a donor streams at once, each in memory of its own
PIECE_ELEMENTS = 6 << 20  # of the largest piece, 25 MB, which a step boundary copies in a few milliseconds
PIECES = 16  # of a larger model's weights: a newcomer waits for a boundary as often, of each donor


class Donating:
    """The giving side: a copy of each piece, at most two at once."""

    def __init__(self, local: Local, config: Config) -> None:
        self.local, self.config = local, config
        self.table: dict[int, tuple[PeerId, Fetch, float]] = {}
        self.awaited: dict[int, float] = {}  # those without a snapshot yet, and until when the loop is waited for

    def on_fetch(
        self, sender: PeerId, fetch: Fetch, scalars: tuple[tuple[str, float], ...], now: float, swarm_samples: int = 0
    ) -> list[Effect]:
        local = self.local
        if not local.ready:
            return [Send(sender, Refuse(fetch.session, "not-ready"))]
        if fetch.start == fetch.stop:
            keys, finished = local.optimizer_keys, local.finished
            answer = Serving(fetch.session, local.version, local.genesis, keys, scalars, swarm_samples, finished)
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
            self.awaited[fetch.session] = now + self.config.reply_timeout_s / 2  # and the newcomer hears of it in time
            return [CopyPiece(fetch.session, fetch.start, fetch.stop)]
        if fetch.start >= local.elements:
            self.awaited[fetch.session] = math.inf  # it is the same at any time
            return [CopyFrozen(fetch.session, fetch.start, fetch.stop)]
        self.awaited[fetch.session] = now + self.config.boundary_patience_s
        if asleep:
            return self.stands(fetch.session)
        if local.elements <= PIECE_ELEMENTS:  # all of them are no more, and an exchange may have use for them too
            return [Snapshot(fetch.session)]
        return [CopyPiece(fetch.session, fetch.start, fetch.stop)]

    def stands(self, session: int) -> list[Effect]:
        """The training loop reaches no boundary at which to take a snapshot. Of the weights there may be an earlier
        one, of the optimizer's state there is none."""
        sender, fetch, _ = self.table[session]
        if fetch.stop <= self.local.elements:
            self.awaited[session] = math.inf
            return [Recall(session)]
        return [Send(sender, Refuse(session, STANDS)), *self.end(session)]

    def snapshotted(self, session: int) -> list[Effect]:
        if self.awaited.pop(session, None) is None:
            return []
        sender, fetch, _ = self.table[session]
        local = self.local
        return [
            Send(sender, Serving(session, local.version, local.genesis, fetch.optimizer_keys, ())),
            Serve(session, sender, fetch.start, fetch.stop),
        ]

    def end(self, session: int) -> list[Effect]:
        """Served, or the stream broke, or the newcomer took the piece elsewhere."""
        self.awaited.pop(session, None)
        return [Release(session)] if self.table.pop(session, None) is not None else []

    def unlinked(self, peer: PeerId) -> list[Effect]:
        return [e for session in [s for s, (p, _, _) in self.table.items() if p == peer] for e in self.end(session)]

    def tick(self, now: float) -> list[Effect]:
        late = self.abandon([session for session, (_, _, deadline) in self.table.items() if deadline <= now])
        standing = [session for session, until in self.awaited.items() if until <= now]
        return late + [effect for session in standing for effect in self.stands(session)]

    def abandon(self, sessions: list[int]) -> list[Effect]:
        """End these, and tell the newcomer to go to another at once."""
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
    """Elements of the largest piece of a model of so many: what a donor has to hold for it, beside its exchanges."""
    return max(PIECE_ELEMENTS, weights // PIECES)


def allowed_s(config: Config, elements: int) -> float:
    """Seconds that a donor has for so many elements of float32."""
    return config.reply_timeout_s + 4 * elements / (config.slowest_rate_mb_s * 1e6)
