"""A newcomer without a network: a Newcomer, and what it received from which donor."""

from gossip.effects import Adopt, ReceivePiece, Release, Send
from gossip.exchange.session import Local
from gossip.ids import PeerId
from gossip.state_transfer.joining import Newcomer
from gossip.wire.messages import Fetch, Serving
from tests.harness.configs import tuned

DONORS = [PeerId(bytes([65 + i]) * 16) for i in range(10)]
A, B, C, D, E, *_ = DONORS
RUN_ID, CHUNK, SIZE = b"g" * 16, 1024, 10_000
CONFIG = tuned(chunk_elements=CHUNK)


class Taker:
    """A :class:`Newcomer` and what it has: which elements came from which donor."""

    def __init__(self, elements=SIZE, trained=0, config=CONFIG, frozen=0):
        numbers = iter(range(1, 10_000))
        self.local = Local("f", elements, trained, frozen)
        self.joining = Newcomer(self.local, config, lambda: next(numbers))
        self.fetches = {}  # session -> (donor, Fetch), as last asked
        self.positions = {}
        self.fetched = []  # (start, stop, donor)
        self.comparing = set()  # sessions
        self.apart_sq = lambda owner, other: 0.0
        self.adopt = None
        self.serving = (1.0, RUN_ID, (), ())  # version, run, optimizer's keys and scalars
        self.hashes = {}  # hashes of the frozen weights that donors state, by donor
        self.now = 0.0

    def do(self, effects):
        for effect in effects:
            match effect:
                case Send(to, Fetch() as fetch):
                    self.fetches[fetch.session] = (to, fetch)
                    self.positions[fetch.session] = fetch.start
                case ReceivePiece(session, compare=True):
                    self.comparing.add(session)
                case Release(session):
                    self.fetches.pop(session, None)
                case Adopt():
                    self.adopt = effect
        return effects

    def ask(self, *donors):
        """Begin, and return the sessions in which the donors are asked what they have."""
        self.do(self.joining.begin(RUN_ID, list(donors), self.now))
        return list(self.fetches)

    def survey(self, donors=(A, B, C, D), keys=(), run_id=RUN_ID, scalars=()):
        """Begin, and let every asked donor answer."""
        self.serving = (1.0, run_id, keys, scalars)
        for session in self.ask(*donors):
            self.answer(session)

    def answer(self, session):
        """Let a donor state what it has."""
        donor, _ = self.fetches.pop(session)
        serving = Serving(session, *self.serving, frozen_hash=self.hashes.get(donor, b""))
        self.do(self.joining.on_serving(donor, serving, self.now))

    def receive(self, session, chunks=1):
        """Let some whole chunks of a piece arrive."""
        donor, fetch = self.fetches[session]
        if session in self.joining.surveys:
            self.answer(session)  # the second question, for the progress that a donor has by now
            return
        if session in self.comparing:
            one = self.joining.check.comparisons[session]
            assert (one.other, one.start, one.stop) == (donor, fetch.start, fetch.stop)
            self.do(self.joining.on_compared(session, self.apart_sq(one.owner, one.other), 1e6, self.now))
            return
        for _ in range(chunks):
            position = self.positions[session]
            if position == fetch.stop or session not in self.fetches:
                return
            self.positions[session] = min(position + CHUNK, fetch.stop)
            self.fetched.append((position, self.positions[session], donor))
            self.do(self.joining.on_collected(session, self.positions[session], self.now))

    def receive_all(self, refusing=()):
        """Receive everything; donors in ``refusing`` answer no comparison."""
        while self.fetches or self.joining.witnesses.are_awaited:
            if not self.fetches:
                self.wait()
                continue
            session = next(iter(self.fetches))
            donor, _ = self.fetches[session]
            if session in self.comparing and donor in refusing:
                self.do(self.joining.on_refused(donor, session, self.now))
            else:
                self.receive(session, 1_000)

    def wait(self):
        """Let the time pass in which a newcomer whose donors differ meets other members."""
        self.now = self.joining.next_deadline
        self.do(self.joining.tick(self.now))

    def session_of(self, donor):
        """Return the session in which this donor is asked for a piece."""
        return next(session for session, (asked, _) in self.fetches.items() if asked == donor)

    def covered_once(self):
        """Return True if every element was fetched, and none twice."""
        return is_covered(self.fetched, self.joining.size)

    def covered_again(self):
        """Return True if every element came from a donor that is still trusted."""
        return is_covered(self.joining.received, self.joining.size)


def surveyed(donors=(A, B, C, D), *, apart_sq=lambda owner, other: 0.0, keys=(), scalars=(), **how):
    """Return a Taker whose donors have answered its survey; ``apart_sq`` is how far they are from each other."""
    taker = Taker(**how)
    taker.apart_sq = apart_sq
    taker.survey(donors, keys=keys, scalars=scalars)
    return taker


def is_covered(pieces, size):
    ranges = sorted((start, stop) for start, stop, _ in pieces if start < stop)
    ends = [0, *(stop for _, stop in ranges)]
    return [start for start, _ in ranges] == ends[:-1] and ends[-1] == size


def far(*liars):
    """Return distances by which each of these donors is far from all others."""
    return lambda owner, other: 1e4 if {owner, other} & set(liars) else 1.0


def pieces(effects):
    return [(e.partner, e.start, e.stop) for e in effects if isinstance(e, ReceivePiece)]
