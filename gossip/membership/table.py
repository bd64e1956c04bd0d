"""The table of all known members. Sampling and digests do not walk it.

A member is *contacted* if it had a link with us in this life of ours. A *stranger* is known by hearsay alone, from its
introducer. A *run member* is ALIVE, ready and contacted. New ids cost nothing, so only contacted members are asked for
anything, and strangers are evicted first.

An *undialable* member has no address. It opens all its links itself and keeps some to a few members, its *homes*. An
*owner* has a share of the training data: run members, and undialable strangers for which a home *vouches*.
"""

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
from gossip.recent import Recent
from gossip.unordered import UnorderedList
from gossip.wire.messages import MAX_BUCKETS, Update

ALIVE, SUSPECT, DEAD, LEFT = MemberState.ALIVE, MemberState.SUSPECT, MemberState.DEAD, MemberState.LEFT
DIGEST = struct.Struct(f"<{MAX_BUCKETS}Q")
MAX_HASHES = 1 << 14  # Cached hashes, 4 MiB: in a simulation every peer asks for the same ones.
MAX_INTRODUCER_SHARE = 3 / 4  # Share of the table for one introducer: the largest swarm, and many that left it.
MAX_HEARSAY_RATIO = 4  # Strangers count for N up to this many times the contacted members.
MAX_VOUCHED = 8  # Owners of data for which one home vouches: a liar counts for nine at most, and all data has an owner.


class Table:
    """The table of members, with changes in O(1). If it is full, the member that is gone longest is dropped first."""

    def __init__(self, me: MemberRecord, limit: int, now: float) -> None:
        self._limit, self._my_id = limit, me.id
        self.entries: dict[PeerId, Entry] = {}
        self.links: dict[PeerId, None] = {}  # In the order of creation, so that a seed repeats a run.
        self.arrears = Arrears(now)
        # Members by state, without ourselves.
        self._by_state = {state: UnorderedList[PeerId]() for state in MemberState}
        self.alive, self.suspects, self.dead = self._by_state[ALIVE], self._by_state[SUSPECT], self._by_state[DEAD]
        self.contacted = UnorderedList[PeerId]()  # ALIVE contacted members.
        self._gone: OrderedDict[PeerId, None] = OrderedDict()  # DEAD and LEFT, the longest gone first.
        self._gone_strangers: OrderedDict[PeerId, None] = OrderedDict()  # The same for strangers.
        self._dropped = Recent[PeerId, int](limit)  # Dropped members and their last incarnation.

        self.strangers: dict[PeerId, UnorderedList[PeerId]] = {}  # By introducer.
        # ALIVE strangers with an address, by introducer. The others are undialable, or gone for up to a day.
        self._dialable: dict[PeerId, UnorderedList[PeerId]] = {}
        self._introducers: list[PeerId] = []  # The keys of `_dialable`.
        self._vouched: dict[PeerId, dict[PeerId, None]] = {}  # Strangers that own data, by the home that vouches.

        self.changes = 0  # Counts changes of :meth:`owners` and of their runs.
        self._run_members: set[PeerId] = set()
        self._run_sizes: dict[bytes, int] = {}  # Number of run members by run.
        # The value of ``changes`` at the last computation of the owners (-1 before the first), and these owners.
        self._owners: tuple[int, list[PeerId]] = (-1, [])

        self._buckets: list[list[PeerId]] = [[] for _ in range(MAX_BUCKETS)]  # Members by the first byte of their id.
        self._hashes = [0] * MAX_BUCKETS  # For each bucket the XOR of its entries' hashes.
        self._digest = b""  # The packed hashes; empty after a change.
        mine = self.add(me, ALIVE, now)  # Contacted, but in no list.
        assert mine is not None
        self.mine = mine

    @property
    def size(self) -> int:
        """Return N of every formula: the number of participating members, ourselves included.

        Strangers are capped. Otherwise a liar with a thousand ids would slow every member's progress to one in 100 s.
        """
        others, limit = len(self.alive) + len(self.suspects), MAX_HEARSAY_RATIO * (len(self.contacted) + 1)
        return 1 + (others if others < limit else limit)

    # -- changes of a member -------------------------------------------------------------------------------------
    def add(
        self, record: MemberRecord, state: MemberState, now: float, is_restored: bool = False,
        introducer: PeerId | None = None,
    ) -> Entry | None:  # fmt: skip
        """Add an entry. Return None if there is no room, or the record is one of a dropped member.

        ``introducer``: the peer that told us of the member; None if it is linked itself.
        """
        dropped_incarnation = self._dropped.get(record.id)
        if dropped_incarnation is not None and record.incarnation <= dropped_incarnation:
            # Otherwise members that drop it at different times would reintroduce it to each other for ever.
            return None
        if introducer is not None and len(self.strangers.get(introducer, ())) >= MAX_INTRODUCER_SHARE * self._limit:
            if not self._gone_strangers:
                return None
            self._evict(next(iter(self._gone_strangers)))
        if len(self.entries) >= self._limit and not self._make_room(introducer):
            return None
        entry = self.entries[record.id] = Entry(record, state, now, now, is_restored=is_restored)
        entry.introducer = self._my_id if is_restored else introducer  # An earlier life of ours told us of it.
        if entry.introducer is None:
            entry.was_contacted = True
        else:
            self.strangers.setdefault(entry.introducer, UnorderedList()).add(record.id)
        self._dropped.pop(record.id, None)
        self._buckets[record.id[0]].append(record.id)
        self._index(entry)
        return entry

    def update(self, entry: Entry, record: MemberRecord, state: MemberState, now: float) -> None:
        """Set the record and the state of a member."""
        if state is not entry.state or entry.is_restored or record.incarnation != entry.record.incarnation:
            self._unindex(entry)
            if state is not entry.state:
                entry.state_since = now
            self._set_record(entry, record, now)
            entry.state, entry.is_restored = state, False
            self._index(entry)
        else:
            self._set_record(entry, record, now)
            self._recheck_vouchers(entry)
            if record.ready is not entry.is_run_member and state is ALIVE and entry.was_contacted:
                self._set_run_member(entry, record.ready)
            self._update_waiting(entry)

    def update_progress(self, entry: Entry, record: MemberRecord, now: float) -> None:
        """Do the part of :meth:`update` that suffices for new counts. Most records bring nothing else."""
        entry.record, entry.record_at = record, now

    def mark_contacted(self, entry: Entry) -> None:
        """Note the first link with a member, which is no stranger any more."""
        if entry.was_contacted:
            return
        self._unindex(entry)
        self._remove_stranger(entry)
        entry.was_contacted = True
        self._index(entry)

    def drop_gone(self, before: float) -> None:
        """Drop the members that are gone since before this time."""
        for gone in (self._gone, self._gone_strangers):
            while gone and self.entries[next(iter(gone))].state_since < before:
                self._evict(next(iter(gone)))

    def _set_record(self, entry: Entry, record: MemberRecord, now: float) -> None:
        old_record = entry.record
        if record is old_record:
            return
        if record.run_id != old_record.run_id and entry.is_run_member:
            self._count_run_member(old_record.run_id, -1)
            self._count_run_member(record.run_id, 1)
            self.changes += 1
        if record.incarnation != old_record.incarnation:
            entry.incarnation_at = now
        entry.record, entry.record_at = record, now
        if record.run_id != old_record.run_id and record.id == self._my_id:
            self.arrears.restart((other for other in self.entries.values() if other is not entry), record.run_id)

    # -- eviction ------------------------------------------------------------------------------------------------
    def _make_room(self, introducer: PeerId | None) -> bool:
        """Evict one member to make room, and return True if that succeeded.

        The stranger that is gone longest goes first. The next choice depends on the newcomer and on the share of
        strangers. If the newcomer is linked, or strangers fill half of the table, the introducer with most strangers
        loses its latest one. Otherwise the contacted member that is gone longest goes. ALIVE contacted members stay.
        """
        if self._gone_strangers:
            return self._evict(next(iter(self._gone_strangers)))
        stranger_count = len(self.entries) - len(self.contacted) - len(self._gone)
        if self.strangers and (introducer is None or stranger_count > self._limit // 2):
            counts = {peer: len(ids) for peer, ids in self.strangers.items() if peer != self._my_id}
            busiest = max(counts, key=lambda peer: counts[peer], default=None)
            count_with_newcomer = 0 if introducer is None else counts.get(introducer, 0) + 1
            if busiest is None or count_with_newcomer >= counts[busiest]:
                return False  # The newcomer's introducer would take a place from one that has no more than it.
            # A SUSPECT stays, since its accusers are still to be judged.
            latest = (peer for peer in reversed(self.strangers[busiest]) if self.entries[peer].state is not SUSPECT)
            peer = next(latest, None)
            return peer is not None and self._evict(peer)
        return bool(self._gone) and self._evict(next(iter(self._gone)))

    def _evict(self, peer: PeerId) -> bool:
        entry = self.entries[peer]
        self._unindex(entry)
        self._withdraw_voucher(entry)
        for other in list(self._vouched.get(peer, ())):
            self._withdraw_voucher(self.entries[other])
        self._remove_stranger(entry)
        del self.entries[peer]
        self._buckets[peer[0]].remove(peer)  # Linear in about N / 256 members.
        self.links.pop(peer, None)
        self._dropped[peer] = entry.record.incarnation
        return True

    # -- indexes -------------------------------------------------------------------------------------------------
    def _index(self, entry: Entry) -> None:
        """Add a member to the lists and sets of its state, after a change of its state or incarnation."""
        peer, state = entry.record.id, entry.state
        if peer != self._my_id:
            self._by_state[state].add(peer)
            if state is DEAD or state is LEFT:
                (self._gone if self.was_ever_contacted(entry) else self._gone_strangers)[peer] = None
            elif state is ALIVE and entry.was_contacted:
                self.contacted.add(peer)
        if not entry.is_restored:
            entry.digest_part = entry_hash(peer, entry.record.incarnation, state.value)
            self._hashes[peer[0]] ^= entry.digest_part
            self._digest = b""
        self._set_run_member(entry, state is ALIVE and entry.record.ready and entry.was_contacted)
        self._recheck_vouchers(entry)
        self._update_waiting(entry)

    def _unindex(self, entry: Entry) -> None:
        """Undo :meth:`_index` before such a change."""
        peer, state = entry.record.id, entry.state
        self._remove_dialable(entry)
        if peer != self._my_id:
            self._by_state[state].remove(peer)
            if state is ALIVE and entry.was_contacted:
                self.contacted.remove(peer)
            self._gone.pop(peer, None)
            self._gone_strangers.pop(peer, None)
        self._hashes[peer[0]] ^= entry.digest_part
        self._digest = b""
        entry.digest_part = 0
        self._set_run_member(entry, False)

    def _set_run_member(self, entry: Entry, is_run_member: bool) -> None:
        if is_run_member is not entry.is_run_member:
            entry.is_run_member = is_run_member
            self.changes += 1
            if is_run_member:
                self._run_members.add(entry.record.id)
                self._count_run_member(entry.record.run_id, 1)
            else:
                self._run_members.discard(entry.record.id)
                self._count_run_member(entry.record.run_id, -1)

    def _count_run_member(self, run_id: bytes, change: int) -> None:
        count = self._run_sizes.get(run_id, 0) + change
        if count:
            self._run_sizes[run_id] = count
        else:
            del self._run_sizes[run_id]

    # -- strangers -----------------------------------------------------------------------------------------------
    def _remove_stranger(self, entry: Entry) -> None:
        introducer = entry.introducer
        if introducer is None:
            return
        strangers = self.strangers[introducer]
        strangers.remove(entry.record.id)
        if not strangers:
            del self.strangers[introducer]
        entry.introducer = None

    def _update_waiting(self, entry: Entry) -> None:
        """Update the dial and the arrears of this member, after every change but progress: both wait for a link."""
        if entry.record.id == self._my_id:
            return
        introducer = entry.introducer
        if introducer is None or entry.state is not ALIVE or entry.record.address is None:
            self._remove_dialable(entry)
        else:
            if introducer not in self._dialable:
                self._dialable[introducer] = UnorderedList()
                self._introducers.append(introducer)
            if entry.record.id not in self._dialable[introducer]:
                self._dialable[introducer].add(entry.record.id)
        self.arrears.update(entry, self.mine.record.run_id)

    def _remove_dialable(self, entry: Entry) -> None:
        introducer = entry.introducer
        if introducer is None or entry.record.id not in self._dialable.get(introducer, ()):
            return
        dialable = self._dialable[introducer]
        dialable.remove(entry.record.id)
        if not dialable:
            del self._dialable[introducer]
            self._introducers.remove(introducer)  # Linear in the number of introducers.

    def draw_stranger(self, rng: random.Random) -> PeerId | None:
        """Return a random ALIVE stranger with an address: draw an introducer first, then one of its strangers."""
        if not self._introducers:
            return None
        dialable = self._dialable[self._introducers[int(rng.random() * len(self._introducers))]]
        return dialable[int(rng.random() * len(dialable))]

    # -- vouchers ------------------------------------------------------------------------------------------------
    def vouch(self, entry: Entry, home: Entry) -> None:
        """Let a home vouch for its undialable member.

        Two undialable members never link with each other. Each must still count as an owner of data to the other, or
        their training data would overlap for ever.
        """
        vouched = self._vouched.get(home.record.id, {})
        if entry.voucher is None and may_vouch(home, entry) and len(vouched) < MAX_VOUCHED:
            entry.voucher = home.record.id
            vouched[entry.record.id] = None
            self._vouched[entry.voucher] = vouched
            self.changes += 1

    def _recheck_vouchers(self, entry: Entry) -> None:
        """Withdraw vouchers that no longer hold, after every change but progress."""
        if entry.voucher is not None and not may_vouch(self.entries[entry.voucher], entry):
            self._withdraw_voucher(entry)
        vouched = self._vouched.get(entry.record.id)
        if vouched is not None and not (entry.was_contacted and entry.state is ALIVE):
            for peer in list(vouched):
                self._withdraw_voucher(self.entries[peer])

    def _withdraw_voucher(self, entry: Entry) -> None:
        if entry.voucher is None:
            return
        vouched = self._vouched[entry.voucher]
        del vouched[entry.record.id]
        if not vouched:
            del self._vouched[entry.voucher]
        entry.voucher = None
        self.changes += 1

    # -- queries -------------------------------------------------------------------------------------------------
    def was_ever_contacted(self, entry: Entry) -> bool:
        """Return True if the member had a link with us in this life, or in an earlier one whose address book names it.

        A contacted member has no introducer, and for members of the address book we are the introducer.
        """
        return entry.introducer is None or entry.introducer == self._my_id

    def was_dropped(self, peer: PeerId) -> bool:
        """Return True if this member was dropped after it was gone for long."""
        return peer in self._dropped

    def owners(self) -> list[PeerId]:
        """Return the sorted ids of ALIVE and ready members, contacted or vouched for, ourselves included.

        The result is cached until a change.
        """
        if self._owners[0] != self.changes:
            self._owners = (self.changes, sorted(self._run_members.union(*self._vouched.values())))
        return self._owners[1]

    def runs(self) -> list[bytes]:
        """Return the runs of run members, our own among them once we are ready."""
        return list(self._run_sizes)

    def run_size(self, run_id: bytes) -> int:
        """Return the number of members of this run."""
        return self._run_sizes.get(run_id, 0)

    def sample(
        self, count: int, rng: random.Random, with_suspects: bool = False, without: PeerId | None = None
    ) -> list[Entry]:  # fmt: skip
        """Return a uniform sample of up to ``count`` reachable, contacted members, ALIVE (and SUSPECT)."""
        alive, suspects = self.contacted, self.suspects if with_suspects else []
        total = len(alive) + len(suspects)
        indexes: Iterable[int]
        if total <= 2 * count:
            order = list(range(total))
            rng.shuffle(order)
            indexes = order
        else:
            # Four draws each. Where most are unreachable this finds a few less, but does not walk the table.
            indexes = (int(rng.random() * total) for _ in range(4 * count))
        chosen: list[Entry] = []
        for index in indexes:
            entry = self.entries[alive[index] if index < len(alive) else suspects[index - len(alive)]]
            if entry.is_reachable and entry.was_contacted and entry.record.id != without and entry not in chosen:
                chosen.append(entry)
                if len(chosen) == count:
                    break
        return chosen

    def recently_alive(self, count: int) -> list[MemberRecord]:
        """Return the records of dialable members that ever had a link with us, the most recently alive first."""

        def last_alive(entry: Entry) -> tuple[bool, float]:
            return entry.state is ALIVE or entry.state is SUSPECT, max(entry.state_since, entry.alive_at)

        dialable = (
            entry for entry in self.entries.values()
            if entry is not self.mine and self.was_ever_contacted(entry) and entry.record.address is not None
        )  # fmt: skip
        return [entry.record for entry in heapq.nlargest(count, dialable, key=last_alive)]

    # -- digests -------------------------------------------------------------------------------------------------
    def digest(self) -> bytes:
        """Return the digest: for each of 256 buckets 8 bytes, the XOR of its entries' hashes."""
        if not self._digest:
            self._digest = DIGEST.pack(*self._hashes)
        return self._digest

    def differing_buckets(self, digest: bytes) -> bytes:
        """Return the numbers of the buckets that differ from this digest; all for an empty one."""
        if not digest:
            return bytes(range(MAX_BUCKETS))
        if digest == self.digest():
            return b""
        theirs = DIGEST.unpack(digest)
        return bytes([number for number, ours in enumerate(self._hashes) if ours != theirs[number]])

    def bucket_updates(self, buckets: Iterable[int]) -> Iterator[Update]:
        """Yield the entries of these buckets: each record, then the hint if the member is SUSPECT or DEAD."""
        for number in buckets:
            for peer in self._buckets[number]:
                entry = self.entries[peer]
                if not entry.is_restored:
                    yield entry.record
                    if entry.state is SUSPECT or entry.state is DEAD:
                        yield entry.hint


def may_vouch(home: Entry, entry: Entry) -> bool:
    """Return True if this home may vouch for the member: the home is contacted, the member an undialable stranger."""
    record = entry.record
    is_stranger = entry.state is ALIVE and record.ready and record.address is None and not entry.was_contacted
    return is_stranger and home.was_contacted and home.state is ALIVE and home.record.id in record.homes


@lru_cache(MAX_HASHES)
def entry_hash(peer: PeerId, incarnation: int, state: str) -> int:
    """Return the hash of an entry without its sequence. Only gossip carries progress, so that digests can be equal."""
    text = peer + incarnation.to_bytes(8, "little") + state.encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
