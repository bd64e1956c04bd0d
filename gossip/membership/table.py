"""The table of all known members. Sampling and digests do not walk it."""

from __future__ import annotations

import hashlib
import heapq
import random
import struct
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from functools import lru_cache

from gossip.effects import MemberState
from gossip.ids import MemberRecord, PeerId
from gossip.membership.arrears import Arrears
from gossip.membership.entry import Entry
from gossip.wire.messages import MAX_BUCKETS, Update

__all__ = ["Table"]

ALIVE, SUSPECT, DEAD, LEFT = MemberState.ALIVE, MemberState.SUSPECT, MemberState.DEAD, MemberState.LEFT
DIGEST = struct.Struct(f"<{MAX_BUCKETS}Q")
MAX_HASHES = 1 << 14  # cached hashes, 4 MiB: in a simulation every peer asks for the same ones
MOST_OF_ONE = 3 / 4  # share of the table for one introducer: room for the largest swarm and for many that left it
HEARSAY = 4  # hearsay members count for N up to this many times the contacted, since new ids cost nothing
VOUCHED = 8  # strangers that one home makes owners of data: a liar counts for nine at most, and all data has an owner


class Table:
    """The table of members, with changes in O(1). If it is full, the member that is gone longest is dropped first."""

    def __init__(self, me: MemberRecord, limit: int, now: float) -> None:
        self.entries: dict[PeerId, Entry] = {}
        self.links: dict[PeerId, None] = {}  # in the order of creation, so that a seed repeats a run
        self.changes = 0  # counts changes of the set of ALIVE and ready members that had a link with us
        self.arrears = Arrears(now)
        self._limit, self._mine = limit, me.id
        self._of: dict[MemberState, list[PeerId]] = {state: [] for state in MemberState}  # without ourselves
        self._gone: OrderedDict[PeerId, None] = OrderedDict()  # DEAD and LEFT, the longest gone first
        self._gone_strangers: OrderedDict[PeerId, None] = OrderedDict()  # the same for hearsay members
        self.contacted: list[PeerId] = []  # ALIVE members that had a link with us. Only these are asked for anything.
        self.strangers: dict[PeerId, list[PeerId]] = {}  # hearsay members by introducer
        # Those that can be dialled, likewise: half of a swarm may have no address, and the gone stay for a day.
        self._dialable: dict[PeerId, list[PeerId]] = {}
        self._introducers: list[PeerId] = []  # the keys of `_dialable`
        # By home: strangers that own data because it vouches for them.
        self._vouched: dict[PeerId, dict[PeerId, None]] = {}
        self._forgotten: OrderedDict[PeerId, int] = OrderedDict()  # dropped members and their last incarnation
        self._sharing: set[PeerId] = set()
        self._sharers_of: dict[bytes, int] = {}  # number of ALIVE, ready and contacted members by run
        self._owners: tuple[int, list[PeerId]] = (-1, [])
        self._hashes = [0] * MAX_BUCKETS
        self._digest = b""  # the packed hashes; empty after a change
        self._buckets: list[list[PeerId]] = [[] for _ in range(MAX_BUCKETS)]
        self.alive = self._of[ALIVE]
        self.suspects = self._of[SUSPECT]
        self.dead = self._of[DEAD]
        mine = self.add(me, ALIVE, now)  # contacted, but in no list
        assert mine is not None
        self.mine = mine

    @property
    def size(self) -> int:
        """Return N of every formula: the number of participating members, ourselves included.

        Hearsay is capped. Otherwise a liar with a thousand ids would slow every member's progress to one in 100 s.
        """
        there, most = len(self.alive) + len(self.suspects), HEARSAY * (len(self.contacted) + 1)
        return 1 + (there if there < most else most)

    # -- change --------------------------------------------------------------------------------------------------------
    def add(
        self, record: MemberRecord, state: MemberState, now: float, restored: bool = False,
        introducer: PeerId | None = None,
    ) -> Entry | None:  # fmt: skip
        """Add an entry. Return None if there is no room, or the record is one of a dropped member.

        ``introducer``: the peer that told us of the member; None if it is linked itself.
        """
        forgotten = self._forgotten.get(record.id)
        if forgotten is not None and record.incarnation <= forgotten:
            return None  # otherwise members that drop it at different times would reintroduce it to each other for ever
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
            entry.contacted = True
        else:
            self._estrange(entry, entry.introducer)
        self._forgotten.pop(record.id, None)
        self._buckets[record.id[0]].append(record.id)
        self._enter(entry)
        return entry

    def place(self, entry: Entry, record: MemberRecord, state: MemberState, now: float) -> None:
        """Set the record and the state of a member."""
        if state is not entry.state or entry.restored or record.incarnation != entry.record.incarnation:
            self._leave(entry)
            if state is not entry.state:
                entry.since_s = now
            self._replace(entry, record, now)
            entry.state, entry.restored = state, False
            self._enter(entry)
        else:
            self._replace(entry, record, now)
            self._vouch_anew(entry)
            if record.ready is not entry.shares and state is ALIVE and entry.contacted:
                self._share(entry, record.ready)
            self._look(entry)

    def progress(self, entry: Entry, record: MemberRecord, now: float) -> None:
        """Do the part of :meth:`place` that suffices for new counts. Most records bring nothing else."""
        entry.record, entry.named_s = record, now

    def forget(self, before_s: float) -> None:
        """Drop the members that are gone since before this time."""
        for gone in (self._gone, self._gone_strangers):
            while gone and self.entries[next(iter(gone))].since_s < before_s:
                self._evict(next(iter(gone)))

    def meet(self, entry: Entry, now: float) -> None:
        """Note a link with a member, which is no hearsay any more."""
        if entry.contacted:
            return
        self._leave(entry)
        if entry.introducer is not None:
            self._familiar(entry)
        entry.contacted = True
        self._enter(entry)

    def vouch(self, entry: Entry, home: Entry) -> None:
        """Let a home vouch for its undialable member.

        Two undialable members never link with each other. Each must still count as an owner of data to the other, or
        their training data would overlap for ever.
        """
        told = self._vouched.get(home.record.id, {})
        if entry.home is None and vouchable(entry, home) and len(told) < VOUCHED:
            entry.home = home.record.id
            told[entry.record.id] = None
            self._vouched[entry.home] = told
            self.changes += 1

    def _vouch_anew(self, entry: Entry) -> None:
        """Withdraw vouchers that no longer hold, after every change but progress."""
        if entry.home is not None and not vouchable(entry, self.entries[entry.home]):
            self._unvouch(entry)
        told = self._vouched.get(entry.record.id)
        if told is not None and not (entry.contacted and entry.state is ALIVE):
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
        """Return a random ALIVE stranger with an address: of a uniform introducer, a uniform one."""
        if not self._introducers:
            return None
        told = self._dialable[self._introducers[int(rng.random() * len(self._introducers))]]
        return told[int(rng.random() * len(told))]

    def _list(self, entry: Entry) -> None:
        """List a stranger that can be dialled, or take it out of the list, after every change but progress."""
        introducer = entry.introducer
        if introducer is None or entry.state is not ALIVE or entry.record.address is None:
            self._unlist(entry)
        elif entry.turn < 0:
            told = self._dialable.get(introducer)
            if told is None:
                told = self._dialable[introducer] = []
                self._introducers.append(introducer)
            entry.turn = len(told)
            told.append(entry.record.id)

    def _unlist(self, entry: Entry) -> None:
        introducer = entry.introducer
        if introducer is None or entry.turn < 0:
            return
        told = self._dialable[introducer]
        last = told.pop()
        if entry.turn < len(told):
            told[entry.turn] = last
            self.entries[last].turn = entry.turn
        entry.turn = -1
        if not told:
            del self._dialable[introducer]
            self._introducers.remove(introducer)  # linear in the number of introducers

    def _estrange(self, entry: Entry, introducer: PeerId) -> None:
        told = self.strangers.get(introducer)
        if told is None:
            told = self.strangers[introducer] = []
        entry.place = len(told)
        told.append(entry.record.id)

    def _familiar(self, entry: Entry) -> None:
        introducer = entry.introducer
        assert introducer is not None
        told = self.strangers[introducer]
        take_out(told, entry.place, self.entries)
        if not told:
            del self.strangers[introducer]
        entry.introducer = None

    def _make_room(self, introducer: PeerId | None) -> bool:
        """Evict one member to make room, and return True if that succeeded.

        The stranger that is gone longest goes first. The next choice depends on the newcomer and on the share of
        hearsay. If the newcomer is linked, or hearsay fills half of the table, the introducer with most strangers
        loses its latest one. Otherwise the contacted member that is gone longest goes. ALIVE contacted members stay.
        """
        if self._gone_strangers:
            return self._evict(next(iter(self._gone_strangers)))
        hearsay = len(self.entries) - len(self.contacted) - len(self._gone)
        if self.strangers and (introducer is None or hearsay > self._limit // 2):
            told = {one: len(those) for one, those in self.strangers.items() if one != self._mine}
            most = max(told, key=lambda one: told[one], default=None)
            least = 0 if introducer is None else told.get(introducer, 0) + 1
            if most is None or least >= told[most]:
                return False
            latest = (peer for peer in reversed(self.strangers[most]) if self.entries[peer].state is not SUSPECT)
            peer = next(latest, None)  # a SUSPECT stays: its accusers are still to be judged
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
        self._buckets[peer[0]].remove(peer)  # linear in about N / 256 members
        self.links.pop(peer, None)
        self._forgotten[peer] = entry.record.incarnation
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
            elif state is ALIVE and entry.contacted:
                entry.place = len(self.contacted)
                self.contacted.append(peer)
        if not entry.restored:
            entry.hash = entry_hash(peer, entry.record.incarnation, state.value)
            self._hashes[peer[0]] ^= entry.hash
            self._digest = b""
        self._share(entry, state is ALIVE and entry.record.ready and entry.contacted)
        self._vouch_anew(entry)
        self._look(entry)

    def _look(self, entry: Entry) -> None:
        if entry.record.id != self._mine:
            self._list(entry)
            self.arrears.look(entry, self.mine.record.run_id)

    def _leave(self, entry: Entry) -> None:
        peer, state = entry.record.id, entry.state
        self._unlist(entry)
        if peer != self._mine:
            those = self._of[state]
            last = those.pop()
            if last != peer:
                those[entry.at] = last
                self.entries[last].at = entry.at
            if state is ALIVE and entry.contacted:
                take_out(self.contacted, entry.place, self.entries)
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
                self._sharing_more(entry.record.run_id, 1)
            else:
                self._sharing.discard(entry.record.id)
                self._sharing_more(entry.record.run_id, -1)

    def _sharing_more(self, run_id: bytes, more: int) -> None:
        count = self._sharers_of.get(run_id, 0) + more
        if count:
            self._sharers_of[run_id] = count
        else:
            del self._sharers_of[run_id]

    def _replace(self, entry: Entry, record: MemberRecord, now: float) -> None:
        old = entry.record
        if record is old:
            return
        if record.run_id != old.run_id and entry.shares:
            self._sharing_more(old.run_id, -1)
            self._sharing_more(record.run_id, 1)
        if record.incarnation != old.incarnation:
            entry.life_s = now
        entry.record, entry.named_s = record, now
        if record.run_id != old.run_id and record.id == self._mine:
            self.arrears.restart((other for other in self.entries.values() if other is not entry), record.run_id)

    # -- questions -----------------------------------------------------------------------------------------------------
    def forgot(self, peer: PeerId) -> bool:
        """Return True if this member was dropped after it was gone for long."""
        return peer in self._forgotten

    def owners(self) -> list[PeerId]:
        """Return the sorted ids of ALIVE and ready members, contacted or vouched for, ourselves included.

        The result is cached until a change.
        """
        if self._owners[0] != self.changes:
            self._owners = (self.changes, sorted(self._sharing.union(*self._vouched.values())))
        return self._owners[1]

    def runs(self) -> list[bytes]:
        """Return the runs of ALIVE and ready members that had a link with us, our own among them."""
        return list(self._sharers_of)

    def sharers(self, run_id: bytes) -> int:
        """Return the number of ALIVE, ready and contacted members that hold this run."""
        return self._sharers_of.get(run_id, 0)

    def sample(
        self, count: int, rng: random.Random, suspects: bool = False, without: PeerId | None = None
    ) -> list[Entry]:
        """Return a uniform sample of up to ``count`` reachable, contacted members, ALIVE (and SUSPECT)."""
        alive, entries, random_ = self.contacted, self.entries, rng.random
        doubted = self.suspects if suspects else []
        total = len(alive) + len(doubted)
        chosen: list[Entry] = []
        few = total <= 2 * count
        order = list(range(total)) if few else []
        if few:
            rng.shuffle(order)
        # Four draws each. Where most are unreachable this finds a few less, but does not walk the table.
        for turn in range(total if few else 4 * count):
            at = order[turn] if few else int(random_() * total)
            entry = entries[alive[at] if at < len(alive) else doubted[at - len(alive)]]
            if entry.reachable and entry.contacted and entry.record.id != without and entry not in chosen:
                chosen.append(entry)
                if len(chosen) == count:
                    break
        return chosen

    def latest(self, count: int) -> list[MemberRecord]:
        """Return the records of dialable members that ever had a link with us, the most recently alive first."""

        def recent(entry: Entry) -> tuple[bool, float]:
            return entry.state is ALIVE or entry.state is SUSPECT, max(entry.since_s, entry.acked_s)

        ours = (None, self._mine)
        others = (e for e in self.entries.values() if e.introducer in ours and e is not self.mine)
        dialable = (e for e in others if e.record.address is not None)
        return [entry.record for entry in heapq.nlargest(count, dialable, key=recent)]

    # -- digests -------------------------------------------------------------------------------------------------------
    def digest(self) -> bytes:
        """Return the digest: for each of 256 buckets 8 bytes, the XOR of its entries' hashes."""
        if not self._digest:
            self._digest = DIGEST.pack(*self._hashes)
        return self._digest

    def differing(self, hashes: bytes) -> bytes:
        """Return the numbers of the buckets that differ from this digest; all for an empty one."""
        if not hashes:
            return bytes(range(MAX_BUCKETS))
        if hashes == self.digest():
            return b""
        theirs = DIGEST.unpack(hashes)
        return bytes([number for number, ours in enumerate(self._hashes) if ours != theirs[number]])

    def updates_of(self, buckets: Iterable[int]) -> Iterator[Update]:
        """Yield the entries of these buckets: each record, then the hint if the member is SUSPECT or DEAD."""
        for number in buckets:
            for peer in self._buckets[number]:
                entry = self.entries[peer]
                if not entry.restored:
                    yield entry.record
                    if entry.state is SUSPECT or entry.state is DEAD:
                        yield entry.hint()


def vouchable(entry: Entry, home: Entry) -> bool:
    """Return True if this contacted home may vouch for an undialable stranger."""
    record = entry.record
    stranger = entry.state is ALIVE and record.ready and record.address is None and not entry.contacted
    return stranger and home.contacted and home.state is ALIVE and home.record.id in record.homes


def take_out(ids: list[PeerId], place: int, entries: dict[PeerId, Entry]) -> None:
    """Remove the id at ``place`` in O(1): the last id takes its place."""
    last = ids.pop()
    if place < len(ids):
        ids[place] = last
        entries[last].place = place


@lru_cache(MAX_HASHES)
def entry_hash(peer: PeerId, incarnation: int, state: str) -> int:
    """Return the hash of an entry without its sequence. Only gossip carries progress, so that digests can be equal."""
    text = peer + incarnation.to_bytes(8, "little") + state.encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
