"""The partners of one peer: the selection rule over the members that can mix now, back-off, and pair weights.

A partner is *unproven* if we have not mixed with it lately. While exchanges with unproven partners fail, we are *wary*
of them, since identities cost nothing.
"""

import math
import random
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import NamedTuple, TypeVar

from gossip.arithmetic.mixing import pair_cap
from gossip.config import Config
from gossip.config.selections import SELECTIONS
from gossip.exchange.session import MAX_NEIGHBOURS, Local
from gossip.ids import Address, PeerId
from gossip.membership.members import Members
from gossip.recent import Recent
from gossip.selection.back_off import BackOff
from gossip.selection.requests import Requests
from gossip.selection.rule import Selector
from gossip.selection.topologies import Grid
from gossip.wire.messages import MAX_GROUP

# Fewest intervals between two mixes that one partner asks for. So at most two of three mixes are with it.
MIN_GAP = 0.5
MAX_LAST_RESORTS = 4  # Partners in back-off that are tried if no other is left.
# After this many failures with unproven partners, we are wary. A machine that dies causes a single failure.
WARY_FAILURES = 2
WARY_S = 5.0  # Ten times as long as a silent partner holds a slot.
# The excess of a partner counts the mixes that it asked for minus those that we asked for. Each new mix with it first
# decays the old count by REQUEST_DECAY. An honest partner stays within 2.3, and one that always asks tends to 10.
REQUEST_DECAY = 0.9
MAX_EXCESS = 6.0  # The mixes of a partner with a larger excess do not delay our own.
MAX_MIXED = 64  # Partners of the last mixes remembered: more than a peer mixes with in half an interval.

Drawn = TypeVar("Drawn")


class LastMix(NamedTuple):
    """The last mix with a partner."""

    our_steps: int
    ended_at: float
    excess: float  # See REQUEST_DECAY.


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
        self.incoming_limit, self.pushes = config.incoming_limit, config.pushes
        self.back_off = BackOff(config.bench_s)
        self.vector_mb = 4e-6 * local.elements  # Megabytes of our float32 vector.
        self.now = 0.0
        self.mixes = 0  # Our own mixes that have begun.
        self.last_mixes = Recent[PeerId, LastMix](MAX_MIXED)
        self.requests = Requests(1.0 if config.partners == 1 and not config.pushes else 2.0 * config.partners)
        self.own_intervals = 0.0  # Intervals that we have trained, and our steps and the time until which they count.
        self.counted_steps, self.counted_until = 0, 0.0
        # Failures minus finished exchanges with unproven partners, from 0 to WARY_FAILURES + 1.
        self.unproven_failures = 0
        self.wary_until = -math.inf  # Until then unproven partners are neither asked nor accepted.
        self.last_resort: PeerId | None = None  # The partner that may be chosen now although it is in back-off.

    # -- for the selector ----------------------------------------------------------------------------------------
    @property
    def round(self) -> int:
        """Return the mixing rounds behind the weights, about equal in the whole swarm.

        Without a step schedule, or steps, it is the number of our own mixes.
        """
        counts_steps = self.local.steps_per_mix is not None and not self.local.settling
        return int(self.local.version) if counts_steps else self.mixes

    @property
    def changes(self) -> int:
        return self.members.turnover

    def alive(self) -> Sequence[PeerId]:
        return self.members.contacted()  # Members known by hearsay only are no partners.

    def address(self, peer: PeerId) -> Address | None:
        record = self.members.me if peer == self.me else self.members.record(peer)
        return None if record is None else record.address

    def fits(self, peer: PeerId) -> bool:
        record = self.members.record(peer)
        return (
            record is not None and record.ready and record.run_id == self.local.run_id
            and (peer == self.last_resort or not self.back_off.is_in_back_off(peer, self.now))
            and (record.address is not None or self.is_linked(peer))
        )  # fmt: skip

    @property
    def all_at_once(self) -> bool:
        """Return True if a mix is with all of our selector's neighbours at once; members that settle mix in pairs."""
        return self.config.partners == 0 and not self.local.settling

    # -- whom to ask ---------------------------------------------------------------------------------------------
    def choose(
        self, asked: set[PeerId], now: float, is_retry: bool = False, is_unproven_busy: bool = False
    ) -> PeerId | None:  # fmt: skip
        """Return a partner that is not in ``asked``, or None.

        If all others are in back-off, it is the one that failed longest ago. ``is_retry`` means that another was asked
        for this mix, ``is_unproven_busy`` that an unproven partner has an exchange.
        """
        self.now = now
        is_wary = is_unproven_busy or now < self.wary_until
        familiar = self.familiar_partners() if is_retry or is_wary else []
        unasked = [peer for peer in familiar if peer not in asked]
        if unasked:
            return self.rng.choice(unasked)
        if is_wary and familiar:
            return None
        chosen = self.draw(asked)
        return self.with_last_resort(partial(self.draw, asked)) if chosen is None and not asked else chosen

    def with_last_resort(self, draw: Callable[[], Drawn]) -> Drawn | None:
        """Return what ``draw`` finds once one partner fits although it is in back-off; None without such a partner."""
        drawn: Drawn | None = None
        # Members that are gone failed long ago, and would otherwise take all places.
        for peer in self.present(self.back_off.last_resorts(self.now))[:MAX_LAST_RESORTS]:
            self.last_resort = peer
            drawn = draw()
            if drawn:
                break
        self.last_resort = None
        return drawn

    def familiar_partners(self) -> list[PeerId]:
        """Return recent partners, if the rule leaves the choice free.

        So a crowd of identities that answers BUSY to all offers is asked only once per mix. Among honest members this
        choice is rare, and nearly as random as the rule's.
        """
        if not SELECTIONS[self.config.selection].free:
            return []
        return [peer for peer in self.present(self.last_mixes) if self.fits(peer)]

    def draw(self, asked: set[PeerId]) -> PeerId | None:
        """Return a partner that the rule chooses."""
        if not self.all_at_once:
            return self.selector.choose(self, asked, self.rng)
        unasked = [peer for peer in self.own_neighbours() if peer not in asked and self.fits(peer)]
        return self.rng.choice(unasked) if unasked else None

    def own_neighbours(self) -> list[PeerId]:
        """Return the neighbours with which we begin a mix.

        The smaller id of an edge begins, so that a round of all members mixes each edge once.
        """
        return [peer for peer in self.selector.neighbours(self) if peer > self.me]

    def group(self, now: float) -> list[PeerId]:
        """Return the members to average with as a group, without ourselves.

        If all are in back-off, it is the one that failed longest ago.
        """
        self.now = now
        return self.draw_group() or self.with_last_resort(self.draw_group) or []

    def draw_group(self) -> list[PeerId]:
        size = self.config.group_size or MAX_GROUP
        if isinstance(self.selector, Grid) and self.config.group_size:
            return [peer for peer in self.selector.group(self, size) if peer != self.me]
        fitting = [peer for peer in self.alive() if self.fits(peer)]
        return self.rng.sample(fitting, min(size - 1, len(fitting)))

    def count_own_mix(self) -> int:
        """Return the number of partners of a mix of our own, and count the mix."""
        self.mixes += 1
        if self.local.settling:
            return 1
        return min(len(self.own_neighbours()), MAX_NEIGHBOURS) if self.all_at_once else self.config.partners

    # -- whose offers to take ------------------------------------------------------------------------------------
    def is_declined(self, sender: PeerId, now: float, forgives: bool = True) -> bool:
        """Return True if this member's offer is answered BUSY, even if there is room.

        Back-off applies in both directions. A member that mixed with us less than half an interval ago must wait, so
        that no peer becomes another's only partner. Neither holds if there is no other partner. ``forgives``: an offer
        that is not declined is a sign of life, after which a silent member is asked again.
        """
        self.now = now
        if not (self.back_off.is_shunned(sender, now) or self.has_just_mixed(sender, now)):
            if forgives:
                self.back_off.note_sign_of_life(sender)
            return False
        return self.draw({sender}) is not None  # There is another partner.

    def is_crowding(self, sender: PeerId, now: float) -> bool:
        """Return True if this member asks more often than others, and they mix with us more often than we want.

        Rules that choose among few members have partners that ask often.
        """
        if not SELECTIONS[self.config.selection].free or self.local.settling or self.all_at_once:
            return False
        others = len(self.alive())
        return self.requests.is_too_much(sender, self.trained_intervals(now), others, self.present)

    def trained_intervals(self, now: float) -> float:
        """Return the number of intervals that we have trained, each as long as the schedule had it at the time."""
        steps_per_mix, seconds_per_mix = self.local.steps_per_mix, self.config.mix_every_s
        steps, seconds = self.local.steps - self.counted_steps, now - self.counted_until
        self.counted_steps, self.counted_until = self.local.steps, now
        self.own_intervals += max(0, steps) / steps_per_mix if steps_per_mix else seconds / (seconds_per_mix or 1.0)
        return self.own_intervals

    def has_just_mixed(self, sender: PeerId, now: float) -> bool:
        last_mix = self.last_mixes.get(sender)
        # In a mix with all neighbours, each edge is mixed once anyway.
        if last_mix is None or self.local.settling or self.all_at_once:
            return False
        # A schedule counts steps or seconds; the other is None.
        steps_per_mix, seconds_per_mix = self.local.steps_per_mix, self.config.mix_every_s
        steps, seconds = self.local.steps - last_mix.our_steps, now - last_mix.ended_at
        has_waited_steps = steps_per_mix is not None and steps >= MIN_GAP * steps_per_mix
        has_waited_time = seconds_per_mix is not None and seconds >= MIN_GAP * seconds_per_mix
        return not (has_waited_steps or has_waited_time)

    def is_unproven(self, peer: PeerId) -> bool:
        """Return True for an unproven partner while exchanges with such partners fail.

        All of them count as one. They have one exchange at a time, and none for a while after it took too long. The
        only other member of our run never has to wait, since there is none to mix with instead.
        """
        if self.unproven_failures < WARY_FAILURES or peer in self.last_mixes or peer == self.me:
            return False
        return self.has_others({peer})

    def max_incoming(self) -> int:
        """Return the limit of incoming exchanges at the same time as our own."""
        if self.all_at_once:
            return min(max(1, len(self.selector.neighbours(self))), MAX_NEIGHBOURS)
        return self.incoming_limit

    def max_weight(self, partner: PeerId, used_slots: int) -> float:
        """Return the largest weight of a pair: with all neighbours at once, the Metropolis weight."""
        if self.all_at_once:
            return min(0.5, self.selector.weight(self, partner))
        return 0.5 if self.pushes else pair_cap(used_slots)

    # -- members of our run --------------------------------------------------------------------------------------
    def has_others(self, peers: Collection[PeerId]) -> bool:
        """Return True if our run has other members than these, including busy ones and those in back-off."""
        return any(peer not in peers and self.is_in_run(peer) for peer in self.alive())

    def is_in_run(self, peer: PeerId) -> bool:
        """Return True if the member is in our run and has its weights."""
        record = self.members.record(peer)
        return record is not None and record.ready and record.run_id == self.local.run_id

    def present(self, partners: Iterable[PeerId]) -> list[PeerId]:
        """Return the partners that may mix again: ALIVE, and with the weights of our run."""
        return self.members.ready_among(partners, self.local.run_id)

    # -- mixes that have ended -----------------------------------------------------------------------------------
    @property
    def mixes_with_several(self) -> bool:
        """Return True if a mix of our own is several exchanges."""
        return self.all_at_once or self.config.partners > 1

    def counts_as_mix(self, partners: Collection[PeerId]) -> bool:
        """Return True if an exchange with one of these partners counts as a mix of the schedule.

        With all neighbours, only our own exchanges count: if theirs delayed the schedule, an edge would be mixed every
        other time. A partner that asks all the time does not count either: its mixes come in addition to ours.
        """
        if self.all_at_once:
            return any(partner > self.me for partner in partners)
        last_mixes = [self.last_mixes.get(partner) for partner in partners]
        return any(last_mix is None or last_mix.excess < MAX_EXCESS for last_mix in last_mixes)

    def note_mix(self, partner: PeerId, now: float, own: bool) -> None:
        """Note a finished exchange; ``own`` means that we asked."""
        self.note_request(None if own else partner, now)
        earlier_mix = self.last_mixes.get(partner)
        if earlier_mix is None:
            self.unproven_failures = max(self.unproven_failures - 1, 0)
        excess = 0.0 if earlier_mix is None else REQUEST_DECAY * earlier_mix.excess
        self.last_mixes[partner] = LastMix(self.local.steps, now, excess + (-1.0 if own else 1.0))

    def note_request(self, asker: PeerId | None, now: float) -> None:
        """Note who asked for a finished mix; None if we did."""
        intervals = self.trained_intervals(now)
        self.requests.note_mix(asker, intervals, len(self.alive()))
        self.requests.paces.note_steps(self.local.steps, intervals, self.steps_of_others)

    def steps_of_others(self) -> dict[PeerId, int]:
        """Return the step counts that the members of our run state."""
        records = map(self.members.record, self.present(self.alive()))
        return {record.id: record.steps for record in records if record is not None}

    def note_success(self, partner: PeerId) -> None:
        self.back_off.note_success(partner)

    def note_failure(self, partner: PeerId, now: float, silent: bool = False) -> None:
        """Note a failed exchange; ``silent`` means that the partner had not answered."""
        self.back_off.note_failure(partner, now, silent)
        self.note_slow(partner, now)

    def note_slow(self, partner: PeerId, now: float) -> None:
        """Note that an exchange takes too long, or has failed."""
        if partner not in self.last_mixes:
            self.unproven_failures = min(self.unproven_failures + 1, WARY_FAILURES + 1)
            if self.unproven_failures >= WARY_FAILURES:
                self.wary_until = now + WARY_S

    def note_rate(self, partner: PeerId, seconds: float) -> None:
        """Learn a partner's rate from an exchange of the whole vector; the time includes the round trip."""
        if seconds > 0 and self.vector_mb > 0:
            self.selector.note_rate(partner, self.vector_mb / seconds)
