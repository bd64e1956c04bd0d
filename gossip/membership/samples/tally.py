"""The samples behind each run, as far as what members state is believed, without walking the table."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable

from gossip.effects import MemberState
from gossip.ids import MemberRecord, PeerId
from gossip.membership.entry import Entry
from gossip.membership.samples.credit import MOST_SAMPLES, Credit
from gossip.membership.samples.run_count import RunCount, made

__all__ = ["Tally"]

ALIVE = MemberState.ALIVE
MAX_FINISHED_RUNS = 64  # runs without members whose sums are kept
INCLUDED_S = 60.0  # after we took a run's count over: two push-pulls, which bring those whose samples it contains
STRANGERS_SAVE_S = 10.0  # of what they may be credited together: what was not used in longer is gone
SETTLED_AT_ONCE = 256  # members whose claims were not credited in full, looked at each second


class Tally:
    """Sums over ``entries``, each in the one of its run: what is credited of what their records state, and what they
    are reckoned to make since. ``links``: members whose pace is watched. ``me``: our own record."""

    def __init__(
        self, entries: dict[PeerId, Entry], links: Iterable[PeerId], me: MemberRecord, now: float, fastest: float
    ) -> None:
        self.entries, self.links = entries, links
        self.now_s = now  # up to when members are reckoned with: of the latest call
        self.credit = Credit(fastest, now)
        self._me = me.id
        self._behind: OrderedDict[PeerId, None] = OrderedDict()  # those whose claims are not credited in full
        self._settled_s = self._strangers_paid_s = now
        self._fastest = 0.0  # no rate that is reckoned with in full is above this
        self._base, self._from = me.base_samples, 0  # our run's count when we came to it; the sum of its members then
        self._included_s = -math.inf  # when we took a count over
        self._runs: dict[bytes, RunCount] = {}
        self._max_runs = MAX_FINISHED_RUNS

    @property
    def genesis(self) -> bytes:
        """Of our own run."""
        return self.entries[self._me].record.genesis

    # -- members ------------------------------------------------------------------------------------------------------
    def enter(self, entry: Entry, now: float) -> None:
        """A new one, or one that was forgotten; ``entry.counted`` of its samples are in the sums already."""
        self.now_s, record = now, entry.record
        self.run(record.genesis, now).members += 1
        included = now < self._included_s + INCLUDED_S and record.genesis == self.genesis
        if entry.restored or included:  # trained before we came, and in the count that we took over
            since_s = now - self._included_s if included else 0.0
            before = 1.0 - since_s / record.clock_s if record.clock_s > 0 else 1.0
            entry.counted = int(max(0.0, before) * record.samples)
            if included and record.rate > 0:
                entry.undated_s = now
        self.count_base(record, now)
        more = record.samples - entry.counted
        if more > 0:
            self._credit(entry, more, now)

    def leave(self, entry: Entry) -> None:
        """It is forgotten, and its samples stay in the sums."""
        self._behind.pop(entry.record.id, None)
        self._runs[entry.record.genesis].members -= 1

    def move(self, entry: Entry, genesis: bytes, now: float) -> None:
        """It holds another run's weights: what it trained is behind the old run's; from now on behind these."""
        self._runs[entry.record.genesis].members -= 1
        self.run(genesis, now).members += 1
        entry.counted, entry.ahead, entry.undated_s = 0, 0, math.inf

    def trained(self, samples: int, now: float) -> None:
        """We made so many more, signed or not: what a member can make is measured by it."""
        self.credit.made(None, samples, now)

    def reckon(self, entry: Entry, now: float) -> None:
        """It goes on as its record says, as far as that is believed; what it is to count until now was not paid yet."""
        rate, peer = entry.record.rate, entry.record.id
        if rate <= 0 or entry.state is not ALIVE or not entry.met or peer == self._me:
            return
        if rate > self.credit.per_s:
            rate = self.credit.per_s
            self._behind[peer] = None
        elif rate > self._fastest:
            self._fastest = rate
        since_s = max(entry.reckoned_s, entry.paid_s)
        if since_s > now:  # it was paid for more than it is believed now, and waits
            self._behind[peer] = None
            return
        entry.rate, entry.reckoned_s = rate, since_s
        self._runs[entry.record.genesis].begin(rate, since_s)

    def halt(self, entry: Entry, now: float) -> None:
        """What it was reckoned to make until now is in the sums, and no more comes to it."""
        rate, run = entry.rate, self._runs[entry.record.genesis]
        if not rate:
            return
        run.end(rate, entry.reckoned_s)
        entry.rate = 0.0
        more = made(rate, entry.reckoned_s, now)
        if more:
            entry.reckoned_s += more / rate  # what is left of a sample is made with the next
            entry.ahead += more
            entry.paid_s += more / self.credit.per_s
            run.add(more)

    def renew(self, entry: Entry, record: MemberRecord, now: float) -> None:
        """A newer record of it: what was reckoned since the one before is put right by what it states."""
        self.halt(entry, now)
        old = entry.record
        if record.samples < old.samples:
            entry.counted = entry.ahead = 0  # another life, which does not remember this one
        elif entry.undated_s <= now:
            # What it had made beyond that record when we took the count over is in there. Of the rest its rate tells.
            entry.counted += max(0, record.samples - old.samples - made(old.rate, entry.undated_s, now))
        if record.incarnation != old.incarnation:  # another life has another clock, and one that slept is behind
            entry.lag_s = math.inf
        entry.lag_s = min(entry.lag_s, now - record.clock_s)
        entry.undated_s, entry.record, entry.reckoned_s = math.inf, record, entry.lag_s + record.clock_s
        entry.counted += entry.ahead
        entry.ahead = 0
        more = record.samples - entry.counted
        if more > 0:
            self._credit(entry, more, now, put_right=old.rate > 0)
        elif more < 0:  # it made less than its rate promised
            entry.counted = record.samples
            self._runs[record.genesis].add(more)

    def count_base(self, record: MemberRecord, now: float) -> None:
        run = self._runs[record.genesis]
        if record.base_samples > run.claimed_base:
            if run.claimed_base == run.base:
                run.paid_s = now  # a first claim counts nothing
            run.claimed_base = record.base_samples
            if record.id == self._me:
                run.base = record.base_samples

    def _credit(self, entry: Entry, more: int, now: float, *, put_right: bool = False) -> None:
        """Take so many samples of the member into its run's sum, or as many as it can have made since it was paid.
        ``put_right``: they were made over all the time in which it was reckoned with, and say nothing of its pace."""
        credit, peer = self.credit, entry.record.id
        run = self._runs[entry.record.genesis]
        if peer != self._me:
            paid_s = entry.paid_s
            if not entry.met:  # names cost nothing: all whom we know by hearsay together are believed what one is
                self._strangers_paid_s = max(self._strangers_paid_s, now - STRANGERS_SAVE_S)
                paid_s = max(paid_s, self._strangers_paid_s)
            can = (now - paid_s) * credit.per_s
            if can < more:
                self._behind[peer] = None
                more = int(can)
                if more <= 0:
                    return
            if not entry.met:
                self._strangers_paid_s += more / credit.per_s
            entry.paid_s += more / credit.per_s
            if not put_right and not entry.record.rate:
                credit.made(peer, more, now)
        entry.counted += more
        run.add(more)

    def settle(self, now: float) -> None:
        """Once a second: measure how fast members are, and credit what was stated faster than it was believed. Also of
        those who say no more, as who has left. No rate is reckoned with beyond what is believed by then."""
        if now < self._settled_s + 1.0:
            return
        self._settled_s = now
        credit, entries = self.credit, self.entries
        if credit.due(now):
            credit.watch(self.links, entries, now)
            if credit.per_s < self._fastest:  # rare: who is so fast is among those behind from now on
                self._fastest = 0.0
                for entry in entries.values():
                    if entry.rate:
                        self.halt(entry, now)
                        self.reckon(entry, now)
        for _ in range(min(len(self._behind), SETTLED_AT_ONCE)):
            peer, _ = self._behind.popitem(last=False)
            entry = entries[peer]
            self.halt(entry, now)
            more = entry.record.samples - entry.counted
            if more > 0:
                self._credit(entry, more, now)
            self.reckon(entry, now)
        for run in self._runs.values():
            more = min(run.claimed_base - run.base, int((now - run.paid_s) * self.credit.per_s))
            if more > 0:
                run.base += more
                run.paid_s = now

    def rebase(self, base: int, now: float, *, included: bool, afresh: bool) -> None:
        """Our run, that of our own record, has ``base`` samples behind it. ``included``: what its members have stated
        until now is among them, and so is what those stated of whom we hear in the next minute. ``afresh``: what was
        credited to the run until now is not counted beside it."""
        genesis, self.now_s = self.genesis, now
        if included:
            for peer, entry in self.entries.items():
                if entry.record.genesis == genesis:
                    self.halt(entry, now)
                    entry.counted, entry.ahead = max(entry.counted, entry.record.samples), 0
                    entry.undated_s, entry.reckoned_s = now if entry.record.rate > 0 else math.inf, now
                    self._behind.pop(peer, None)
                    self.reckon(entry, now)
        self._included_s = now if included else -math.inf
        self._base = min(base, MOST_SAMPLES)
        self._from = self._runs[genesis].at(now) if afresh or included else 0

    @property
    def samples(self) -> int:
        """Behind the weights of our own run, ours among them."""
        since = self._runs[self.genesis].at(self.now_s) - self._from
        return min(self._base + max(since, 0), MOST_SAMPLES)

    def samples_of(self, genesis: bytes) -> int:
        """Credited to the members of a run, and the base they state."""
        run = self._runs.get(genesis)
        return 0 if run is None else min(run.at(self.now_s) + run.base, MOST_SAMPLES)

    def claimed_more(self, genesis: bytes) -> bool:
        """Whether members of this run state more than is credited to them by now."""
        run = self._runs.get(genesis)
        return run is not None and (
            run.base < run.claimed_base or any(self.entries[peer].record.genesis == genesis for peer in self._behind)
        )

    def run(self, genesis: bytes, now: float) -> RunCount:
        run = self._runs.get(genesis)
        if run is None:
            if len(self._runs) >= self._max_runs:
                self._runs = {key: run for key, run in self._runs.items() if run.members}
                self._max_runs = MAX_FINISHED_RUNS + 2 * len(self._runs)  # so that dropping them costs O(1) each
            run = self._runs[genesis] = RunCount(now)
        return run
