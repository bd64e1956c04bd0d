"""The donor: it copies each piece that a newcomer fetches, at most two at once.

    Fetch --> copy the elements --snapshotted--> Serving, and stream them --> served

A Fetch without elements is the question of a survey, which Serving answers at once. The weights and the optimizer's
state are copied at a step boundary of the training loop, which may be paused.

A *reader* fetches weights and is no member. It gets the places that no newcomer wants.
"""

import math
from dataclasses import dataclass

from gossip.config import Config
from gossip.effects import CopyFrozen, CopyPiece, Effect, Release, Send, SendPiece, Snapshot, UseLastSnapshot
from gossip.exchange.session import Local
from gossip.ids import PeerId
from gossip.wire.messages import Abort, Busy, Fetch, Refuse, Serving

ASLEEP = "asleep"  # Code of a Refuse: the loop is paused, and without a step there is no optimizer state to copy.
MAX_SERVED = 2  # Pieces that a donor streams at once. Each has its own memory.
# Largest piece of a model of up to 100 M weights, in elements: 25 MB, which a step boundary copies in a few
# milliseconds.
PIECE_ELEMENTS = 6 << 20
# Number of pieces of the weights of a larger model. A newcomer waits for this many step boundaries of each donor.
MIN_PIECES = 16


def max_piece_elements(weights: int) -> int:
    """Return the elements of the largest piece. A donor holds it in memory in addition to its exchanges."""
    return max(PIECE_ELEMENTS, weights // MIN_PIECES)


def serving_time_s(config: Config, elements: int) -> float:
    """Return the seconds that a donor has for this many float32 elements."""
    return config.reply_timeout_s + 4 * elements / (config.slowest_rate_mb_s * 1e6)


@dataclass(slots=True)
class ServedPiece:
    """A piece that a newcomer fetches from us."""

    newcomer: PeerId
    fetch: Fetch
    deadline: float
    is_reader: bool = False  # ``newcomer`` is a reader, which has no record.
    copy_deadline: float | None = None  # Time by which the copy must exist, perhaps infinite; None once it exists.


class Donor:
    """The donor's side: the pieces that are served, by session."""

    def __init__(self, local: Local, config: Config) -> None:
        self.local, self.config = local, config
        self.table: dict[int, ServedPiece] = {}

    def on_fetch(
        self, sender: PeerId, fetch: Fetch, now: float, swarm_samples: int = 0, is_reader: bool = False
    ) -> list[Effect]:  # fmt: skip
        """Handle a Fetch: describe our state, or begin to serve a piece of it. A reader's piece yields to others."""
        local, session = self.local, fetch.session
        if not local.ready:
            return [Send(sender, Refuse(session, "not-ready"))]
        if fetch.start == fetch.stop:  # A survey: no elements are asked for.
            frozen_hash = local.frozen_hash or b""
            answer = Serving(
                session, local.version, local.run_id, local.optimizer_keys, local.optimizer_scalars, swarm_samples,
                local.finished, frozen_hash,
            )  # fmt: skip
            return [Send(sender, answer)]
        if not self.has_range(fetch):
            return [Send(sender, Refuse(session, "range"))]
        if len(self.table) >= MAX_SERVED or session in self.table:
            yielding = [number for number, piece in self.table.items() if piece.is_reader]
            if is_reader or not yielding or session in self.table:
                return [Send(sender, Busy(session))]
            return [*self.abandon(yielding[:1]), *self.on_fetch(sender, fetch, now)]
        elements = fetch.stop - fetch.start
        deadline = now + serving_time_s(self.config, elements)
        piece = self.table[session] = ServedPiece(sender, fetch, deadline, is_reader)
        if fetch.start >= local.weights:
            # Half the time-out, so that the newcomer learns of a refusal in time.
            piece.copy_deadline = now + self.config.reply_timeout_s / 2
            return [CopyPiece(session, fetch.start, fetch.stop)]
        if fetch.start >= local.elements:
            piece.copy_deadline = math.inf  # No mix changes them, so that no step boundary is needed.
            return [CopyFrozen(session, fetch.start, fetch.stop)]
        piece.copy_deadline = now + self.config.boundary_patience_s
        if now - local.boundary_at > self.config.boundary_patience_s:
            return self.serve_asleep(session)
        if local.elements <= PIECE_ELEMENTS:  # The piece is the whole model, and an exchange may use the same snapshot.
            return [Snapshot(session)]
        return [CopyPiece(session, fetch.start, fetch.stop)]

    def has_range(self, fetch: Fetch) -> bool:
        """Return True if these elements exist, and lie in one of weights, frozen weights, bits and optimizer state."""
        local = self.local
        size = local.weights + len(fetch.optimizer_keys) * local.trained_elements
        is_inside = 0 <= fetch.start < fetch.stop <= size
        is_small = fetch.stop - fetch.start <= max_piece_elements(local.weights)
        crosses = any(fetch.start < edge < fetch.stop for edge in (local.elements, local.frozen_stop, local.weights))
        return is_inside and is_small and not crosses and fetch.optimizer_keys in ((), local.optimizer_keys)

    def serve_asleep(self, session: int) -> list[Effect]:
        """Serve a piece while the training loop reaches no step boundary, so that it takes no snapshot.

        An earlier snapshot of the weights may exist. There is none of the optimizer's state.
        """
        piece = self.table[session]
        if piece.fetch.stop <= self.local.elements:
            piece.copy_deadline = math.inf
            return [UseLastSnapshot(session)]
        return [Send(piece.newcomer, Refuse(session, ASLEEP)), *self.end(session)]

    def on_snapshotted(self, session: int) -> list[Effect]:
        """Handle the copy of a piece, which is streamed now."""
        piece = self.table.get(session)
        if piece is None or piece.copy_deadline is None:
            return []
        piece.copy_deadline = None
        local, fetch = self.local, piece.fetch
        return [
            Send(piece.newcomer, Serving(session, local.version, local.run_id, fetch.optimizer_keys, ())),
            SendPiece(session, piece.newcomer, fetch.start, fetch.stop),
        ]

    def end(self, session: int) -> list[Effect]:
        """End a session: it is served, the stream broke, or the newcomer fetches the piece elsewhere."""
        return [Release(session)] if self.table.pop(session, None) is not None else []

    def abandon(self, sessions: list[int]) -> list[Effect]:
        """End these sessions, and tell each newcomer to ask another donor at once."""
        effects: list[Effect] = []
        for session in sessions:
            effects.append(Send(self.table[session].newcomer, Abort(session, "ended")))
            effects += self.end(session)
        return effects

    def on_unlinked(self, peer: PeerId) -> list[Effect]:
        """Handle the loss of the last link to ``peer``."""
        sessions = [session for session, piece in self.table.items() if piece.newcomer == peer]
        return [effect for session in sessions for effect in self.end(session)]

    def tick(self, now: float) -> list[Effect]:
        """Abandon late pieces, and serve those for which the training loop takes no snapshot."""
        late = self.abandon([session for session, piece in self.table.items() if piece.deadline <= now])
        asleep = [
            session for session, piece in self.table.items()
            if piece.copy_deadline is not None and piece.copy_deadline <= now
        ]  # fmt: skip
        return late + [effect for session in asleep for effect in self.serve_asleep(session)]

    @property
    def deadline(self) -> float:
        """Return the time to call :meth:`tick`."""
        pieces = self.table.values()
        copies = [piece.copy_deadline for piece in pieces if piece.copy_deadline is not None]
        return min([*copies, *(piece.deadline for piece in pieces)], default=math.inf)
