"""The partners of one peer: the selection rule over the members that can mix now, back-off, and pair weights."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterable, Sequence

from gossip.arithmetic.mixing import pair_cap
from gossip.config import Config
from gossip.config.selections import SELECTIONS
from gossip.exchange.session import MAX_NEIGHBOURS, Local
from gossip.ids import Address, PeerId
from gossip.membership.members import Members
from gossip.recent import Recent
from gossip.selection.back_off import BackOff
from gossip.selection.rule import Selector
from gossip.selection.topologies import Grid
from gossip.wire.messages import MAX_GROUP

__all__ = ["Partners"]

APART = 0.5  # Least intervals between two mixes that one partner asks for: at most two of three mixes are with it.
TRIED = 4  # The number of partners in back-off that are tried if no other is left.
NEVER = float("-inf")
# After this many failures with new members, they all count as one. A machine that dies causes a single failure.
WARY = 2
WARY_S = 5.0  # Ten times as long as a silent partner holds a slot.
# The decay of a partner's requests minus ours, and the count from which its mixes are extra. An honest partner stays
# within 2.3; one that always asks tends to 10.
KEPT, PRESSING = 0.9, 6.0
MET = 64  # Partners of the last mixes remembered: more than a peer mixes with in half an interval.


class Partners:
    """One peer's choice of partners. It is what its ``selector`` sees (:class:`gossip.selection.rule.Candidates`).

    ``is_linked`` tells whether there is a link to a member that cannot be dialled.
    """

    def __init__(
        self, me: PeerId, members: Members, local: Local, config: Config, rng: random.Random,
        is_linked: Callable[[PeerId], bool], selector: Selector,
    ) -> None:  # fmt: skip
        self.me, self.members, self.local, self.config, self.rng = me, members, local, config, rng
        self.is_linked, self.selector = is_linked, selector
        self.all_at_once = config.partners == 0  # A mix is with all neighbours at once.
        self.incoming_limit, self.pushes = config.incoming_limit, config.pushes
        self.bench = BackOff(config.bench_s)
        self.vector_mb = 4e-6 * local.elements
        self.now = 0.0
        self.mixes = 0  # Our own mixes that have begun.
        self.pace = 1.0  # The schedule's present interval between two mixes, as a fraction of the configured one.
        # The step count and time of the last mix with each partner, and a decaying count of its requests minus ours.
        self.met = Recent[PeerId, tuple[int, float, float]](MET)
        self.wary = 0  # Failures with new members, minus exchanges with such members.
        self.wary_until = NEVER  # Until then new members are neither asked nor accepted.
        self.pardoned: PeerId | None = None  # May be chosen in back-off, since no other partner is left.

    # -- for the selector ----------------------------------------------------------------------------------------
    @property
    def round(self) -> int:
        """Return the mixing rounds behind the weights, about equal in the whole swarm.

        Without a step schedule, it is the number of our own mixes.
        """
        return int(self.local.version) if self.local.every is not None else self.mixes

    @property
    def changes(self) -> int:
        return self.members.turnover

    def alive(self) -> Sequence[PeerId]:
        return self.members.contacted()  # Members known by hearsay only are no partners.

    def address(self, peer: PeerId) -> Address | None:
        record = self.members.me if peer == self.me else self.members.record(peer)
        return None if record is None else record.address

    def shares(self, peer: PeerId) -> bool:
        """Return True if the member is in our run and has its weights."""
        record = self.members.record(peer)
        return record is not None and record.ready and record.run_id == self.local.run_id

    def fits(self, peer: PeerId) -> bool:
        record = self.members.record(peer)
        return (
            record is not None and record.ready and record.run_id == self.local.run_id
            and (peer == self.pardoned or not self.bench.sits_out(peer, self.now))
            and (record.address is not None or self.is_linked(peer))
        )  # fmt: skip

    # -- for the exchanges ---------------------------------------------------------------------------------------
    def choose(
        self, asked: set[PeerId], now: float, is_retry: bool = False, is_stranger_busy: bool = False
    ) -> PeerId | None:  # fmt: skip
        """Return a partner that is not in ``asked``, or None.

        If all others are in back-off, it is the one that failed longest ago. ``is_retry`` means that another was asked
        for this mix, ``is_stranger_busy`` that a new member has an exchange.
        """
        self.now = now
        wary = is_stranger_busy or now < self.wary_until
        familiar = self.familiar() if is_retry or wary else []
        left = [peer for peer in familiar if peer not in asked]
        if left or (wary and familiar):
            return self.rng.choice(left) if left else None
        chosen = self.find(asked)
        if chosen is None and not asked and self.bench.benched:
            for peer in self.bench.pardonable(now)[:TRIED]:
                self.pardoned = peer
                chosen = chosen or self.find(asked)
            self.pardoned = None
        return chosen

    def familiar(self) -> list[PeerId]:
        """Return recent partners, if the rule leaves the choice free.

        So a crowd of identities that answers BUSY to all offers is asked only once per mix. Among honest members this
        choice is rare, and nearly as random as the rule's.
        """
        if not SELECTIONS[self.config.selection].free:
            return []
        return [peer for peer in self.present(self.met) if self.fits(peer)]

    def is_stranger(self, peer: PeerId) -> bool:
        """Return True for a member that is new to us while exchanges with new members fail.

        Identities cost nothing, so all such members count as one. They have one exchange at a time, and none for a
        while after it took too long.
        """
        return self.wary >= WARY and peer not in self.met and peer != self.me

    def find(self, asked: set[PeerId]) -> PeerId | None:
        if not self.all_at_once:
            return self.selector.choose(self, asked, self.rng)
        left = [peer for peer in self.ours() if peer not in asked and self.fits(peer)]
        return self.rng.choice(left) if left else None

    def is_declined(self, sender: PeerId, now: float) -> bool:
        """Return True if this member's offer is answered BUSY, even if there is room.

        Back-off applies in both directions. A member that mixed with us less than half an interval ago must wait, so
        that no peer becomes another's only partner. Neither holds if there is no other partner.
        """
        self.now = now
        if not (self.bench.shuns(sender, now) or self.just_mixed(sender, now)):
            self.bench.answers(sender)
            return False
        return self.find({sender}) is not None

    def just_mixed(self, sender: PeerId, now: float) -> bool:
        met = self.met.get(sender)
        # In a mix with all neighbours, each edge is mixed once anyway.
        if met is None or self.local.settling or self.all_at_once:
            return False
        config, share = self.config, APART * self.pace
        every = self.local.every
        by_steps = every is not None and self.local.steps - met[0] >= share * every
        return not (by_steps or (config.mix_every_s is not None and now - met[1] >= share * config.mix_every_s))

    def has_others(self, peers: Collection[PeerId]) -> bool:
        """Return True if our run has other members than these, including busy ones and those in back-off."""
        return any(peer not in peers and self.shares(peer) for peer in self.alive())

    def present(self, partners: Iterable[PeerId]) -> list[PeerId]:
        """Return the partners that may mix again: ALIVE, and with the weights of our run."""
        return self.members.ready_among(partners, self.local.run_id)

    def note_mix(self, partner: PeerId, now: float, own: bool) -> None:
        """Note a finished exchange; ``own`` means that we asked."""
        before = self.met.get(partner)
        if before is None:
            self.wary = max(self.wary - 1, 0)
        excess = 0.0 if before is None else KEPT * before[2]
        self.met[partner] = self.local.steps, now, excess + (-1.0 if own else 1.0)

    def ours(self) -> list[PeerId]:
        """Return the neighbours with which we begin a mix.

        The smaller id of an edge begins, so that a round of all members mixes each edge once.
        """
        return [peer for peer in self.selector.neighbours(self) if peer > self.me]

    def count_own_mix(self) -> int:
        """Return the number of partners of a mix of our own, and count the mix."""
        self.mixes += 1
        return min(len(self.ours()), MAX_NEIGHBOURS) if self.all_at_once else self.config.partners

    @property
    def several(self) -> bool:
        """Return True if a mix of our own is several exchanges."""
        return self.all_at_once or self.config.partners > 1

    def counts(self, mixed: Collection[PeerId]) -> bool:
        """Return True if an exchange with one of these partners counts as a mix of the schedule.

        With all neighbours, only our own exchanges count: if theirs delayed the schedule, an edge would be mixed every
        other time. A partner that asks all the time does not count either: its mixes come in addition to ours.
        """
        if self.all_at_once:
            return any(partner > self.me for partner in mixed)
        return any(partner not in self.met or self.met[partner][2] < PRESSING for partner in mixed)

    def group(self, now: float) -> list[PeerId]:
        """Return the members to average with as a group, perhaps ourselves among them; empty if we are alone."""
        self.now = now
        size = self.config.group_size or MAX_GROUP
        if isinstance(self.selector, Grid) and self.config.group_size:
            return self.selector.group(self, size)
        fitting = [peer for peer in self.alive() if self.fits(peer)]
        return self.rng.sample(fitting, min(size - 1, len(fitting)))

    def max_incoming(self) -> int:
        """Return the limit of incoming exchanges at the same time as our own."""
        if self.all_at_once:
            return min(max(1, len(self.selector.neighbours(self))), MAX_NEIGHBOURS)
        return self.incoming_limit

    def max_weight(self, partner: PeerId, others: int) -> float:
        """Return the largest weight of a pair: with all neighbours at once, the Metropolis weight."""
        if self.all_at_once:
            return min(0.5, self.selector.weight(self, partner))
        return 0.5 if self.pushes else pair_cap(others)

    def note_rate(self, partner: PeerId, seconds: float) -> None:
        """Learn a partner's rate from an exchange of the whole vector; the time includes the round trip."""
        if seconds > 0 and self.vector_mb > 0:
            self.selector.heard(partner, None, self.vector_mb / seconds)

    def note_failure(self, partner: PeerId, now: float, silent: bool = False) -> None:
        """Note a failed exchange; ``silent`` means that the partner had not answered."""
        self.bench.failed(partner, now, silent)
        self.note_slow(partner, now)

    def note_slow(self, partner: PeerId, now: float) -> None:
        """Note that an exchange takes too long, or has failed."""
        if partner not in self.met:
            self.wary = min(self.wary + 1, WARY + 1)
            if self.wary >= WARY:
                self.wary_until = now + WARY_S

    def succeeded(self, partner: PeerId) -> None:
        self.bench.succeeded(partner)
