"""Everyone we know of: one entry each, sampled, summed and digested without walking the table."""

from __future__ import annotations

import hashlib
import heapq
import math
import random
import struct
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from functools import lru_cache

from gossip.effects import MemberState
from gossip.ids import MemberRecord, PeerId
from gossip.membership.credit import MOST_SAMPLES, Credit
from gossip.membership.run_count import RunCount, made
from gossip.wire.messages import MAX_BUCKETS, Hint, Update

__all__ = ["VERIFIED_BURST", "VERIFIED_PER_S", "Allowance", "Entry", "Table"]

ALIVE, SUSPECT, DEAD, LEFT = MemberState.ALIVE, MemberState.SUSPECT, MemberState.DEAD, MemberState.LEFT
DIGEST = struct.Struct(f"<{MAX_BUCKETS}Q")
MAX_HASHES = 1 << 14  # kept, 4 MiB: in a simulation every peer asks for the same ones
MOST_OF_ONE = 3 / 4  # of the table for what one introducer tells of: all of the largest swarm, and many who left it
HEARSAY = 4  # members by hearsay count for N up to so many times those we met: names cost nothing
MAX_FINISHED_RUNS = 64  # runs without members whose sums are kept
INCLUDED_S = 60.0  # after we took a run's count over: two push-pulls, which bring those whose samples it contains
STRANGERS_SAVE_S = 10.0  # of what they may be credited together: what was not used in longer is gone
SETTLED_AT_ONCE = 256  # members whose claims were not credited in full, looked at each second
VERIFIED_PER_S = 100.0  # of one link, 1.3 % of a core at 131 us each; a swarm tells of 10 a second, and of what changes
VERIFIED_BURST = 800.0  # half of a swarm of 1,600 that comes back at once
VOUCHED = 8  # strangers whom one home makes owners of data: a liar counts for nine at most, and no data is without one
NEVER_S = -math.inf  # one object: negated anew for each entry they were 160 MB among 1,000 simulated peers


class Allowance:
    """A token bucket: ``rate`` a second, ``burst`` at once."""

    __slots__ = ("_at_s", "_burst", "_rate", "_tokens")

    def __init__(self, rate: float, burst: float, now: float) -> None:
        self._rate, self._burst = rate, burst
        self._tokens, self._at_s = burst, now

    def take(self, now: float) -> bool:
        """Whether one more is within the allowance; if so it is spent."""
        self._tokens = min(self._burst, self._tokens + (now - self._at_s) * self._rate)
        self._at_s = now
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True

    def widen(self, burst: float) -> None:
        """As much at once from now on; what is new of it may be spent at once, and only the first time."""
        if burst > self._burst:
            self._tokens += burst - self._burst
            self._burst = burst


class Entry:
    """One member as we hold it. Only :class:`Table` changes ``record`` and ``state``."""

    __slots__ = (
        "accusers", "acked_s", "ahead", "allowance", "answer_due", "answered_s", "asked_all", "asked_s", "at",
        "counted", "digest_s", "expires_s", "hash", "home", "introducer", "lag_s", "linked", "met", "paid_s", "place",
        "rate", "reckoned_s", "record", "restored", "rtt_s", "shares", "since_s", "state", "told_s", "tries", "try_s",
        "undated_s", "verifying",
    )  # fmt: skip

    def __init__(self, record: MemberRecord, state: MemberState, now: float) -> None:
        self.record = record
        self.state = state
        self.since_s = now  # when it came into this state
        self.restored = False  # DEAD only because we remember it from an earlier life: no evidence, and told to nobody
        self.at = -1  # its place among those of its state
        self.shares = False  # ALIVE, ready and met
        self.counted = 0  # of the samples that its record states, those that are in the sums
        self.rate = 0.0  # samples a second that it is reckoned to make: while it is ALIVE and met
        self.reckoned_s = now  # up to when; and before it is met, from when on its record's rate holds
        self.ahead = 0  # of those reckoned until then, whole ones: in the sums beside what is counted
        self.lag_s = now - record.clock_s  # our clock less its own, by the record that came soonest
        self.undated_s = math.inf  # when its record came with the count that we took over: who knows how old it was
        self.paid_s = now  # up to when what it may be credited is spent
        self.hash = 0  # its part of the digest
        self.accusers: tuple[Hint, ...] = ()  # what was said of a SUSPECT; of a DEAD the last word
        self.expires_s = math.inf  # when a SUSPECT is DEAD
        self.linked = False
        self.met = False  # we had a finished link with it, in this life of ours
        self.introducer: PeerId | None = None  # of a stranger: who told us of it
        self.home: PeerId | None = None  # of a stranger that nobody can dial: who vouches for it
        self.place = -1  # among the met and ALIVE, or among the strangers of its introducer
        self.tries = 0  # dials to a stranger that failed
        self.try_s = NEVER_S  # when it is its turn to be dialled
        self.acked_s = NEVER_S  # latest proof of life
        self.rtt_s: float | None = None  # smoothed, from its direct Acks
        self.told_s = NEVER_S  # when we last told it what is said of it
        self.answered_s = NEVER_S  # when we last answered what it says of us
        self.asked_s = NEVER_S  # when we last sent it a Digest
        self.asked_all = False  # that one was empty
        self.answer_due = False  # it may still name the buckets that it wants in answer
        self.digest_s = NEVER_S  # when it last sent us one
        self.allowance: Allowance | None = None  # for its hints
        self.verifying: Allowance | None = None  # for records that it tells and whose signatures we must check

    @property
    def reachable(self) -> bool:
        """Whether a message can go to it: over a link, or by dialling."""
        return self.linked or self.record.address is not None

    def expect(self, records: float, now: float) -> Allowance:
        """It may tell us of so many members at once, and of VERIFIED_PER_S a second in the long run."""
        if self.verifying is None:
            self.verifying = Allowance(VERIFIED_PER_S, VERIFIED_BURST, now)
        self.verifying.widen(records)
        return self.verifying

    def hint(self) -> Hint:
        """What is said of a SUSPECT or DEAD member: as it was signed, and of a SUSPECT rather what says no more."""
        if self.state is SUSPECT:
            return next((hint for hint in self.accusers if not hint.dead), self.accusers[0])
        return self.accusers[0]

    def accused_by(self, peer: PeerId) -> bool:
        """Whether this one is among those who say so."""
        return any(hint.by == peer for hint in self.accusers)


class Table:
    """Every change is O(1). Bounded: the longest gone are forgotten first, and their samples stay in the sums."""

    def __init__(self, me: MemberRecord, limit: int, now: float, fastest: float = 16.0) -> None:
        self.entries: dict[PeerId, Entry] = {}
        self.links: dict[PeerId, None] = {}  # in the order in which they were made, which a seed must repeat
        self.now_s = now  # up to when members are reckoned with: of the latest call
        self.changes = 0  # of the set of ALIVE and ready members that we met
        self.credit = Credit(fastest, now)
        self._behind: OrderedDict[PeerId, None] = OrderedDict()  # those whose claims are not credited in full
        self._settled_s = self._strangers_paid_s = now
        self._fastest = 0.0  # no rate that is reckoned with in full is above this
        self._base, self._from = me.base_samples, 0  # our run's count when we came to it; the sum of its members then
        self._included_s = -math.inf  # when we took a count over
        self._limit, self._mine = limit, me.id
        self._of: dict[MemberState, list[PeerId]] = {state: [] for state in MemberState}  # without ourselves
        self._gone: OrderedDict[PeerId, None] = OrderedDict()  # DEAD and LEFT, the longest gone first
        self._gone_strangers: OrderedDict[PeerId, None] = OrderedDict()  # of hearsay, likewise
        self.met: list[PeerId] = []  # those of the ALIVE with whom we had a link: all that anything is asked of
        self.strangers: dict[PeerId, list[PeerId]] = {}  # by introducer: all whom we know by hearsay alone
        self._introducers: list[PeerId] = []
        self._vouched: dict[PeerId, dict[PeerId, None]] = {}  # by home: strangers that own data by its word
        self._forgotten: OrderedDict[PeerId, tuple[int, bytes, int]] = OrderedDict()  # incarnation, run, counted
        self._runs: dict[bytes, RunCount] = {}
        self._max_runs = MAX_FINISHED_RUNS
        self._sharing: set[PeerId] = set()
        self._sharers_of: dict[bytes, int] = {}  # of each run that has any
        self._owners: tuple[int, list[PeerId]] = (-1, [])
        self._hashes = [0] * MAX_BUCKETS
        self._digest = b""  # of these, packed; empty after a change
        self._buckets: list[list[PeerId]] = [[] for _ in range(MAX_BUCKETS)]
        self.alive = self._of[ALIVE]
        self.suspects = self._of[SUSPECT]
        self.dead = self._of[DEAD]
        mine = self.add(me, ALIVE, now)  # met, but in no list
        assert mine is not None
        self.mine = mine

    @property
    def size(self) -> int:
        """N of every formula: the members that take part, ourselves included. A thousand names of one liar would make
        everybody tell of its progress every 100 s."""
        there, most = len(self.alive) + len(self.suspects), HEARSAY * (len(self.met) + 1)
        return 1 + (there if there < most else most)

    # -- change --------------------------------------------------------------------------------------------------------
    def add(
        self, record: MemberRecord, state: MemberState, now: float, restored: bool = False,
        introducer: PeerId | None = None,
    ) -> Entry | None:  # fmt: skip
        """A new entry; None when there is no room, or when this is a record of one that we forgot as gone.
        ``introducer``: who told us of it; None: it is here itself."""
        forgotten = self._forgotten.get(record.id)
        if forgotten is not None and record.incarnation <= forgotten[0]:
            return None  # or members who forget at different times would teach it to each other for ever
        if introducer is not None and len(self.strangers.get(introducer, ())) >= MOST_OF_ONE * self._limit:
            if not self._gone_strangers:
                return None
            self._evict(next(iter(self._gone_strangers)))
        if len(self.entries) >= self._limit and not self._make_room(introducer):
            return None
        entry = self.entries[record.id] = Entry(record, state, now)
        entry.restored = restored
        entry.introducer = self._mine if restored else introducer  # an earlier life of ours told us of it
        if entry.introducer is None:
            entry.met = True
        else:
            self._estrange(entry, entry.introducer)
        if forgotten is not None:
            _, genesis, counted = self._forgotten.pop(record.id)
            if genesis == record.genesis and counted <= record.samples:
                entry.counted = counted
        self.now_s = now
        self._run(record.genesis, now).members += 1
        included = now < self._included_s + INCLUDED_S and record.genesis == self.mine.record.genesis
        if restored or included:  # trained before we came, and in the count that we took over
            since_s = now - self._included_s if included else 0.0
            before = 1.0 - since_s / record.clock_s if record.clock_s > 0 else 1.0
            entry.counted = int(max(0.0, before) * record.samples)
            if included and record.rate > 0:
                entry.undated_s = now
        self._count(entry, record, now)
        self._buckets[record.id[0]].append(record.id)
        self._enter(entry)
        return entry

    def place(self, entry: Entry, record: MemberRecord, state: MemberState, now: float) -> None:
        """Hold the member to be as this record says, and in this state."""
        self.now_s = now
        if state is not entry.state or entry.restored or record.incarnation != entry.record.incarnation:
            self._leave(entry)
            if state is not entry.state:
                entry.since_s = now
            self._replace(entry, record, now)
            entry.state, entry.restored = state, False
            self._enter(entry)
        else:
            self._replace(entry, record, now)
            self._reckon(entry, now)
            self._vouch_anew(entry)
            if record.ready is not entry.shares and state is ALIVE and entry.met:
                self._share(entry, record.ready)

    def progress(self, entry: Entry, record: MemberRecord, now: float) -> None:
        """What :meth:`place` comes to when a record brings new counts alone: most do, and every member takes each."""
        self._renew(entry, record, now)
        self._reckon(entry, now)

    def forget(self, before_s: float) -> None:
        """Drop those who are gone since before this time."""
        for gone in (self._gone, self._gone_strangers):
            while gone and self.entries[next(iter(gone))].since_s < before_s:
                self._evict(next(iter(gone)))

    def meet(self, entry: Entry, now: float) -> None:
        """We have a link with it: what was hearsay is known from now on."""
        if entry.met:
            return
        self.now_s = now
        if entry.introducer is not None:
            self._familiar(entry)
        self._leave(entry)
        entry.met = True
        self._enter(entry)

    def vouch(self, entry: Entry, home: Entry) -> None:
        """A home of its own tells us of it. Two members that nobody can dial never meet; but each counts as an owner of
        data to the other, or what they train would overlap for ever."""
        told = self._vouched.get(home.record.id, {})
        if entry.home is None and vouchable(entry, home) and len(told) < VOUCHED:
            entry.home = home.record.id
            told[entry.record.id] = None
            self._vouched[entry.home] = told
            self.changes += 1

    def _vouch_anew(self, entry: Entry) -> None:
        """Whether it is still vouched for, and may still vouch for others: after every change of it but progress."""
        if entry.home is not None and not vouchable(entry, self.entries[entry.home]):
            self._unvouch(entry)
        told = self._vouched.get(entry.record.id)
        if told is not None and not (entry.met and entry.state is ALIVE):
            for peer in list(told):
                self._unvouch(self.entries[peer])

    def _unvouch(self, entry: Entry) -> None:
        if entry.home is None:
            return
        told = self._vouched[entry.home]
        del told[entry.record.id]
        if not told:
            del self._vouched[entry.home]
        entry.home = None
        self.changes += 1

    def stranger(self, rng: random.Random) -> PeerId | None:
        """One of those known by hearsay: of any introducer alike, and of its any alike."""
        if not self._introducers:
            return None
        told = self.strangers[self._introducers[int(rng.random() * len(self._introducers))]]
        return told[int(rng.random() * len(told))]

    def _estrange(self, entry: Entry, introducer: PeerId) -> None:
        told = self.strangers.get(introducer)
        if told is None:
            told = self.strangers[introducer] = []
            self._introducers.append(introducer)
        entry.place = len(told)
        told.append(entry.record.id)

    def _familiar(self, entry: Entry) -> None:
        introducer = entry.introducer
        assert introducer is not None
        told = self.strangers[introducer]
        take_out(told, entry.place, self.entries)
        if not told:
            del self.strangers[introducer]
            self._introducers.remove(introducer)  # as many as members that ever told us of one
        entry.introducer = None

    def _make_room(self, introducer: PeerId | None) -> bool:
        """Of hearsay first: the longest gone, then some of whoever tells of most, if that is another; and of those whom
        we met the longest gone, but not where hearsay fills half of the table. The living whom we met all stay."""
        if self._gone_strangers:
            return self._evict(next(iter(self._gone_strangers)))
        hearsay = len(self.entries) - len(self.met) - len(self._gone)
        if self._introducers and (introducer is None or hearsay > self._limit // 2):
            told = {one: len(those) for one, those in self.strangers.items() if one != self._mine}
            most = max(told, key=lambda one: told[one], default=None)
            least = 0 if introducer is None else told.get(introducer, 0) + 1
            if most is None or least >= told[most]:
                return False
            latest = (peer for peer in reversed(self.strangers[most]) if self.entries[peer].state is not SUSPECT)
            peer = next(latest, None)  # and none whose accusers wait to be judged
            return peer is not None and self._evict(peer)
        return self._forget_oldest()

    def _forget_oldest(self) -> bool:
        return bool(self._gone) and self._evict(next(iter(self._gone)))

    def _evict(self, peer: PeerId) -> bool:
        entry = self.entries[peer]
        self._leave(entry)
        self._unvouch(entry)
        for other in list(self._vouched.get(peer, ())):
            self._unvouch(self.entries[other])
        if entry.introducer is not None:
            self._familiar(entry)
        del self.entries[peer]
        self._buckets[peer[0]].remove(peer)  # of about N / 256
        self.links.pop(peer, None)
        self._behind.pop(peer, None)
        self._runs[entry.record.genesis].members -= 1
        self._forgotten[peer] = (entry.record.incarnation, entry.record.genesis, entry.counted + entry.ahead)
        if len(self._forgotten) > self._limit:
            self._forgotten.popitem(last=False)
        return True

    def _enter(self, entry: Entry) -> None:
        peer, state = entry.record.id, entry.state
        if peer != self._mine:
            entry.at = len(self._of[state])
            self._of[state].append(peer)
            if state is DEAD or state is LEFT:
                (self._gone if entry.introducer in (None, self._mine) else self._gone_strangers)[peer] = None
            elif state is ALIVE and entry.met:
                entry.place = len(self.met)
                self.met.append(peer)
        if not entry.restored:
            entry.hash = entry_hash(peer, entry.record.incarnation, state.value)
            self._hashes[peer[0]] ^= entry.hash
            self._digest = b""
        self._reckon(entry, self.now_s)
        self._share(entry, state is ALIVE and entry.record.ready and entry.met)
        self._vouch_anew(entry)

    def _leave(self, entry: Entry) -> None:
        peer, state = entry.record.id, entry.state
        self._halt(entry, self.now_s)
        if peer != self._mine:
            those = self._of[state]
            last = those.pop()
            if last != peer:
                those[entry.at] = last
                self.entries[last].at = entry.at
            if state is ALIVE and entry.met:
                take_out(self.met, entry.place, self.entries)
            self._gone.pop(peer, None)
            self._gone_strangers.pop(peer, None)
        self._hashes[peer[0]] ^= entry.hash
        self._digest = b""
        entry.hash = 0
        self._share(entry, False)

    def _share(self, entry: Entry, shares: bool) -> None:
        if shares is not entry.shares:
            entry.shares = shares
            self.changes += 1
            if shares:
                self._sharing.add(entry.record.id)
                self._sharers(entry.record.genesis, 1)
            else:
                self._sharing.discard(entry.record.id)
                self._sharers(entry.record.genesis, -1)

    def _sharers(self, genesis: bytes, more: int) -> None:
        count = self._sharers_of.get(genesis, 0) + more
        if count:
            self._sharers_of[genesis] = count
        else:
            del self._sharers_of[genesis]

    def _replace(self, entry: Entry, record: MemberRecord, now: float) -> None:
        old = entry.record
        if record is old:
            return
        self._halt(entry, now)
        if record.genesis != old.genesis:  # what it trained is behind the old run's weights; from now on the new one's
            self._runs[old.genesis].members -= 1
            self._run(record.genesis, now).members += 1
            if entry.shares:
                self._sharers(old.genesis, -1)
                self._sharers(record.genesis, 1)
            entry.counted, entry.ahead, entry.undated_s = 0, 0, math.inf
        self._renew(entry, record, now)
        self._count_base(record, now)

    # -- samples -------------------------------------------------------------------------------------------------------
    def trained(self, samples: int, now: float) -> None:
        """We made so many more, signed or not: what a member can make is measured by it."""
        self.credit.made(None, samples, now)

    def _reckon(self, entry: Entry, now: float) -> None:
        """It goes on as its record says, as far as that is believed; what it is to count until now was not paid yet."""
        rate, peer = entry.record.rate, entry.record.id
        if rate <= 0 or entry.state is not ALIVE or not entry.met or peer == self._mine:
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

    def _halt(self, entry: Entry, now: float) -> None:
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

    def _renew(self, entry: Entry, record: MemberRecord, now: float) -> None:
        """A newer record of it: what was reckoned since the one before is put right by what it states."""
        self._halt(entry, now)
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

    def _count(self, entry: Entry, record: MemberRecord, now: float) -> None:
        self._count_base(record, now)
        more = record.samples - entry.counted
        if more > 0:
            self._credit(entry, more, now)

    def _count_base(self, record: MemberRecord, now: float) -> None:
        run = self._runs[record.genesis]
        if record.base_samples > run.claimed_base:
            if run.claimed_base == run.base:
                run.paid_s = now  # a first claim counts nothing
            run.claimed_base = record.base_samples
            if record.id == self._mine:
                run.base = record.base_samples

    def _credit(self, entry: Entry, more: int, now: float, *, put_right: bool = False) -> None:
        """Take so many samples of the member into its run's sum, or as many as it can have made since it was paid.
        ``put_right``: they were made over all the time in which it was reckoned with, and say nothing of its pace."""
        credit, peer = self.credit, entry.record.id
        run = self._runs[entry.record.genesis]
        if peer != self._mine:
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
            credit.watch(((peer, entries[peer].rate) for peer in self.links), now)
            if credit.per_s < self._fastest:  # rare: who is so fast is among those behind from now on
                self._fastest = 0.0
                for entry in entries.values():
                    if entry.rate:
                        self._halt(entry, now)
                        self._reckon(entry, now)
        for _ in range(min(len(self._behind), SETTLED_AT_ONCE)):
            peer, _ = self._behind.popitem(last=False)
            entry = entries[peer]
            self._halt(entry, now)
            more = entry.record.samples - entry.counted
            if more > 0:
                self._credit(entry, more, now)
            self._reckon(entry, now)
        for run in self._runs.values():
            more = min(run.claimed_base - run.base, int((now - run.paid_s) * self.credit.per_s))
            if more > 0:
                run.base += more
                run.paid_s = now

    def rebase(self, base: int, now: float, *, included: bool, afresh: bool) -> None:
        """Our run, that of our own record, has ``base`` samples behind it. ``included``: what its members have stated
        until now is among them, and so is what those stated of whom we hear in the next minute. ``afresh``: what was
        credited to the run until now is not counted beside it."""
        genesis, self.now_s = self.mine.record.genesis, now
        if included:
            for peer, entry in self.entries.items():
                if entry.record.genesis == genesis:
                    self._halt(entry, now)
                    entry.counted, entry.ahead = max(entry.counted, entry.record.samples), 0
                    entry.undated_s, entry.reckoned_s = now if entry.record.rate > 0 else math.inf, now
                    self._behind.pop(peer, None)
                    self._reckon(entry, now)
        self._included_s = now if included else -math.inf
        self._base = min(base, MOST_SAMPLES)
        self._from = self._runs[genesis].at(now) if afresh or included else 0

    @property
    def samples(self) -> int:
        """Behind the weights of our own run, ours among them."""
        since = self._runs[self.mine.record.genesis].at(self.now_s) - self._from
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

    def _run(self, genesis: bytes, now: float) -> RunCount:
        run = self._runs.get(genesis)
        if run is None:
            if len(self._runs) >= self._max_runs:
                self._runs = {key: run for key, run in self._runs.items() if run.members}
                self._max_runs = MAX_FINISHED_RUNS + 2 * len(self._runs)  # so that dropping them costs O(1) each
            run = self._runs[genesis] = RunCount(now)
        return run

    # -- questions -----------------------------------------------------------------------------------------------------
    def forgot(self, peer: PeerId) -> bool:
        """Whether this is one that was gone for so long that we dropped it."""
        return peer in self._forgotten

    def owners(self) -> list[PeerId]:
        """Sorted ids of the ALIVE and ready that we met or for whom a home vouches, ourselves included; sorted anew
        only after a change."""
        if self._owners[0] != self.changes:
            self._owners = (self.changes, sorted(self._sharing.union(*self._vouched.values())))
        return self._owners[1]

    def runs(self) -> list[bytes]:
        """The geneses of the ALIVE and ready that we met, our own among them."""
        return list(self._sharers_of)

    def sample(
        self, count: int, rng: random.Random, suspects: bool = False, without: PeerId | None = None
    ) -> list[Entry]:
        """Up to ``count`` different ALIVE (and SUSPECT) members that we met and can send to, uniformly."""
        alive, entries, random_ = self.met, self.entries, rng.random
        doubted = self.suspects if suspects else []
        total = len(alive) + len(doubted)
        chosen: list[Entry] = []
        few = total <= 2 * count
        order = list(range(total)) if few else []
        if few:
            rng.shuffle(order)
        # Four draws each: where most are out of reach a few less are found, rather than walking the table.
        for turn in range(total if few else 4 * count):
            at = order[turn] if few else int(random_() * total)
            entry = entries[alive[at] if at < len(alive) else doubted[at - len(alive)]]
            if entry.reachable and entry.met and entry.record.id != without and entry not in chosen:
                chosen.append(entry)
                if len(chosen) == count:
                    break
        return chosen

    def latest(self, count: int) -> list[MemberRecord]:
        """Records of others that we met, in this life or an earlier one, and that have an address: most recently alive
        first. Walks the table."""

        def recent(entry: Entry) -> tuple[bool, float]:
            return entry.state is ALIVE or entry.state is SUSPECT, max(entry.since_s, entry.acked_s)

        ours = (None, self._mine)
        others = (e for e in self.entries.values() if e.introducer in ours and e is not self.mine)
        dialable = (e for e in others if e.record.address is not None)
        return [entry.record for entry in heapq.nlargest(count, dialable, key=recent)]

    # -- digests -------------------------------------------------------------------------------------------------------
    def digest(self) -> bytes:
        """8 bytes for each of 256 buckets: the XOR of its entries' hashes."""
        if not self._digest:
            self._digest = DIGEST.pack(*self._hashes)
        return self._digest

    def differing(self, hashes: bytes) -> bytes:
        """The numbers of the buckets in which this digest differs from ours; all for an empty one."""
        if not hashes:
            return bytes(range(MAX_BUCKETS))
        if hashes == self.digest():
            return b""
        theirs = DIGEST.unpack(hashes)
        return bytes([number for number, ours in enumerate(self._hashes) if ours != theirs[number]])

    def updates_of(self, buckets: Iterable[int]) -> Iterator[Update]:
        """The entries of these buckets: a record, and behind it the hint if the member is SUSPECT or DEAD."""
        for number in buckets:
            for peer in self._buckets[number]:
                entry = self.entries[peer]
                if not entry.restored:
                    yield entry.record
                    if entry.state is SUSPECT or entry.state is DEAD:
                        yield entry.hint()


def vouchable(entry: Entry, home: Entry) -> bool:
    """Whether this home, a member that we met, may vouch for a stranger that nobody can dial."""
    record = entry.record
    stranger = entry.state is ALIVE and record.ready and record.address is None and not entry.met
    return stranger and home.met and home.state is ALIVE and home.record.id in record.homes


def take_out(ids: list[PeerId], place: int, entries: dict[PeerId, Entry]) -> None:
    """The last one takes its place."""
    last = ids.pop()
    if place < len(ids):
        ids[place] = last
        entries[last].place = place


@lru_cache(MAX_HASHES)
def entry_hash(peer: PeerId, incarnation: int, state: str) -> int:
    """Without the sequence: progress is gossip's alone, or no two digests would ever be equal."""
    text = peer + incarnation.to_bytes(8, "little") + state.encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
