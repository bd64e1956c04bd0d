"""The newcomer: it surveys the donors of a run, then fetches the weights in pieces from several at once, resumably.

Phases::

    IDLE -> SURVEY (ask the donors) -> COLLECTING (fetch pieces) -> ADOPTING (at our step boundary) -> IDLE.

If a donor dies, stalls or is busy, another one fetches the rest of its piece from the last whole chunk on. The pieces
come from different members, whose weights differ by the consensus distance. So the newcomer starts within the
swarm's spread.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from itertools import pairwise
from statistics import median_low

from gossip.config import Config
from gossip.effects import Adopt, Effect, ReceivePiece, Release, Send
from gossip.exchange.session import MAX_VERSION, Local
from gossip.filters.rule import FEW
from gossip.ids import PeerId
from gossip.recent import Recent
from gossip.state_transfer.comparing import (
    FEWEST,
    WITNESSED,
    Comparison,
    differ,
    odd_ones,
    outvoted,
    spread_sq,
)
from gossip.state_transfer.donating import STANDS, allowed_s, most_elements
from gossip.state_transfer.survey import agree
from gossip.wire.messages import Abort, Fetch, Serving

__all__ = ["Joining", "Phase"]

SURVEY_S = 1.0  # wait for the other answers after the first one
# Maximum time that we avoid a run whose members serve nothing, for example since their loops are paused.
LEFT_ALONE_S = 60.0
RETRY_S = 1.0  # interval of retries if every donor is busy
WITNESS_S = 2.0  # time after the first difference to contact the members that the seeds know
MOST_RUNS = 64  # runs to remember as avoided; far more than ever meet
MOST_DOUBLINGS = 10  # doublings of the time to avoid a run whose weights were worse: up to 17 hours


class Phase(Enum):
    """The phase of a transfer; the module's docstring has their order."""

    IDLE = auto()
    SURVEY = auto()
    COLLECTING = auto()
    ADOPTING = auto()


@dataclass(slots=True)
class Piece:
    """Elements [start, stop) of the joining vector. ``start`` advances from ``began`` with the chunks that arrive."""

    start: int
    stop: int
    donor: PeerId
    deadline: float
    began: int


class Joining:
    """The newcomer's side. ``local.run_id`` changes only once the weights are adopted."""

    def __init__(self, local: Local, config: Config, new_session: Callable[[], int]) -> None:
        self.local, self.config, self.new_session = local, config, new_session
        self.phase = Phase.IDLE
        self.left_alone = Recent[bytes, float](MOST_RUNS)  # runs to avoid, and until when
        self.run_id = b""
        self.consented = b""  # the run into which the user told us to merge
        self.began = 0.0
        self.deadline = float("inf")
        self.surveys: dict[int, PeerId] = {}
        self.answers: dict[PeerId, Serving] = {}
        self.pieces: dict[int, Piece] = {}  # pieces by session
        self.missing: list[tuple[int, int]] = []  # ranges that are not being fetched
        self.given: list[tuple[int, int, PeerId]] = []  # ranges that have arrived, and their donors
        self.comparisons: dict[int, Comparison] = {}  # open comparisons by session
        self.compared_all: list[Comparison] = []
        self.doubtful = False  # donors differ; witnesses are asked at the deadline
        self.witnessed = False  # witnesses were asked
        self.checked = self.counted = False  # pieces were compared; donors were asked again for their progress
        self.abandon: Callable[[], list[Effect]] = list  # ends the exchanges in progress
        # Returns the ready members of a run that we can reach.
        self.reachable: Callable[[bytes], list[PeerId]] = lambda run_id: []
        self.candidates: list[PeerId] = []  # donors to ask, the best first
        self.keys: tuple[str, ...] = ()
        self.scalars: tuple[tuple[str, float], ...] = ()
        self.version = 0.0
        self.swarm_samples = 0  # samples behind the weights that are fetched
        self.finished = False  # the run is finished
        self.refused = Recent[bytes, int](MOST_RUNS)  # failed trials here, by run
        self.donors: set[PeerId] = set()
        self.starving_since = float("inf")
        self.standing = False  # a paused donor holds the optimizer state, and no other gives it
        self.stateless = False  # adopt without the optimizer state
        self.frozen_hash = b""  # the donors', while our own is being computed
        self.keeps_frozen = False  # our frozen weights are those of the donors, and are not fetched

    @property
    def size(self) -> int:
        return self.local.weights + len(self.keys) * self.local.trained_elements

    def begin(self, run_id: bytes, candidates: list[PeerId], now: float) -> list[Effect]:
        """Survey up to ``config.internal.donors`` of the candidates: ready members of that run, in random order."""
        self.phase, self.run_id, self.began = Phase.SURVEY, run_id, now
        self.answers, self.pieces, self.missing, self.donors = {}, {}, [], set()
        self.given, self.comparisons, self.compared_all = [], {}, []
        self.checked = self.counted = self.doubtful = self.witnessed = False
        self.standing = self.stateless = self.keeps_frozen = False
        self.candidates = candidates[: 4 * self.config.internal.donors]
        self.deadline = now + self.config.reply_timeout_s
        self.surveys = {self.new_session(): peer for peer in self.candidates[: self.config.internal.donors]}
        return [Send(peer, Fetch(session, (), 0, 0)) for session, peer in self.surveys.items()]

    def on_serving(self, sender: PeerId, serving: Serving, now: float) -> list[Effect]:
        piece = self.pieces.get(serving.session)
        if piece is not None and piece.donor == sender:
            same = serving.run_id == self.run_id and serving.optimizer_keys == self.keys
            return [] if same else self.give_back(serving.session, now)
        comparison = self.comparisons.get(serving.session)
        if comparison is not None and comparison.other == sender:
            same = serving.run_id == self.run_id and serving.optimizer_keys == self.keys
            return [] if same else self.end_comparison(serving.session, now)
        if self.surveys.get(serving.session) != sender:
            return []
        del self.surveys[serving.session]
        if serving.run_id == self.run_id and 0 <= serving.version < MAX_VERSION:
            self.answers[sender] = serving
            self.deadline = min(self.deadline, now + SURVEY_S)
        return self.answered(now)

    def on_refused(self, sender: PeerId, session: int, now: float, code: str = "") -> list[Effect]:
        """Handle a Busy, Refuse or Abort; the last two carry a reason in ``code``."""
        if self.surveys.get(session) == sender:
            del self.surveys[session]
            return self.answered(now)
        comparison = self.comparisons.get(session)
        if comparison is not None and comparison.other == sender:
            return self.end_comparison(session, now, False)
        piece = self.pieces.get(session)
        if piece is None or piece.donor != sender:
            return []
        if piece.stop > self.local.weights:
            self.standing = code == STANDS  # false if a donor is merely busy and could give it later
        return self.give_back(session, now, False)

    def answered(self, now: float) -> list[Effect]:
        """End a survey once no answer is missing: the first starts the pieces, the second adopts the weights."""
        if self.surveys:
            return []
        return self.collect(now) if self.phase is Phase.SURVEY else self.whole(now)

    def collect(self, now: float) -> list[Effect]:
        """End the survey: agree on the state to fetch, cut it into pieces and request them."""
        if not self.answers:
            return self.stop()
        # Fetch the optimizer's state only if we have an optimizer: otherwise there is nowhere to put it.
        agreed = agree(self.answers, self.local.optimizer_keys, bool(self.local.trained_elements))
        self.keys, self.scalars, self.version = agreed.keys, agreed.scalars, agreed.version
        self.swarm_samples, self.finished = agreed.swarm_samples, agreed.finished
        donors = list(agreed.donors)
        self.phase, self.deadline = Phase.COLLECTING, float("inf")
        # As many as would be compared, or one donor alone could have us keep another base than the run's.
        enough = len(donors) >= min(FEWEST, len(self.candidates))
        ours, theirs = self.local.frozen_hash, agreed.frozen_hash if enough else b""
        self.frozen_hash = theirs if ours is None else b""
        self.keeps_frozen = bool(ours) and ours == theirs
        unasked = [peer for peer in self.candidates if peer not in self.answers]  # donors that disagreed are left out
        self.candidates = donors + unasked
        ends = (0, self.local.elements, self.local.weights, self.size)  # a paused donor can give the first part
        first, frozen, state = pairwise(ends)
        parts = (first, state) if self.frozen_hash or self.keeps_frozen else (first, frozen, state)
        self.missing = [piece for part in parts for piece in self.cut(*part, len(donors))]
        return self.assign(now)

    def frozen_hashed(self, now: float) -> list[Effect]:
        """Compare our frozen weights with the donors', now that ours are hashed: keep ours, or fetch theirs."""
        theirs, self.frozen_hash = self.frozen_hash, b""
        if not theirs:
            return []
        self.keeps_frozen = theirs == self.local.frozen_hash
        if self.keeps_frozen:
            return [] if self.pieces or self.missing else self.whole(now)
        donors = min(len(self.candidates), self.config.internal.donors)
        self.missing += self.cut(self.local.elements, self.local.weights, max(1, donors))
        return self.assign(now)

    def cut(self, start: int, stop: int, donors: int) -> list[tuple[int, int]]:
        """Cut a range into equal pieces for the donors, none larger than a donor serves.

        Every donor gets a share, since one donor alone could not be compared. Frozen elements are cut apart.
        """
        elements = stop - start if self.local.frozen_elements else self.size
        share, step = max(-(-elements // donors), FEW), self.config.chunk_elements
        share, most = share if share < step else -(-share // step) * step, most_elements(self.local.weights)
        if share > most:
            share = most // step * step or most
        return [(at, min(at + share, stop)) for at in range(start, stop, share)]

    def assign(self, now: float) -> list[Effect]:
        """Request missing ranges from donors that send us nothing at the moment."""
        effects: list[Effect] = []
        sending = {piece.donor for piece in self.pieces.values()}
        free = [peer for peer in self.candidates if peer not in sending]
        if self.size > self.local.elements:
            self.missing.sort(reverse=True)  # the weights first, since paused donors can give them
        while self.missing and free and len(self.pieces) < self.config.internal.donors:
            (start, stop), donor, session = self.missing.pop(), free.pop(0), self.new_session()
            self.pieces[session] = Piece(start, stop, donor, now + self.chunk_s(stop - start), start)
            effects.append(ReceivePiece(session, donor, start, stop, self.size))
            effects.append(Send(donor, Fetch(session, self.keys, start, stop)))
        if self.missing and not self.pieces:
            self.deadline = now + RETRY_S  # all refused: Peer finds other candidates
            self.starving_since = min(self.starving_since, now)
        return effects

    def collected(self, session: int, position: int, now: float) -> list[Effect]:
        """Note that elements up to ``position`` of this piece have arrived with correct checksums."""
        piece = self.pieces.get(session)
        if piece is None:
            return []
        piece.start = position
        self.starving_since = float("inf")  # reset only here: a donor that agrees and sends nothing does not count
        if piece.stop > self.local.weights:
            self.standing = False
        if position < piece.stop:
            piece.deadline = now + self.chunk_s(piece.stop - position)
            return []
        del self.pieces[session]
        self.donors.add(piece.donor)
        self.given.append((piece.began, piece.stop, piece.donor))
        if self.missing:
            return [Release(session), *self.assign(now)]
        return [Release(session)] if self.pieces else [Release(session), *self.whole(now)]

    def chunk_s(self, elements: int) -> float:
        """Return the seconds for the next chunk of a piece with ``elements`` missing.

        A slow donor is dropped after its first chunk, not at the end of the piece.
        """
        return allowed_s(self.config, min(elements, self.config.chunk_elements))

    def whole(self, now: float) -> list[Effect]:
        """Finish the transfer once all pieces have arrived: compare the donors, survey again, then adopt.

        The second survey asks reachable members, by now more than at the start, whether the run is finished.
        """
        self.starving_since = self.deadline = float("inf")
        if self.frozen_hash:
            return []  # :meth:`frozen_hashed` goes on
        if not self.checked:
            self.checked = True
            effects = self.compare(now)
            if effects:
                return effects
        if not self.counted:
            self.counted, self.answers = True, {}
            others = [peer for peer in self.reachable(self.run_id) if peer not in self.donors]
            asked = [*sorted(self.donors)[: self.config.internal.donors], *others[: self.config.internal.donors]]
            self.surveys = {self.new_session(): peer for peer in asked}
            self.deadline = now + SURVEY_S
            return [Send(peer, Fetch(session, (), 0, 0)) for session, peer in self.surveys.items()]
        if self.answers:
            self.swarm_samples = median_low(answer.swarm_samples for answer in self.answers.values())
            self.finished = 2 * sum(answer.finished for answer in self.answers.values()) > len(self.answers)
        self.phase, self.deadline = Phase.ADOPTING, math.inf
        keys, scalars = ((), ()) if self.stateless else (self.keys, self.scalars)
        return [*self.abandon(), Adopt(keys, scalars, trial=self.local.ready, frozen=not self.keeps_frozen)]

    def compare(self, now: float) -> list[Effect]:
        """Fetch a random chunk of each donor from the next one as well; no donor knows which one is checked.

        Frozen elements are compared apart from the rest, since they are equal on all donors to the last bit.
        """
        return [*self.compare_in(False, now), *self.compare_in(True, now)]

    def compare_in(self, frozen: bool, now: float) -> list[Effect]:
        """Compare a chunk of every donor, including donors that have gone, since their pieces are adopted as well."""
        ranges: dict[PeerId, list[tuple[int, int]]] = {}
        for start, stop, donor in self.given:
            if start < stop and (start in self.frozen) == frozen:
                ranges.setdefault(donor, []).append((start, stop))
        donors = list(ranges)
        here = [donor for donor in donors if donor in self.candidates]
        if len(donors) < FEWEST or len(here) < 2:
            return []
        effects: list[Effect] = []
        for place, owner in enumerate(donors):
            # Random: no donor knows which chunk is checked.
            start, stop = ranges[owner][self.new_session() % len(ranges[owner])]
            step = self.config.chunk_elements
            start += self.new_session() % -(-(stop - start) // step) * step
            stop = min(stop, start + step)
            others = [peer for peer in [*donors[place + 1 :], *donors[:place]] if peer in here]
            for other in others[: 1 if owner in here else 2]:  # a donor that has gone cannot be asked itself
                effects += self.ask(owner, other, start, stop, now)
        return effects

    def ask(self, owner: PeerId, other: PeerId, start: int, stop: int, now: float) -> list[Effect]:
        """Fetch elements that ``owner`` gave from ``other`` as well, to compare the two."""
        session, until = self.new_session(), now + allowed_s(self.config, stop - start)
        self.comparisons[session] = Comparison(owner, other, start, stop, until)
        return [
            ReceivePiece(session, other, start, stop, self.size, compare=True),
            Send(other, Fetch(session, self.keys, start, stop)),
        ]

    def compared(self, session: int, apart_sq: float, own_sq: float, now: float) -> list[Effect]:
        """Note the squared distance of the other donor's chunk from its owner's."""
        comparison = self.comparisons.get(session)
        if comparison is None:
            return []
        comparison.apart_sq, comparison.own_sq = apart_sq, own_sq
        return self.end_comparison(session, now, False)

    def end_comparison(self, session: int, now: float, tell: bool = True) -> list[Effect]:
        """Close a comparison, answered or not. After the last one, judge the donors."""
        comparison = self.comparisons.pop(session)
        self.compared_all.append(comparison)
        effects: list[Effect] = [Release(session)]
        if tell:
            effects.append(Send(comparison.other, Abort(session, "moved")))
        if self.comparisons:
            return effects
        if not self.witnessed and any(differ(results) for results in self.results() if results):
            self.doubtful, self.deadline = True, now + WITNESS_S
            return effects
        return effects + self.judge(now)

    def hear_witnesses(self, now: float) -> list[Effect]:
        """Ask witnesses for chunks that the donors gave. Judge at once if there are none."""
        self.doubtful, self.deadline = False, math.inf
        asked = [effect for results in self.results() for effect in self.ask_witnesses(results, now)]
        self.witnessed = bool(asked)
        return asked or self.judge(now)

    def results(self) -> tuple[list[Comparison], list[Comparison]]:
        """Return the comparisons of frozen elements, and the others."""
        still = [one for one in self.compared_all if one.start in self.frozen]
        return still, [one for one in self.compared_all if one not in still]

    def judge(self, now: float) -> list[Effect]:
        """Fetch the pieces of the odd donors from others, or go on."""
        odd: set[PeerId] = set()
        for results in self.results():
            odd |= outvoted(results, self.donors_of(results)) if self.witnessed else odd_ones(results)
        self.missing = [(start, stop) for start, stop, donor in self.given if donor in odd and start < stop]
        self.given = [one for one in self.given if one[2] not in odd]
        self.candidates = [peer for peer in self.candidates if peer not in odd]
        self.donors -= odd
        return self.assign(now) if self.missing else self.whole(now)

    def ask_witnesses(self, results: list[Comparison], now: float) -> list[Effect]:
        """If donors differ, ask witnesses, including members contacted since, for chunks that the donors gave."""
        if not results or not differ(results):
            return []
        chunks = list({one.owner: (one.owner, one.start, one.stop) for one in results}.values())
        gave = {donor for _, _, donor in self.given}
        others = [peer for peer in self.reachable(self.run_id) if peer not in self.candidates]
        self.candidates += others[: max(0, 4 * self.config.internal.donors - len(self.candidates))]
        twice = [peer for peer in self.candidates if peer not in gave for _ in range(WITNESSED)]
        asked = [(peer, chunks[place % len(chunks)]) for place, peer in enumerate(twice)]
        return [effect for peer, (owner, start, stop) in asked for effect in self.ask(owner, peer, start, stop, now)]

    @staticmethod
    def donors_of(results: list[Comparison]) -> set[PeerId]:
        return {one.owner for one in results}

    @property
    def frozen(self) -> range:
        """Return the range of the frozen elements in the joining vector."""
        return range(self.local.elements, self.local.weights)

    @property
    def spread_sq(self) -> float:
        """Return the donors' spread: :func:`gossip.state_transfer.comparing.spread_sq` of their weights."""
        return spread_sq([one for one in self.compared_all if one.start not in self.frozen], self.local.elements)

    def give_back(self, session: int, now: float, tell: bool = True) -> list[Effect]:
        """Move the rest of a piece to another donor, since this one failed. ``tell``: it may still be sending."""
        if session in self.comparisons:
            return self.end_comparison(session, now, tell)
        piece = self.pieces.pop(session, None)
        if piece is None:
            return []
        if piece.start < piece.stop:
            self.missing.append((piece.start, piece.stop))
        self.given.append((piece.began, piece.start, piece.donor))
        if piece.donor in self.candidates:
            self.candidates.remove(piece.donor)
        told = [Send(piece.donor, Abort(session, "moved"))] if tell else []
        return [Release(session), *told, *self.assign(now)]

    def unlinked(self, peer: PeerId, now: float) -> list[Effect]:
        effects: list[Effect] = []
        for session in [one for one, donor in self.surveys.items() if donor == peer]:
            effects += self.on_refused(peer, session, now)
        for session in [one for one, piece in self.pieces.items() if piece.donor == peer]:
            effects += self.give_back(session, now, False)
        for session in [one for one, comparison in self.comparisons.items() if comparison.other == peer]:
            effects += self.end_comparison(session, now, False)
        return effects

    def more_candidates(self, candidates: list[PeerId], now: float) -> list[Effect]:
        """Go on with these donors; give up after ``join_timeout_s`` without any, since the run may have died out.

        If only the optimizer state is missing and its donors are paused, adopt without it.
        """
        alone = all(start >= self.local.weights for start, _ in self.missing)
        if alone and self.standing:
            self.stateless, self.missing = True, []
            self.given = [one for one in self.given if one[0] < self.local.weights]
            return self.whole(now)
        if now - self.starving_since >= self.config.join_timeout_s:
            self.leave_alone(self.run_id, now + LEFT_ALONE_S)
            return self.stop()
        self.candidates, self.deadline = candidates[: 4 * self.config.internal.donors], float("inf")
        return self.assign(now)

    def leave_alone(self, run_id: bytes, until: float) -> None:
        self.left_alone[run_id] = until

    def failed_trial(self, now: float) -> float:
        """Return for how long to avoid this run, whose weights were worse than ours: twice as long each time."""
        times = self.refused.get(self.run_id, 0)
        self.refused[self.run_id] = min(times + 1, MOST_DOUBLINGS)
        seconds = LEFT_ALONE_S * (1 << times)
        self.leave_alone(self.run_id, now + seconds)
        return seconds

    def gives(self, run_id: bytes, now: float) -> bool:
        """Return True if this run may be asked: we do not avoid it at the moment."""
        return now >= self.left_alone.get(run_id, now)

    @property
    def lacks(self) -> int:
        """Return the number of elements that are still missing."""
        ranges = [*self.missing, *((piece.start, piece.stop) for piece in self.pieces.values())]
        return sum(stop - start for start, stop in ranges)

    @property
    def starved(self) -> bool:
        """Return True if ranges are missing and no donor is left: Peer should name others."""
        return self.phase is Phase.COLLECTING and bool(self.missing) and not self.pieces

    def tick(self, now: float) -> list[Effect]:
        if self.surveys and self.deadline <= now:
            self.surveys = {}
            return self.answered(now)
        if self.doubtful and self.deadline <= now:
            return self.hear_witnesses(now)
        effects: list[Effect] = []
        for session in [one for one, piece in self.pieces.items() if piece.deadline <= now]:
            effects += self.give_back(session, now)
        for session in [one for one, comparison in self.comparisons.items() if comparison.deadline <= now]:
            effects += self.end_comparison(session, now)
        return effects

    def next_deadline(self) -> float:
        deadlines = [piece.deadline for piece in self.pieces.values()]
        deadlines += [comparison.deadline for comparison in self.comparisons.values()]
        return min(deadlines) if deadlines else self.deadline

    def stop(self) -> list[Effect]:
        """Return to IDLE, after a success or a failure."""
        effects: list[Effect] = []
        for session, piece in self.pieces.items():
            effects += [Send(piece.donor, Abort(session, "moved")), Release(session)]
        for session, comparison in self.comparisons.items():
            effects += [Send(comparison.other, Abort(session, "moved")), Release(session)]
        self.comparisons, self.frozen_hash = {}, b""
        self.phase, self.deadline, self.starving_since = Phase.IDLE, float("inf"), float("inf")
        self.pieces, self.surveys, self.answers, self.missing, self.doubtful = {}, {}, {}, [], False
        return effects
