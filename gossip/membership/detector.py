"""Failure detection by SWIM probes (Das 2002) with Lifeguard (Dadgar 2018).

    our own probe       direct (Ping) --timeout--> indirect (helpers are asked to ping) --timeout--> failed
    probe for an asker  direct (Ping) --timeout--> Nack to the asker

Any message from the target ends a probe as successful. The detector only collects the members whose probes failed;
:mod:`gossip.membership.states` handles the suspicion that follows. Methods append messages to ``effects``.
"""

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

ALIVE, SUSPECT = MemberState.ALIVE, MemberState.SUSPECT
PIGGYBACK = 16  # Updates on a Ping or Ack: 4 KiB at most, one such message a second. Progress has no other carrier.
MAX_HEALTH = 8  # Lifeguard's saturation of the local health: probes go out at a ninth of their rate.
MAX_PROBES = 32  # Our own probes at once. When all our links break we probe about 32 members; the ring covers the rest.
MAX_RELAYED_PROBES = 256  # Probes for others at once: 3 each for 85 members.
# Fraction of the probe timeout: the Nack must arrive before the asker gives up (Lifeguard, section IV-A).
NACK_AFTER = 0.8
MAX_HELPERS = 3  # Members asked to probe in our place, as in memberlist.
SUSPICION_PERIODS = 4.0  # Probe periods that a suspect of a small swarm has to refute, as in memberlist.
CONFIRMATIONS = 3  # Accusers beyond the first that shorten a suspicion to its minimum (Lifeguard's K).


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
    longest_s = SUSPICION_PERIODS * max(1.0, math.log10(members)) * config.internal.probe_period_s
    shortest_s = longest_s / 3
    expected = min(CONFIRMATIONS, members - 2)  # All members except the suspect and its first accuser.
    if expected < 1:
        return shortest_s  # No other member could confirm the suspicion.
    share = math.log(accusers) / math.log(expected + 1)
    return max(shortest_s, longest_s - (longest_s - shortest_s) * share)


class Probe:
    """One probe in progress, our own or one for another member."""

    __slots__ = ("asker", "asker_seq", "due_at", "helpers", "is_indirect", "nacks", "seq", "started_at", "target")

    def __init__(self, seq: int, target: PeerId, now: float) -> None:
        self.seq = seq
        self.target = target
        self.started_at = now
        self.due_at = math.inf
        self.is_indirect = False
        self.helpers: set[PeerId] = set()  # Members that ping the target for us.
        self.nacks: set[PeerId] = set()  # Helpers that sent a Nack.
        self.asker: PeerId | None = None  # The member that we ping the target for; None for a probe of our own.
        self.asker_seq = 0  # The number of the asker's probe, which our answer to it carries.

    @property
    def waits_for_helpers(self) -> bool:
        """Return True if helpers ping the target for us. An indirect probe without helpers only waits for an answer."""
        return self.is_indirect and bool(self.helpers)


class Detector:
    """The failure detector. It probes one member each period.

    ``health`` is Lifeguard's local health multiplier, 0 to 8: the higher, the more reason to doubt ourselves.
    """

    def __init__(self, table: Table, rumours: Rumours, config: Config, rng: random.Random, now: float) -> None:
        self.health = 0
        self.targets: dict[PeerId, list[Probe]] = {}  # Probes in progress by target.
        self.failed: list[Entry] = []  # Members whose probes of ours failed, until the caller accuses them.
        self.table, self.rumours, self.config, self._rng = table, rumours, config, rng
        self._probes: dict[int, Probe] = {}
        self._relayed_count = 0  # Probes in progress for other members.
        # A heap of times and the numbers of the probes that are due then. An entry is stale once its probe has ended or
        # has another time.
        self._timers: list[tuple[float, int]] = []
        self._ring: list[PeerId] = []  # Members still to be probed in this round, in reverse order.
        # The same members as a set: a member that becomes ALIVE again is not added twice.
        self._in_ring: set[PeerId] = set()
        self._next_probe_at = now + rng.random() * config.internal.probe_period_s
        self._seq = rng.getrandbits(48)  # Random, so that an Ack for an earlier life matches no probe.
        self.deadline = self._next_probe_at  # Time to call tick. Stored, since drivers read it after every message.

    def tick(self, now: float, effects: list[Effect]) -> None:
        """Time out overdue probes and probe the next member."""
        while self._timers and self._timers[0][0] <= now:
            due_at, seq = heapq.heappop(self._timers)
            probe = self._probes.get(seq)
            if probe is not None and probe.due_at == due_at:
                self._give_up(probe, now, effects)
        if now >= self._next_probe_at:
            self._next_probe_at = now + self.config.internal.probe_period_s * (1 + self.health)
            self._probe_next(now, effects)
        self._update_deadline()

    def add_member(self, peer: PeerId) -> None:
        """Insert a member that became ALIVE at a random place of this round (SWIM, section 4.3)."""
        if peer in self._in_ring:
            return
        ring = self._ring
        self._in_ring.add(peer)
        ring.append(peer)
        place = int(self._rng.random() * len(ring))
        ring[place], ring[-1] = ring[-1], ring[place]

    def probe_now(self, entry: Entry, now: float, effects: list[Effect]) -> None:
        """Probe a member now: its last link broke, or its suspicion ran out although messages arrive from it."""
        probe = self._own_probe(entry.record.id)
        if probe is None:
            self._probe(entry, now, effects)
        elif not probe.waits_for_helpers:
            self._ping(probe, entry, effects)  # The first Ping may have been lost with the link.

    def adjust_health(self, degrees: int) -> None:
        """Adjust Lifeguard's local health: the slower we are, the longer other members have to answer."""
        self.health = max(0, min(MAX_HEALTH, self.health + degrees))

    def shift_timers(self, gap_s: float) -> None:
        """Shift all timeouts by the time in which this process was stopped, so that no member is judged by it."""
        self.adjust_health(1)
        self._timers = [(due_at + gap_s, seq) for due_at, seq in self._timers]  # A constant shift keeps the heap valid.
        for probe in self._probes.values():
            probe.due_at += gap_s
        self._update_deadline()

    # -- events --------------------------------------------------------------------------------------------------
    def on_ping_req(self, asker: PeerId, request: PingReq, now: float, effects: list[Effect]) -> None:
        """Handle a request to probe a member for ``asker``."""
        entry = self.table.entries.get(request.target)
        if entry is self.table.mine:
            effects.append(Send(asker, Ack(request.seq, ())))
        elif entry is None or not entry.is_reachable or self._relayed_count >= MAX_RELAYED_PROBES:
            effects.append(Send(asker, Nack(request.seq)))
        else:
            probe = self._begin(entry, now)
            probe.asker, probe.asker_seq = asker, request.seq
            self._relayed_count += 1
            self._set_timer(probe, now + NACK_AFTER * self._timeout_s(entry))
            self._ping(probe, entry, effects)

    def on_ack(self, sender: PeerId, seq: int, now: float) -> None:
        """Handle an Ack from the target or from a helper.

        A helper's Ack is believed: a liar can only keep a dead member alive for us, and the next round asks three
        others. An Ack from the target also gives a round-trip time.
        """
        probe = self._probes.get(seq)
        if probe is None:
            return
        if sender == probe.target:
            entry = self.table.entries.get(sender)
            if entry is not None and not probe.is_indirect:
                rtt_s = now - probe.started_at
                # Smoothed RTT with a gain of 1/8 (Jacobson 1988).
                entry.rtt_s = rtt_s if entry.rtt_s is None else entry.rtt_s + (rtt_s - entry.rtt_s) / 8
        elif sender in probe.helpers:
            self.adjust_health(-1)
            self._end(probe)

    def on_nack(self, sender: PeerId, seq: int) -> None:
        """Handle a Nack: the helper could not reach the target, but is alive itself."""
        probe = self._probes.get(seq)
        if probe is not None and sender in probe.helpers:
            probe.nacks.add(sender)
            if len(probe.nacks) == len(probe.helpers):
                self._fail(probe)  # No helper is left to wait for.

    def on_message(self, sender: PeerId, effects: list[Effect]) -> None:
        """Handle any message: end every probe of its sender as successful."""
        for probe in self.targets.get(sender, ())[:]:
            if probe.asker is not None:
                effects.append(Send(probe.asker, Ack(probe.asker_seq, ())))
            else:
                self.adjust_health(-1)
            self._end(probe)

    def on_proof_of_life(self, peer: PeerId) -> None:
        """Handle proof of life other than a message: end our own probe. Askers still wait for the target's Ack."""
        probe = self._own_probe(peer)
        if probe is not None:
            self.adjust_health(-1)
            self._end(probe)

    def on_dial_failed(self, entry: Entry, now: float, effects: list[Effect]) -> None:
        """Handle a failed dial: direct probes of the member fail. If there was none, start an indirect one."""
        if entry.is_linked:
            self.probe_now(entry, now, effects)
            return
        peer = entry.record.id
        is_accused = entry.is_accused_by(self.table.mine.record.id)  # A second failure adds no information.
        if peer not in self.targets and entry.state in (ALIVE, SUSPECT) and entry.was_contacted and not is_accused:
            # Skip members that we probe only for an asker. If helpers asked helpers in turn, one death would make
            # all members ask all others (5,600 requests for each death among 1,000 members).
            self._probe(entry, now, effects, can_ping=False)
        for probe in self.targets.get(peer, ())[:]:
            if not probe.waits_for_helpers:
                self._give_up(probe, now, effects)

    # -- one probe -----------------------------------------------------------------------------------------------
    def _probe_next(self, now: float, effects: list[Effect]) -> None:
        entries = self.table.entries
        for _ in range(2):
            while self._ring:
                peer = self._ring.pop()
                self._in_ring.discard(peer)
                entry = entries.get(peer)
                if entry is not None and self._should_probe(entry) and self._own_probe(entry.record.id) is None:
                    return self._probe(entry, now, effects)
            self._ring = [*self.table.contacted, *self.table.suspects]  # Refilled once in N periods.
            self._rng.shuffle(self._ring)
            self._in_ring = set(self._ring)
        return None

    def _should_probe(self, entry: Entry) -> bool:
        """Return True if we should probe this member.

        Strangers are probed only by members that had a link with them: a made-up stranger never answers and would lower
        our health. An undialable member is probed by the members linked with it, and by its homes, to which it keeps
        links. All probe it when no home is ALIVE, or every home restarted after it was named and so forgot it.
        """
        if (entry.state is not ALIVE and entry.state is not SUSPECT) or not entry.was_contacted:
            return False
        homes, entries = entry.record.homes, self.table.entries
        if entry.is_reachable or self.table.mine.record.id in homes:
            return True
        known_homes = [entries[home] for home in homes if home in entries]
        return not any(home.state is ALIVE and home.incarnation_at <= entry.record_at for home in known_homes)

    def _probe(
        self, entry: Entry, now: float, effects: list[Effect], can_ping: bool = True
    ) -> None:  # fmt: skip
        """Begin a probe of our own: direct if the member can be pinged, else indirect."""
        if len(self._probes) - self._relayed_count >= MAX_PROBES:
            return
        probe = self._begin(entry, now)
        if entry.is_reachable and can_ping:
            self._set_timer(probe, now + self._timeout_s(entry))
            self._ping(probe, entry, effects)
        else:
            self._ask_helpers(probe, entry, now, effects)

    def _ping(self, probe: Probe, entry: Entry, effects: list[Effect]) -> None:
        updates: tuple[Update, ...] = self.rumours.take(PIGGYBACK, 1, self.table.size)
        if entry.state is SUSPECT:
            # Lifeguard's buddy system: the suspect learns of the suspicion from its prober.
            updates = (entry.hint, *updates)
        effects.append(Send(entry.record.id, Ping(probe.seq, updates)))

    def _give_up(self, probe: Probe, now: float, effects: list[Effect]) -> None:
        """Go on after a timeout or a failed dial: send a Nack to the asker, ask helpers, or fail."""
        entry = self.table.entries.get(probe.target)
        if probe.asker is not None:
            effects.append(Send(probe.asker, Nack(probe.asker_seq)))
            self._end(probe)
        elif entry is None or probe.is_indirect:
            self._fail(probe)
        else:
            self._ask_helpers(probe, entry, now, effects)

    def _ask_helpers(self, probe: Probe, entry: Entry, now: float, effects: list[Effect]) -> None:
        internal, entries, target = self.config.internal, self.table.entries, entry.record.id
        probe.is_indirect = True
        helpers: list[Entry] = []
        if entry.record.address is None:  # Only members that have a link with it can ping it.
            homes = [entries[home] for home in entry.record.homes if home in entries]
            others = [home for home in homes if home.state is ALIVE and home is not self.table.mine]
            helpers = [home for home in others if home.was_contacted and home.is_reachable]
        helpers = helpers or self.table.sample(MAX_HELPERS, self._rng, without=target)
        if not helpers and not entry.is_linked:
            self._fail(probe)
            return
        # Without helpers the answer may still come over the link, as it may while helpers are asked.
        probe.helpers = {helper.record.id for helper in helpers}
        period_s, timeout_s = internal.probe_period_s, internal.probe_timeout_max_s
        patience = 1 + self.health
        self._set_timer(probe, max(probe.started_at + period_s * patience, now + timeout_s * patience))
        request = PingReq(probe.seq, target, ())
        effects.extend(Send(helper.record.id, request) for helper in helpers)

    def _timeout_s(self, entry: Entry) -> float:
        shortest_s, longest_s = self.config.internal.probe_timeout_min_s, self.config.internal.probe_timeout_max_s
        timeout_s = longest_s if entry.rtt_s is None else min(longest_s, max(shortest_s, 3 * entry.rtt_s))
        return timeout_s * (1 + self.health)

    def _fail(self, probe: Probe) -> None:
        # Helpers that sent not even a Nack count against our own health. Without helpers, we cannot tell (Lifeguard).
        self.adjust_health(len(probe.helpers) - len(probe.nacks) if probe.helpers else 1)
        self._end(probe)
        entry = self.table.entries.get(probe.target)
        if entry is not None and entry.state in (ALIVE, SUSPECT):
            self.failed.append(entry)

    # -- bookkeeping ---------------------------------------------------------------------------------------------
    def _own_probe(self, peer: PeerId) -> Probe | None:
        return next((probe for probe in self.targets.get(peer, ()) if probe.asker is None), None)

    def _begin(self, entry: Entry, now: float) -> Probe:
        self._seq += 1
        probe = self._probes[self._seq] = Probe(self._seq, entry.record.id, now)
        self.targets.setdefault(probe.target, []).append(probe)
        return probe

    def _set_timer(self, probe: Probe, due_at: float) -> None:
        probe.due_at = due_at
        heapq.heappush(self._timers, (due_at, probe.seq))
        self._update_deadline()

    def _end(self, probe: Probe) -> None:
        if self._probes.pop(probe.seq, None) is None:
            return
        self._relayed_count -= probe.asker is not None
        same_target = self.targets[probe.target]
        same_target.remove(probe)
        if not same_target:
            del self.targets[probe.target]
        while self._timers:  # A stale timer at the front would wake the driver for nothing.
            due_at, seq = self._timers[0]
            front = self._probes.get(seq)
            if front is not None and front.due_at == due_at:
                break
            heapq.heappop(self._timers)
        self._update_deadline()

    def _update_deadline(self) -> None:
        self.deadline = min(self._next_probe_at, self._timers[0][0]) if self._timers else self._next_probe_at
