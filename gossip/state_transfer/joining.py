"""The newcomer: it surveys the donors of a run, then fetches the weights in pieces from several at once, resumably.

A *donor* is a ready member of the run. A *piece* is a range of the *joining vector*: the weights that exchanges carry,
then the frozen ones, the bits of other tensors, and the optimizer's state.

    IDLE -> SURVEY      ask the donors what they have, and agree on the state to fetch
         -> COLLECTING  fetch its pieces, compare the donors, and survey them again
         -> ADOPTING    the driver overwrites our weights at a step boundary
         -> IDLE

If a donor dies, stalls or is busy, another one gives the rest of its piece from the last whole chunk on. The pieces
come from different members, whose weights differ by the consensus distance. So the newcomer starts within the
swarm's spread.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from itertools import pairwise
from statistics import median_low

from gossip.config import Config
from gossip.effects import Adopt, Effect, ReceivePiece, Release, Send
from gossip.exchange.session import MAX_VERSION, Local
from gossip.filters.rule import MIN_ELEMENTS
from gossip.ids import PeerId
from gossip.recent import Recent
from gossip.state_transfer.comparing import MIN_DONORS
from gossip.state_transfer.donating import ASLEEP, max_piece_elements, serving_time_s
from gossip.state_transfer.donor_check import MOVED, DonorCheck, ReceivedRange
from gossip.state_transfer.survey import agree
from gossip.state_transfer.witnesses import Witnesses
from gossip.wire.messages import Abort, Fetch, Serving

CANDIDATES_PER_DONOR = 4  # Members to keep as possible donors, for each donor that sends at once.
SURVEY_S = 1.0  # Wait for the other answers after the first one.
# Maximum time that we avoid a run whose members serve nothing, for example since their loops are paused.
AVOID_S = 60.0
RETRY_S = 1.0  # Interval of retries if every donor is busy.
MAX_RUNS = 64  # Runs to remember as avoided; far more than ever meet.
MAX_DOUBLINGS = 10  # Doublings of the time to avoid a run whose weights were worse: up to 17 hours.


class Phase(Enum):
    """The phase of a transfer; the module's docstring has their order."""

    IDLE = auto()
    SURVEY = auto()
    COLLECTING = auto()
    ADOPTING = auto()


@dataclass(slots=True)
class Piece:
    """Elements [start, stop) of the joining vector, which ``donor`` still has to send."""

    start: int  # It advances with the chunks that arrive.
    stop: int
    donor: PeerId
    deadline: float  # Time by which the next chunk must arrive.
    last_deadline: float  # Time by which the last one must, for a donor may choose how many chunks there are.
    first: int  # The value of ``start`` when the piece was requested.


class Newcomer:
    """A newcomer, or a member that merges into another run: the transfer of a run's weights to us.

    ``local.run_id`` changes only once the weights are adopted.
    """

    def __init__(self, local: Local, config: Config, new_session: Callable[[], int]) -> None:
        self.local, self.config, self.new_session = local, config, new_session
        self.max_donors = config.internal.donors  # Donors that send to us at once.
        # The peer sets these three: drop all exchanges in progress; return the ready members of a run that we can
        # reach; return True if we know members that we have not met yet.
        self.abandon_exchanges: Callable[[], list[Effect]] = list
        self.find_donors: Callable[[bytes], list[PeerId]] = lambda run_id: []
        self.has_unmet_members: Callable[[], bool] = lambda: False

        # Runs to avoid, and to take.
        self.avoided_runs = Recent[bytes, float](MAX_RUNS)  # Runs that we avoid, and until when.
        self.failed_trials = Recent[bytes, int](MAX_RUNS)  # Trials here that each run's weights have failed.
        self.consented_run_id = b""  # The run into which the user told us to merge; empty if there is none.

        # The transfer in progress.
        self.phase = Phase.IDLE
        self.run_id = b""
        self.began_at = 0.0
        self.deadline = math.inf  # Time at which the present step is late, if nothing is being fetched.
        self.candidates: list[PeerId] = []  # Donors to ask, the best first.
        self.surveys: dict[int, PeerId] = {}  # Members that have not answered a survey, by session.
        self.answers: dict[PeerId, Serving] = {}
        self.has_resurveyed = False  # The donors were asked again for their progress.

        # The state that the donors agree on.
        self.optimizer_keys: tuple[str, ...] = ()
        self.optimizer_scalars: tuple[tuple[str, float], ...] = ()
        self.version = 0.0
        self.swarm_samples = 0  # Samples behind the weights.
        self.finished = False  # The run is finished.
        self.frozen_hash = b""  # The donors' hash of the frozen weights while our own is computed; empty otherwise.
        self.keeps_frozen = False  # Our frozen weights are those of the donors, and are not fetched.

        # The pieces.
        self.pieces: dict[int, Piece] = {}  # Pieces that are being fetched, by session.
        self.missing: list[tuple[int, int]] = []  # Ranges that are not being fetched.
        self.received: list[ReceivedRange] = []  # Ranges that have arrived.
        self.donors: set[PeerId] = set()  # Donors of whole pieces.
        self.odd: set[PeerId] = set()  # Donors that gave another model than most, which are not asked again.
        self.starving_since = math.inf  # Time since which no donor gives anything.
        self.is_state_asleep = False  # A donor with a paused loop holds the optimizer's state, and no other gives it.
        self.leaves_state = False  # Adopt without the optimizer's state.

        self.check = DonorCheck(local, config, new_session)
        self.witnesses = Witnesses(self.check)

    @property
    def size(self) -> int:
        """Return the elements of the joining vector."""
        return self.local.weights + len(self.optimizer_keys) * self.local.trained_elements

    @property
    def missing_elements(self) -> int:
        ranges = [*self.missing, *((piece.start, piece.stop) for piece in self.pieces.values())]
        return sum(stop - start for start, stop in ranges)

    @property
    def is_starved(self) -> bool:
        """Return True if ranges are missing and no donor is left: the peer should name others."""
        return self.phase is Phase.COLLECTING and bool(self.missing) and not self.pieces

    # -- survey --------------------------------------------------------------------------------------------------
    def begin(self, run_id: bytes, candidates: list[PeerId], now: float) -> list[Effect]:
        """Survey the first candidates: ready members of that run, in random order."""
        self.phase, self.run_id, self.began_at = Phase.SURVEY, run_id, now
        self.answers, self.pieces, self.missing, self.received, self.donors, self.odd = {}, {}, [], [], set(), set()
        self.has_resurveyed = self.is_state_asleep = self.leaves_state = self.keeps_frozen = False
        self.check.reset()
        self.witnesses.reset()
        self.candidates = candidates[: CANDIDATES_PER_DONOR * self.max_donors]
        self.deadline = now + self.config.reply_timeout_s
        return self.survey(self.candidates[: self.max_donors])

    def survey(self, peers: list[PeerId]) -> list[Effect]:
        """Ask these peers to describe their state, by a Fetch without elements."""
        self.surveys = {self.new_session(): peer for peer in peers}
        return [Send(peer, Fetch(session, (), 0, 0)) for session, peer in self.surveys.items()]

    def end_survey(self, now: float) -> list[Effect]:
        """End the first survey, which starts the pieces, or the second one, which adopts the weights."""
        return self.collect(now) if self.phase is Phase.SURVEY else self.advance(now)

    def collect(self, now: float) -> list[Effect]:
        """Agree on the state to fetch, cut it into pieces and request them."""
        if not self.answers:
            return self.stop()
        # Fetch the optimizer's state only if we have an optimizer: otherwise there is nowhere to put it.
        agreed = agree(self.answers, self.local.optimizer_keys, bool(self.local.trained_elements))
        self.optimizer_keys, self.optimizer_scalars, self.version = agreed.keys, agreed.scalars, agreed.version
        self.swarm_samples, self.finished = agreed.swarm_samples, agreed.finished
        donors = list(agreed.donors)
        self.phase, self.deadline = Phase.COLLECTING, math.inf
        # Trust a hash only from as many donors as would be compared. Otherwise one donor alone could make us keep
        # frozen weights that are not the run's.
        has_enough_donors = len(donors) >= min(MIN_DONORS, len(self.candidates))
        ours, theirs = self.local.frozen_hash, agreed.frozen_hash if has_enough_donors else b""
        self.frozen_hash = theirs if ours is None else b""
        self.keeps_frozen = bool(ours) and ours == theirs
        unasked = [peer for peer in self.candidates if peer not in self.answers]  # Donors that disagreed are left out.
        self.candidates = donors + unasked
        local = self.local
        exchanged, frozen, *others = pairwise((0, local.elements, local.frozen_stop, local.weights, self.size))
        parts = [exchanged, *others] if self.frozen_hash or self.keeps_frozen else [exchanged, frozen, *others]
        self.missing = [piece for part in parts for piece in self.cut(*part, len(donors))]
        return self.request_missing(now)

    def cut(self, start: int, stop: int, donor_count: int) -> list[tuple[int, int]]:
        """Cut a range into equal pieces for the donors, none larger than a donor serves.

        Every donor gets a share, since one donor alone could not be compared. Pieces consist of whole chunks if they
        are larger than one. Without frozen weights the share is that of the whole vector, so that weights and
        optimizer state have pieces of one size.
        """
        elements = stop - start if self.local.weights > self.local.elements else self.size
        share, chunk = max(-(-elements // donor_count), MIN_ELEMENTS), self.config.chunk_elements
        if share >= chunk:
            share = -(-share // chunk) * chunk  # Up to whole chunks.
        limit = max_piece_elements(self.local.weights)
        if share > limit:
            share = limit // chunk * chunk or limit  # The limit itself if it is less than a chunk.
        return [(begin, min(begin + share, stop)) for begin in range(start, stop, share)]

    def on_frozen_hashed(self, now: float) -> list[Effect]:
        """Handle the hash of our frozen weights: keep ours if the donors' are the same, or fetch theirs."""
        theirs, self.frozen_hash = self.frozen_hash, b""
        if not theirs:
            return []
        self.keeps_frozen = theirs == self.local.frozen_hash
        if self.keeps_frozen:
            return [] if self.pieces or self.missing else self.advance(now)
        donor_count = max(1, min(len(self.candidates), self.max_donors))
        self.missing += self.cut(self.local.elements, self.local.frozen_stop, donor_count)
        return self.request_missing(now)

    # -- pieces --------------------------------------------------------------------------------------------------
    def request_missing(self, now: float) -> list[Effect]:
        """Request missing ranges from donors that send us nothing at the moment."""
        effects: list[Effect] = []
        sending = {piece.donor for piece in self.pieces.values()}
        free = [peer for peer in self.candidates if peer not in sending]
        if self.size > self.local.elements:
            self.missing.sort(reverse=True)  # The weights first, since paused donors can give them.
        while self.missing and free and len(self.pieces) < self.max_donors:
            (start, stop), donor, session = self.missing.pop(), free.pop(0), self.new_session()
            next_chunk, whole = now + self.chunk_time_s(stop - start), now + serving_time_s(self.config, stop - start)
            self.pieces[session] = Piece(start, stop, donor, next_chunk, whole, start)
            effects.append(ReceivePiece(session, donor, start, stop, self.size))
            effects.append(Send(donor, Fetch(session, self.optimizer_keys, start, stop)))
        if self.missing and not self.pieces:
            self.deadline = now + RETRY_S  # No candidate is left. At the deadline the peer calls :meth:`on_starved`.
            self.starving_since = min(self.starving_since, now)
        return effects

    def chunk_time_s(self, elements: int) -> float:
        """Return the seconds for the next chunk of a piece with ``elements`` missing.

        A slow donor is dropped after its first chunk, not at the end of the piece.
        """
        return serving_time_s(self.config, min(elements, self.config.chunk_elements))

    def on_collected(self, session: int, position: int, now: float) -> list[Effect]:
        """Handle elements up to ``position`` of a piece, which have arrived with correct checksums."""
        piece = self.pieces.get(session)
        if piece is None:
            return []
        piece.start = position
        self.starving_since = math.inf  # Only data ends the time without donors: a donor may agree and send nothing.
        if piece.stop > self.local.weights:
            self.is_state_asleep = False
        if position < piece.stop:
            piece.deadline = min(now + self.chunk_time_s(piece.stop - position), piece.last_deadline)
            return []
        del self.pieces[session]
        self.donors.add(piece.donor)
        self.received.append(ReceivedRange(piece.first, piece.stop, piece.donor))
        if self.missing:
            return [Release(session), *self.request_missing(now)]
        return [Release(session)] if self.pieces else [Release(session), *self.advance(now)]

    def on_failed(self, session: int, now: float, tell: bool = True) -> list[Effect]:
        """Handle a piece or comparison that failed. ``tell``: tell the donor, which may still be sending.

        Another donor gives the rest of the piece.
        """
        if session in self.check.comparisons:
            return self.end_comparison(session, now, tell)
        piece = self.pieces.pop(session, None)
        if piece is None:
            return []
        if piece.start < piece.stop:
            self.missing.append((piece.start, piece.stop))
        self.received.append(ReceivedRange(piece.first, piece.start, piece.donor))
        if piece.donor in self.candidates:
            self.candidates.remove(piece.donor)
        abort = [Send(piece.donor, Abort(session, MOVED))] if tell else []
        return [Release(session), *abort, *self.request_missing(now)]

    def on_starved(self, candidates: list[PeerId], now: float) -> list[Effect]:
        """Handle ranges without a donor: go on with these candidates.

        Give up after ``join_timeout_s`` without any, since the run may have died out. If only the optimizer's state is
        missing and its donors are paused, adopt without it.
        """
        lacks_only_state = all(start >= self.local.weights for start, _ in self.missing)
        if lacks_only_state and self.is_state_asleep:
            self.leaves_state, self.missing = True, []
            self.received = [piece for piece in self.received if piece.start < self.local.weights]
            return self.advance(now)
        if now - self.starving_since >= self.config.join_timeout_s:
            self.avoid_run(self.run_id, now + AVOID_S)
            return self.stop()
        candidates = [peer for peer in candidates if peer not in self.odd]
        self.candidates, self.deadline = candidates[: CANDIDATES_PER_DONOR * self.max_donors], math.inf
        if self.check.has_begun:  # Donors that were not compared may give the rest.
            self.check.reset()
            self.witnesses.reset()
        return self.request_missing(now)

    # -- the end of a transfer -----------------------------------------------------------------------------------
    def advance(self, now: float) -> list[Effect]:
        """Take the next step once all pieces have arrived: compare the donors, survey again, then adopt.

        The second survey asks reachable members, by now more than at the start, whether the run is finished.
        """
        self.starving_since = self.deadline = math.inf
        if self.frozen_hash:
            return []  # :meth:`on_frozen_hashed` goes on.
        if not self.check.has_begun:
            effects = self.check.begin(self.received, self.candidates, self.optimizer_keys, now)
            if effects:
                donors = {piece.donor for piece in self.received}
                return effects + self.witnesses.look_out([peer for peer in self.candidates if peer not in donors], now)
        if not self.has_resurveyed:
            self.has_resurveyed, self.answers = True, {}
            others = [peer for peer in self.find_donors(self.run_id) if peer not in self.donors]
            self.deadline = now + SURVEY_S
            return self.survey([*sorted(self.donors)[: self.max_donors], *others[: self.max_donors]])
        if self.answers:
            self.swarm_samples = median_low(answer.swarm_samples for answer in self.answers.values())
            self.finished = 2 * sum(answer.finished for answer in self.answers.values()) > len(self.answers)
        self.phase, self.deadline = Phase.ADOPTING, math.inf
        keys, scalars = ((), ()) if self.leaves_state else (self.optimizer_keys, self.optimizer_scalars)
        adoption = Adopt(keys, scalars, trial=self.local.ready, frozen=not self.keeps_frozen)
        return [*self.abandon_exchanges(), adoption]

    def on_compared(self, session: int, apart_sq: float, own_sq: float, now: float) -> list[Effect]:
        """Handle the squared distance of another donor's chunk from its owner's, and the squared norm of the latter."""
        comparison = self.check.comparisons.get(session)
        if comparison is None:
            return []
        comparison.apart_sq, comparison.own_sq = apart_sq, own_sq
        return self.end_comparison(session, now, tell=False)

    def end_comparison(self, session: int, now: float, tell: bool) -> list[Effect]:
        """End a comparison, answered or not. After the last one, ask witnesses or judge the donors."""
        effects = self.check.end_comparison(session, tell)
        effects += self.witnesses.ask_more(self.check.results[-1].other, 1, now)
        if self.check.comparisons:
            return effects
        if self.witnesses.are_needed:
            self.deadline = self.witnesses.wait(now)
            return effects
        return effects + self.judge_donors(now)

    def ask_witnesses(self, now: float) -> list[Effect]:
        """Ask members that gave nothing for chunks that the donors gave, or wait for more. Judge if there are none."""
        # Members contacted since the transfer began are witnesses too.
        others = [peer for peer in self.find_donors(self.run_id) if peer not in self.odd.union(self.candidates)]
        self.candidates += others[: max(0, CANDIDATES_PER_DONOR * self.max_donors - len(self.candidates))]
        donors = {piece.donor for piece in self.received}
        witnesses = [peer for peer in self.candidates if peer not in donors]
        if self.has_unmet_members() and not self.witnesses.are_enough(len(witnesses), len(donors)):
            self.deadline = self.witnesses.wait(now)
            return []
        self.witnesses.stop_waiting()
        self.deadline = math.inf
        return self.witnesses.ask(witnesses, now) or self.judge_donors(now)

    def judge_donors(self, now: float) -> list[Effect]:
        """Fetch the pieces of the odd donors from others, or go on."""
        odd = self.check.odd_donors()
        self.missing = [(start, stop) for start, stop, donor in self.received if donor in odd and start < stop]
        self.received = [piece for piece in self.received if piece.donor not in odd]
        self.donors -= odd
        self.odd |= odd
        if odd and not self.donors:  # Compare those that give the pieces instead, too.
            self.check.reset()
            self.witnesses.reset()
        # Fetch these pieces from donors that were compared, if any are left: an attacker may be among the others.
        rest = [peer for peer in self.candidates if peer not in odd]
        self.candidates = [peer for peer in rest if peer in self.donors] if self.missing and self.donors else rest
        return self.request_missing(now) if self.missing else self.advance(now)

    def stop(self) -> list[Effect]:
        """Return to IDLE, after a success or a failure."""
        awaited = self.awaited()
        self.check.comparisons, self.frozen_hash = {}, b""
        self.phase, self.deadline, self.starving_since = Phase.IDLE, math.inf, math.inf
        self.pieces, self.surveys, self.answers, self.missing = {}, {}, {}, []
        self.witnesses.stop_waiting()
        effects: list[Effect] = []
        for session, (sender, _) in awaited.items():
            effects += [Send(sender, Abort(session, MOVED)), Release(session)]
        return effects

    # -- messages, links and time --------------------------------------------------------------------------------
    def on_serving(self, sender: PeerId, serving: Serving, now: float) -> list[Effect]:
        """Handle a donor's description of its state: an answer to a survey, or the begin of a stream."""
        session = serving.session
        if self.surveys.get(session) == sender:
            del self.surveys[session]
            if serving.run_id == self.run_id and 0 <= serving.version < MAX_VERSION:
                self.answers[sender] = serving
                self.deadline = min(self.deadline, now + SURVEY_S)
            return [] if self.surveys else self.end_survey(now)
        has_agreed_state = serving.run_id == self.run_id and serving.optimizer_keys == self.optimizer_keys
        return self.on_failed(session, now) if self.is_from(session, sender) and not has_agreed_state else []

    def on_refused(self, sender: PeerId, session: int, now: float, code: str = "") -> list[Effect]:
        """Handle a Busy, Refuse or Abort; the last two carry a reason in ``code``."""
        if self.surveys.get(session) == sender:
            del self.surveys[session]
            return [] if self.surveys else self.end_survey(now)
        if not self.is_from(session, sender):
            return []
        piece = self.pieces.get(session)
        if piece is not None and piece.stop > self.local.weights:
            self.is_state_asleep = code == ASLEEP  # False if a donor is merely busy and could give it later.
        return self.on_failed(session, now, tell=False)

    def is_from(self, session: int, sender: PeerId) -> bool:
        """Return True if this member was asked for the piece or the compared chunk of this session."""
        return self.awaited().get(session, (None, math.inf))[0] == sender

    def awaited(self) -> dict[int, tuple[PeerId, float]]:
        """Return who was asked for each piece and each compared chunk, and when its answer is late, by session."""
        pieces = {session: (piece.donor, piece.deadline) for session, piece in self.pieces.items()}
        return pieces | {session: (each.other, each.deadline) for session, each in self.check.comparisons.items()}

    def on_unlinked(self, peer: PeerId, now: float) -> list[Effect]:
        """Handle the loss of the last link to ``peer``."""
        effects: list[Effect] = []
        for session in [session for session, donor in self.surveys.items() if donor == peer]:
            effects += self.on_refused(peer, session, now)
        for session in [session for session, (asked, _) in self.awaited().items() if asked == peer]:
            effects += self.on_failed(session, now, tell=False)
        return effects

    def tick(self, now: float) -> list[Effect]:
        """Go on without answers, pieces and comparisons that are late."""
        if self.surveys and self.deadline <= now:
            self.surveys = {}
            return self.end_survey(now)
        if self.witnesses.are_awaited and self.deadline <= now:
            return self.ask_witnesses(now)
        effects: list[Effect] = []
        for session in [session for session, (_, deadline) in self.awaited().items() if deadline <= now]:
            effects += self.on_failed(session, now)
        return effects

    @property
    def next_deadline(self) -> float:
        """Return the time to call :meth:`tick`, or :meth:`on_starved` if we are starved."""
        deadlines = [deadline for _, deadline in self.awaited().values()]
        return min(deadlines) if deadlines else self.deadline

    # -- runs to avoid -------------------------------------------------------------------------------------------
    def may_ask(self, run_id: bytes, now: float) -> bool:
        """Return True if the members of this run may be asked: we do not avoid it at the moment."""
        return now >= self.avoided_runs.get(run_id, now)

    def avoid_run(self, run_id: bytes, until: float) -> None:
        self.avoided_runs[run_id] = until

    def avoid_after_trial(self, now: float) -> float:
        """Avoid this run, whose weights were worse than ours, and return for how long: twice as long each time."""
        failed_count = self.failed_trials.get(self.run_id, 0)
        self.failed_trials[self.run_id] = min(failed_count + 1, MAX_DOUBLINGS)
        seconds = AVOID_S * (1 << failed_count)
        self.avoid_run(self.run_id, now + seconds)
        return seconds
