"""Failure detection by SWIM probes (Das 2002) with Lifeguard (Dadgar 2018).

The detector only reports failed probes. :mod:`gossip.membership.protocol` handles the suspicion that follows.
"""

from __future__ import annotations

import heapq
import math
import random

from gossip.config import Config
from gossip.effects import Effect, MemberState, Send
from gossip.ids import PeerId
from gossip.membership.dissemination import Rumours
from gossip.membership.entry import Entry
from gossip.membership.table import Table
from gossip.wire.messages import Ack, Nack, Ping, PingReq, Update

__all__ = ["PIGGYBACK", "Detector", "suspicion_s"]

ALIVE, SUSPECT = MemberState.ALIVE, MemberState.SUSPECT
PIGGYBACK = 16  # Updates on a Ping or Ack: 4 KiB at most, one such message a second. Progress is told in no other way.
MAX_HEALTH = 8  # Lifeguard's saturation of the local health: probes go out at a ninth of their rate
MAX_PROBES = 32  # Our own probes at once. When all our links break we probe about 32 members; the ring covers the rest.
MAX_RELAYS = 256  # probes for others at once: 3 each for 85 members
# Fraction of the probe timeout: the Nack must arrive before the asker gives up (Lifeguard, section IV-A).
NACK_AFTER = 0.8
INDIRECT_PROBES = 3  # Members asked to probe in our place, as in memberlist.
SUSPICION_PERIODS = 4.0  # Probe periods that a suspect of a small swarm has to refute, as in memberlist.
CONFIRMATIONS = 3  # accusers beyond the first that shorten a suspicion to its minimum (Lifeguard's K)


def suspicion_s(config: Config, members: int, accusers: int) -> float:
    """Return the suspicion time, in seconds, of a member under ``accusers`` independent accusations.

    Args:
        config: Periods and factors.
        members: The number of members in the swarm.
        accusers: Independent accusers, at least 1.

    Returns:
        ``max - (max - min) log(C + 1) / log(K + 1)`` with C accusers beyond the first (Lifeguard, section IV-B). Here
        max is ``4 max(1, log10 N)`` probe periods, and min is a third of it.
    """
    longest = SUSPICION_PERIODS * max(1.0, math.log10(members)) * config.internal.probe_period_s
    shortest = longest / 3
    expected = min(CONFIRMATIONS, members - 2)  # all members except the suspect and its first accuser
    if expected < 1:
        return shortest  # no other member could confirm the suspicion
    share = math.log(accusers) / math.log(expected + 1)
    return max(shortest, longest - (longest - shortest) * share)


class Probe:
    """One outstanding Ping, our own or for another member. When our own times out, indirect probes follow."""

    __slots__ = ("asked", "asker", "asker_seq", "due_s", "indirect", "nacks", "seq", "started_s", "target")

    def __init__(self, seq: int, target: PeerId, now: float) -> None:
        self.seq = seq
        self.target = target
        self.started_s = now
        self.due_s = math.inf
        self.indirect = False
        self.asked: set[PeerId] = set()  # helpers that ping the target for us
        self.nacks: set[PeerId] = set()
        self.asker: PeerId | None = None  # the member that we ping the target for
        self.asker_seq = 0


class Detector:
    """The failure detector. It probes one member each period.

    ``health`` is Lifeguard's local health multiplier, 0 to 8: the higher, the more reason to doubt ourselves.
    """

    def __init__(self, table: Table, rumours: Rumours, config: Config, rng: random.Random, now: float) -> None:
        self.health = 0
        self.targets: dict[PeerId, list[Probe]] = {}  # outstanding probes by target
        self.table, self.rumours, self.config, self._rng = table, rumours, config, rng
        self._probes: dict[int, Probe] = {}
        self._relays = 0
        # (when, seq). A timer is stale if its probe ended or is due at another time.
        self._timers: list[tuple[float, int]] = []
        self._ring: list[PeerId] = []  # members still to be probed in this round, in reverse order
        # The same members as a set: a member that becomes ALIVE again is not added twice.
        self._waiting: set[PeerId] = set()
        self._next_s = now + rng.random() * config.internal.probe_period_s
        self._seq = rng.getrandbits(48)  # random, so that an Ack for an earlier life matches no probe
        self.deadline = self._next_s  # When to call tick. Stored, since drivers read it after every message.

    # -- events --------------------------------------------------------------------------------------------------------
    def tick(self, now: float, out: list[Effect]) -> list[Entry]:
        """Time out overdue probes and probe the next member. Return the members whose probe failed."""
        failed: list[Entry] = []
        while self._timers and self._timers[0][0] <= now:
            due_s, seq = heapq.heappop(self._timers)
            probe = self._probes.get(seq)
            if probe is not None and probe.due_s == due_s:
                self._give_up(probe, now, out, failed)
        if now >= self._next_s:
            self._next_s = now + self.config.internal.probe_period_s * (1 + self.health)
            self._probe_next(now, out, failed)
        self._settle()
        return failed

    def joined(self, peer: PeerId) -> None:
        """Insert a member that became ALIVE at a random place of this round (SWIM, section 4.3)."""
        if peer in self._waiting:
            return
        ring = self._ring
        self._waiting.add(peer)
        ring.append(peer)
        place = int(self._rng.random() * len(ring))
        ring[place], ring[-1] = ring[-1], ring[place]

    def request(self, asker: PeerId, message: PingReq, now: float, out: list[Effect]) -> None:
        """Probe a member on behalf of ``asker``."""
        entry = self.table.entries.get(message.target)
        if entry is self.table.mine:
            out.append(Send(asker, Ack(message.seq, ())))
        elif entry is None or not entry.reachable or self._relays >= MAX_RELAYS:
            out.append(Send(asker, Nack(message.seq)))
        else:
            probe = self._begin(entry, now)
            probe.asker, probe.asker_seq = asker, message.seq
            self._relays += 1
            self._arm(probe, now + NACK_AFTER * self._timeout_s(entry))
            self._ping(probe, entry, out)

    def acked(self, sender: PeerId, seq: int, now: float) -> None:
        """Handle an Ack from the target or from a helper.

        A helper's Ack is believed: a liar can only keep a dead member alive for us, and the next round asks three
        others. An Ack from the target also gives a round-trip time.
        """
        probe = self._probes.get(seq)
        if probe is None:
            return
        if sender == probe.target:
            entry = self.table.entries.get(sender)
            if entry is not None and not probe.indirect:
                rtt_s = now - probe.started_s
                # Smoothed RTT with a gain of 1/8 (Jacobson 1988).
                entry.rtt_s = rtt_s if entry.rtt_s is None else entry.rtt_s + (rtt_s - entry.rtt_s) / 8
        elif sender in probe.asked:
            self.blame_ourselves(-1)
            self._end(probe)

    def nacked(self, sender: PeerId, seq: int) -> list[Entry]:
        """Handle a Nack: the helper could not reach the target, but is alive itself."""
        probe = self._probes.get(seq)
        failed: list[Entry] = []
        if probe is not None and sender in probe.asked:
            probe.nacks.add(sender)
            if len(probe.nacks) == len(probe.asked):
                self._fail(probe, failed)  # no helper is left to wait for
        return failed

    def proved(self, peer: PeerId, out: list[Effect]) -> None:
        """End every probe of ``peer`` as successful, after any message from it."""
        for probe in self.targets.get(peer, ())[:]:
            if probe.asker is not None:
                out.append(Send(probe.asker, Ack(probe.asker_seq, ())))
            else:
                self.blame_ourselves(-1)
            self._end(probe)

    def acknowledged(self, peer: PeerId) -> None:
        """End our own probe of ``peer`` after proof of life other than a message. Askers still wait for its own Ack."""
        probe = self._own(peer)
        if probe is not None:
            self.blame_ourselves(-1)
            self._end(probe)

    def doubt(self, entry: Entry, now: float, out: list[Effect]) -> list[Entry]:
        """Probe a member now: its last link broke, or its suspicion ran out although messages arrive from it."""
        failed: list[Entry] = []
        probe = self._own(entry.record.id)
        if probe is None:
            self._probe(entry, now, out, failed)
        elif not probe.indirect:
            self._ping(probe, entry, out)  # the first Ping may have been lost with the link
        return failed

    def unreachable(self, entry: Entry, now: float, out: list[Effect]) -> list[Entry]:
        """Fail the direct probes of a member that could not be dialled. If there was none, start indirect ones."""
        failed: list[Entry] = []
        if entry.linked:
            return self.doubt(entry, now, out)
        peer = entry.record.id
        accused = entry.accused_by(self.table.mine.record.id)  # a second failure adds no information
        if peer not in self.targets and entry.state in (ALIVE, SUSPECT) and entry.contacted and not accused:
            # Skip members that we probe only for an asker. If helpers asked helpers in turn, one death would make
            # all members ask all others (5,600 requests for each death among 1,000 members).
            self._probe(entry, now, out, failed, refused=True)
        for probe in self.targets.get(peer, ())[:]:
            if not probe.indirect:
                self._give_up(probe, now, out, failed)
        return failed

    def blame_ourselves(self, degrees: int) -> None:
        """Adjust Lifeguard's local health: the slower we are, the longer other members have to answer."""
        self.health = max(0, min(MAX_HEALTH, self.health + degrees))

    def slept(self, gap_s: float) -> None:
        """Shift all timeouts by the time in which this process was stopped, so that no member is judged by it."""
        self.blame_ourselves(1)
        self._timers = [(when + gap_s, seq) for when, seq in self._timers]  # a constant shift keeps the heap valid
        for probe in self._probes.values():
            probe.due_s += gap_s
        self._settle()

    # -- one probe -----------------------------------------------------------------------------------------------------
    def _probe_next(self, now: float, out: list[Effect], failed: list[Entry]) -> None:
        entries = self.table.entries
        for _ in range(2):
            while self._ring:
                peer = self._ring.pop()
                self._waiting.discard(peer)
                entry = entries.get(peer)
                if entry is not None and self._is_ours(entry) and self._own(entry.record.id) is None:
                    return self._probe(entry, now, out, failed)
            self._ring = [*self.table.contacted, *self.table.suspects]  # refilled once in N periods
            self._rng.shuffle(self._ring)
            self._waiting = set(self._ring)
        return None

    def _is_ours(self, entry: Entry) -> bool:
        """Return True if we should probe this member.

        Strangers are probed only by members that had a link with them: a made-up stranger never answers and would lower
        our health. An undialable member is probed by the members linked with it, and by its homes. All probe it
        when no home is ALIVE, or every home restarted after it was named and so forgot it.
        """
        if (entry.state is not ALIVE and entry.state is not SUSPECT) or not entry.contacted:
            return False
        homes = entry.record.homes
        if entry.reachable or self.table.mine.record.id in homes:
            return True
        entries, named_s = self.table.entries, entry.named_s
        return not any(
            home in entries and entries[home].state is ALIVE and entries[home].life_s <= named_s for home in homes
        )

    def _probe(self, entry: Entry, now: float, out: list[Effect], failed: list[Entry], refused: bool = False) -> None:
        if len(self._probes) - self._relays >= MAX_PROBES:
            return
        probe = self._begin(entry, now)
        if entry.reachable and not refused:
            self._arm(probe, now + self._timeout_s(entry))
            self._ping(probe, entry, out)
        else:
            self._ask_others(probe, entry, now, out, failed)

    def _ping(self, probe: Probe, entry: Entry, out: list[Effect]) -> None:
        updates: tuple[Update, ...] = self.rumours.take(PIGGYBACK, 1, self.table.size)
        if entry.state is SUSPECT:
            # Lifeguard's buddy system: the suspect learns of the suspicion from its prober.
            updates = (entry.hint(), *updates)
        out.append(Send(entry.record.id, Ping(probe.seq, updates)))

    def _give_up(self, probe: Probe, now: float, out: list[Effect], failed: list[Entry]) -> None:
        entry = self.table.entries.get(probe.target)
        if probe.asker is not None:
            out.append(Send(probe.asker, Nack(probe.asker_seq)))
            self._end(probe)
        elif entry is None or probe.indirect:
            self._fail(probe, failed)
        else:
            self._ask_others(probe, entry, now, out, failed)

    def _ask_others(self, probe: Probe, entry: Entry, now: float, out: list[Effect], failed: list[Entry]) -> None:
        config, entries, target = self.config, self.table.entries, entry.record.id
        probe.indirect = True
        helpers: list[Entry] = []
        if entry.record.address is None:  # only members that have a link with it can ping it
            homes = [entries[home] for home in entry.record.homes if home in entries]
            helpers = [
                h for h in homes if h.state is ALIVE and h is not self.table.mine and h.contacted and h.reachable
            ]
        helpers = helpers or self.table.sample(INDIRECT_PROBES, self._rng, without=target)
        if not helpers:
            self._fail(probe, failed)
            return
        probe.asked = {helper.record.id for helper in helpers}
        period_s = config.internal.probe_period_s * (1 + self.health)
        self._arm(probe, max(probe.started_s + period_s, now + config.internal.probe_timeout_max_s * (1 + self.health)))
        request = PingReq(probe.seq, target, ())
        out.extend(Send(helper.record.id, request) for helper in helpers)

    def _timeout_s(self, entry: Entry) -> float:
        shortest, longest = self.config.internal.probe_timeout_min_s, self.config.internal.probe_timeout_max_s
        timeout_s = longest if entry.rtt_s is None else min(longest, max(shortest, 3 * entry.rtt_s))
        return timeout_s * (1 + self.health)

    def _fail(self, probe: Probe, failed: list[Entry]) -> None:
        # Helpers that sent not even a Nack count against our own health. Without helpers, we cannot tell (Lifeguard).
        self.blame_ourselves(len(probe.asked) - len(probe.nacks) if probe.asked else 1)
        self._end(probe)
        entry = self.table.entries.get(probe.target)
        if entry is not None and entry.state in (ALIVE, SUSPECT):
            failed.append(entry)

    # -- bookkeeping ---------------------------------------------------------------------------------------------------
    def _own(self, peer: PeerId) -> Probe | None:
        return next((probe for probe in self.targets.get(peer, ()) if probe.asker is None), None)

    def _begin(self, entry: Entry, now: float) -> Probe:
        self._seq += 1
        probe = self._probes[self._seq] = Probe(self._seq, entry.record.id, now)
        self.targets.setdefault(probe.target, []).append(probe)
        return probe

    def _arm(self, probe: Probe, due_s: float) -> None:
        probe.due_s = due_s
        heapq.heappush(self._timers, (due_s, probe.seq))
        self._settle()

    def _end(self, probe: Probe) -> None:
        if self._probes.pop(probe.seq, None) is None:
            return
        self._relays -= probe.asker is not None
        same = self.targets[probe.target]
        same.remove(probe)
        if not same:
            del self.targets[probe.target]
        while self._timers:  # a stale timer at the front would wake the driver for nothing
            due_s, seq = self._timers[0]
            front = self._probes.get(seq)
            if front is not None and front.due_s == due_s:
                break
            heapq.heappop(self._timers)
        self._settle()

    def _settle(self) -> None:
        self.deadline = min(self._next_s, self._timers[0][0]) if self._timers else self._next_s
