"""Whom a peer mixes with next, and how much each pair weighs: the selection, less those it cannot use at the moment."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterable, Sequence

from gossip.arithmetic.mixing import pair_cap
from gossip.config import Config
from gossip.config.selections import SELECTIONS
from gossip.exchange.session import AT_ONCE, Local
from gossip.ids import Address, PeerId
from gossip.membership.members import Members
from gossip.recent import Recent
from gossip.selection.back_off import Bench
from gossip.selection.rule import Selector
from gossip.selection.topologies import Grid
from gossip.wire.messages import MAX_GROUP

__all__ = ["Partners"]

APART = 0.5  # of an interval between two mixes with one partner that it asks for: its share is then two in three
TRIED = 4  # of those that sit out, where nobody else is left
NEVER = float("-inf")
WARY = 2  # failures in a row with members that are new to us, from which on they are one: a machine that dies is one
WARY_S = 5.0  # ten times what one that says nothing holds a slot for
KEPT, PRESSING = 0.9, 6.0  # an honest one asks as often as it is asked, give or take 2.3; who always asks comes to 10
MET = 64  # partners of the last mixes remembered: more than anybody mixes with in half an interval


class Partners:
    """``linked`` says whether there is a link to a member that nobody can dial. What ``selector`` asks of the swarm
    (:class:`gossip.selection.rule.Candidates`) is answered here as well."""

    def __init__(
        self, me: PeerId, members: Members, local: Local, config: Config, rng: random.Random,
        linked: Callable[[PeerId], bool], selector: Selector,
    ) -> None:  # fmt: skip
        self.me, self.members, self.local, self.config, self.rng = me, members, local, config, rng
        self.linked, self.selector = linked, selector
        self.everybody = config.partners == 0  # a mix is with all neighbours at once
        self.incoming_limit, self.pushes = config.incoming_limit, config.pushes
        self.bench = Bench(config.bench_s)
        self.vector_mb = 4e-6 * local.elements
        self.now = 0.0
        self.mixes = 0  # of our own, begun
        self.pace = 1.0  # of the schedule: what of the configured interval lies between two mixes
        # Steps and time of the last mix with each, and how many more of the last ten it asked for.
        self.met = Recent[PeerId, tuple[int, float, float]](MET)
        self.wary = 0  # failures with members that are new to us, less exchanges with such
        self.wary_until = NEVER  # none of those is asked or heard
        self.pardoned: PeerId | None = None  # may be chosen although it sits out: there is nobody else

    # -- for the selector ----------------------------------------------------------------------------------------
    @property
    def round(self) -> int:
        """Mixing rounds behind the weights, by which all of a swarm are about equally far; own mixes where no steps say
        what a round is."""
        return int(self.local.version) if self.local.every is not None else self.mixes

    @property
    def changes(self) -> int:
        return self.members.turnover

    def alive(self) -> Sequence[PeerId]:
        return self.members.met()  # by hearsay nobody is a partner

    def address(self, peer: PeerId) -> Address | None:
        record = self.members.me if peer == self.me else self.members.record(peer)
        return None if record is None else record.address

    def shares(self, peer: PeerId) -> bool:
        """Of our run, with its weights."""
        record = self.members.record(peer)
        return record is not None and record.ready and record.genesis == self.local.genesis

    def fits(self, peer: PeerId) -> bool:
        record = self.members.record(peer)
        return (
            record is not None and record.ready and record.genesis == self.local.genesis
            and (peer == self.pardoned or not self.bench.sits_out(peer, self.now))
            and (record.address is not None or self.linked(peer))
        )  # fmt: skip

    # -- for the exchanges ---------------------------------------------------------------------------------------
    def choose(self, asked: set[PeerId], now: float, again: bool = False, crowded: bool = False) -> PeerId | None:
        """One that is not in ``asked``; where all who could be asked sit out, the one that failed longest ago.
        ``again``: another was asked for this very mix; ``crowded``: a strange one has an exchange."""
        self.now = now
        wary = crowded or now < self.wary_until
        familiar = self.familiar() if again or wary else []
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
        """Those that we mixed with lately, where the rule leaves the choice free. A crowd that says BUSY to everything
        is asked once for each mix. Where everybody is honest that is a rare second choice, and nearly as random."""
        if not SELECTIONS[self.config.selection].free:
            return []
        return [peer for peer in self.here(self.met) if self.fits(peer)]

    def strange(self, peer: PeerId) -> bool:
        """Whether it is one of those with whom exchanges fail lately: those that are new to us. Identities cost
        nothing, so that all of them count as one: they have one exchange at a time, and none for a while after it took
        too long."""
        return self.wary >= WARY and peer not in self.met and peer != self.me

    def find(self, asked: set[PeerId]) -> PeerId | None:
        if not self.everybody:
            return self.selector.choose(self, asked, self.rng)
        left = [peer for peer in self.ours() if peer not in asked and self.fits(peer)]
        return self.rng.choice(left) if left else None

    def declines(self, sender: PeerId, now: float) -> bool:
        """Whether an offer of this member is answered BUSY, whatever room there is. Back-off binds both ways; and
        nobody is everybody's only partner: who mixed with us less than half an interval ago waits. Unless there is
        nobody else to mix with."""
        self.now = now
        if not (self.bench.shuns(sender, now) or self.just_mixed(sender, now)):
            self.bench.answers(sender)
            return False
        return self.find({sender}) is not None

    def just_mixed(self, sender: PeerId, now: float) -> bool:
        met = self.met.get(sender)
        if met is None or self.local.settling or self.everybody:  # of all neighbours each has its own turn
            return False
        config, share = self.config, APART * self.pace
        every = self.local.every
        by_steps = every is not None and self.local.steps - met[0] >= share * every
        return not (by_steps or (config.mix_every_s is not None and now - met[1] >= share * config.mix_every_s))

    def beyond(self, peers: Collection[PeerId]) -> bool:
        """Whether our run has other members than these, busy ones and those that sit out included."""
        return any(peer not in peers and self.shares(peer) for peer in self.alive())

    def here(self, partners: Iterable[PeerId]) -> list[PeerId]:
        """Those of them that might be met again: held ALIVE, and of our run."""
        return self.members.standing(partners, self.local.genesis)

    def mixed(self, partner: PeerId, now: float, own: bool) -> None:
        """An exchange with it is finished; ``own``: we asked."""
        before = self.met.get(partner)
        if before is None:
            self.wary = max(self.wary - 1, 0)
        excess = 0.0 if before is None else KEPT * before[2]
        self.met[partner] = self.local.steps, now, excess + (-1.0 if own else 1.0)

    def ours(self) -> list[PeerId]:
        """Of the neighbours those with whom we begin: of an edge the smaller id's end does, so that a round of
        everybody mixes each edge once."""
        return [peer for peer in self.selector.neighbours(self) if peer > self.me]

    def wanted(self) -> int:
        """How many partners a mix of our own has."""
        self.mixes += 1
        return min(len(self.ours()), AT_ONCE) if self.everybody else self.config.partners

    @property
    def several(self) -> bool:
        """Whether a mix of our own is several exchanges."""
        return self.everybody or self.config.partners > 1

    def counts(self, mixed: Collection[PeerId]) -> bool:
        """Whether one of these, with whom an exchange is finished, was of a mix for which the schedule waits. With all
        neighbours only our own is: if theirs delayed it, an edge would be mixed every other time. One that asks and
        asks delays nothing: its mixes come on top of ours, and not in their place."""
        if self.everybody:
            return any(partner > self.me for partner in mixed)
        return any(partner not in self.met or self.met[partner][2] < PRESSING for partner in mixed)

    def group(self, now: float) -> list[PeerId]:
        """Whom to average with as a group, perhaps ourselves among them; nobody where we are alone."""
        self.now = now
        size = self.config.group_size or MAX_GROUP
        if isinstance(self.selector, Grid) and self.config.group_size:
            return self.selector.group(self, size)
        fitting = [peer for peer in self.alive() if self.fits(peer)]
        return self.rng.sample(fitting, min(size - 1, len(fitting)))

    def incoming(self) -> int:
        """How many exchanges of others may be under way beside our own."""
        if self.everybody:
            return min(max(1, len(self.selector.neighbours(self))), AT_ONCE)
        return self.incoming_limit

    def cap(self, partner: PeerId, others: int) -> float:
        """The largest weight of a pair: with all neighbours at once theirs by Metropolis."""
        if self.everybody:
            return min(0.5, self.selector.weight(self, partner))
        return 0.5 if self.pushes else pair_cap(others)

    def heard(self, partner: PeerId, seconds: float) -> None:
        """An exchange of the whole vector took so long: all of it is a rate, the way there and back included."""
        if seconds > 0 and self.vector_mb > 0:
            self.selector.heard(partner, None, self.vector_mb / seconds)

    def failed(self, partner: PeerId, now: float, silent: bool = False) -> None:
        """An exchange with it came to nothing; ``silent``: before it had answered."""
        self.bench.failed(partner, now, silent)
        self.slow(partner, now)

    def slow(self, partner: PeerId, now: float) -> None:
        """An exchange with it takes too long, or has come to nothing."""
        if partner not in self.met:
            self.wary = min(self.wary + 1, WARY + 1)
            if self.wary >= WARY:
                self.wary_until = now + WARY_S

    def succeeded(self, partner: PeerId) -> None:
        self.bench.succeeded(partner)
