"""The check of a transfer's donors: a chunk of each is fetched from the next donor as well, and compared.

:mod:`gossip.state_transfer.comparing` judges the results. If donors differ, other members are asked for the same chunks
(:mod:`gossip.state_transfer.witnesses`).
"""

from collections.abc import Callable
from typing import NamedTuple

from gossip.config import Config
from gossip.effects import Effect, ReceivePiece, Release, Send
from gossip.exchange.session import Local
from gossip.ids import PeerId
from gossip.state_transfer import comparing
from gossip.state_transfer.comparing import Comparison
from gossip.state_transfer.donating import serving_time_s
from gossip.wire.messages import Abort, Fetch

NEIGHBOURS = 2  # Donors with which each is compared. Of any three, two are honest or two lie.
MOVED = "moved"  # Code of an Abort to a donor: the newcomer gets these elements elsewhere, or needs them no more.


class ReceivedRange(NamedTuple):
    """Elements [start, stop) of the joining vector that a donor gave."""

    start: int
    stop: int
    donor: PeerId


class DonorCheck:
    """The comparisons of one transfer."""

    def __init__(self, local: Local, config: Config, new_session: Callable[[], int]) -> None:
        self.local, self.config, self.new_session = local, config, new_session
        self.optimizer_keys: tuple[str, ...] = ()  # The optimizer's state in the joining vector.
        self.reset()

    def reset(self) -> None:
        """Start again for another transfer."""
        self.comparisons: dict[int, Comparison] = {}  # Comparisons in progress, by session.
        self.results: list[Comparison] = []  # Comparisons that have ended, answered or not.
        self.has_begun = False
        self.has_witnesses = False  # Witnesses were asked, so that their votes decide.

    @property
    def frozen_range(self) -> range:
        """Return the range of the frozen elements in the joining vector."""
        return range(self.local.elements, self.local.frozen_stop)

    def kind_of(self, start: int) -> int:
        """Return the kind of the elements from ``start`` on: 0 for frozen ones, 1 for bits, 2 for others."""
        if start in self.frozen_range:
            return 0
        return 1 if self.local.frozen_stop <= start < self.local.weights else 2

    def begin(
        self, received: list[ReceivedRange], candidates: list[PeerId], optimizer_keys: tuple[str, ...], now: float
    ) -> list[Effect]:  # fmt: skip
        """Compare the donors. No donor knows which chunk is checked.

        Frozen elements are compared apart from the rest, since they are equal on all donors to the last bit. So are
        bits, whose numbers have another scale.
        """
        self.has_begun, self.optimizer_keys = True, optimizer_keys
        kinds = [[piece for piece in received if self.kind_of(piece.start) == kind] for kind in (2, 0, 1)]
        return [effect for pieces in kinds for effect in self.compare(pieces, candidates, now)]

    def compare(self, received: list[ReceivedRange], candidates: list[PeerId], now: float) -> list[Effect]:
        """Compare a chunk of every donor, including donors that have gone, since their pieces are adopted as well."""
        ranges: dict[PeerId, list[tuple[int, int]]] = {}
        for start, stop, donor in received:
            if start < stop:
                ranges.setdefault(donor, []).append((start, stop))
        donors = list(ranges)
        present = [donor for donor in donors if donor in candidates]
        if len(donors) < comparing.MIN_DONORS or len(present) < 2:
            return []
        effects: list[Effect] = []
        for place, owner in enumerate(donors):
            # Session numbers are random: one draws a range of this donor, another a chunk of the range.
            start, stop = ranges[owner][self.new_session() % len(ranges[owner])]
            chunk_elements = self.config.chunk_elements
            chunk_count = -(-(stop - start) // chunk_elements)
            start += self.new_session() % chunk_count * chunk_elements
            stop = min(stop, start + chunk_elements)
            others = [peer for peer in [*donors[place + 1 :], *donors[:place]] if peer in present]
            # With the next one alone, every comparison of four donors could be with a liar. It would then look usual.
            for other in others[:NEIGHBOURS]:
                effects += self.request(owner, other, start, stop, now)
        return effects

    def request(self, owner: PeerId, other: PeerId, start: int, stop: int, now: float) -> list[Effect]:
        """Fetch elements that ``owner`` gave from ``other`` as well, to compare the two."""
        session, deadline = self.new_session(), now + serving_time_s(self.config, stop - start)
        self.comparisons[session] = Comparison(owner, other, start, stop, deadline)
        size = self.local.weights + len(self.optimizer_keys) * self.local.trained_elements
        return [
            ReceivePiece(session, other, start, stop, size, compare=True),
            Send(other, Fetch(session, self.optimizer_keys, start, stop)),
        ]

    def end_comparison(self, session: int, tell: bool) -> list[Effect]:
        """End a comparison, answered or not. ``tell``: tell the other donor, which may still be sending."""
        comparison = self.comparisons.pop(session)
        self.results.append(comparison)
        abort = [Send(comparison.other, Abort(session, MOVED))] if tell else []
        return [Release(session), *abort]

    def odd_donors(self) -> set[PeerId]:
        """Return the donors that gave another model than most, and the witnesses that took their side."""
        odd: set[PeerId] = set()
        for results in self.results_by_kind():
            donors = {comparison.owner for comparison in results}
            odd |= comparing.outvoted(results, donors) if self.has_witnesses else comparing.odd_in_ring(results)
        return odd

    def results_by_kind(self) -> tuple[list[Comparison], ...]:
        """Return the results for frozen elements, bits, and the others."""
        return tuple([each for each in self.results if self.kind_of(each.start) == kind] for kind in range(3))

    @property
    def spread_sq(self) -> float:
        """Return the donors' spread: :func:`gossip.state_transfer.comparing.spread_sq` of their weights."""
        return comparing.spread_sq(self.results_by_kind()[2], self.local.elements)
