"""Members of whom we know by hearsay alone, by who told us of them.

A record is signed, and a signature says only that somebody holds a key: one member can make a thousand. So whoever
never had a link with us is nobody's partner, owner of data or first dial, and the first to go when the table is full.
It is introduced instead: dialled when its turn comes, and a member like any other from its first link on.
"""

from __future__ import annotations

import random
from collections import OrderedDict

from gossip.effects import Dial, Effect, MemberState
from gossip.ids import PeerId
from gossip.membership.entry import Allowance, Entry
from gossip.membership.table import Table

__all__ = ["Introductions"]

ALIVE = MemberState.ALIVE

AT_ONCE, A_SECOND = 8.0, 1.0  # dials: a swarm of 8 knows itself at once, one of 1,000 in minutes, since both sides dial
LOOK_S = 1.0  # between two looks
DRAWS = 8  # for one whose turn it is
FEW = 8  # who has met fewer waits for nobody's turn
SPREAD_S = 0.05  # for each member: of a newcomer all hear at once, and must not all dial it at once
GIVE_WAY_S = 0.5  # the larger id waits so long: of two that hear of each other one dial is enough
RETRY_S, DOUBLINGS = 60.0, 6  # after a dial that failed, up to an hour
ANSWERED_S = 30.0  # the longest that a dial takes, its turn among those to strangers included
OF_ONE_HOST, HOST_RETRY_S = 4.0, 60.0  # unanswered dials at a host that one introducer names, and then one in so long
HOSTS = 1_024  # pairs of introducer and host that are remembered
DOUBTED = 2  # dials that failed, a minute apart: one that died before anybody met it would else be ALIVE for ever


class Introductions:
    """Dials strangers, a bounded trickle of them; ``due_s`` is when :meth:`tick` wants to be called."""

    def __init__(self, table: Table, rng: random.Random, now: float) -> None:
        self._table, self._rng = table, rng
        self._allowance = Allowance(A_SECOND, AT_ONCE, now)
        self._under_way: dict[PeerId, tuple[float, Allowance]] = {}  # dials without an answer: since when, and of whose
        self._hosts: OrderedDict[tuple[PeerId, str], Allowance] = OrderedDict()  # by introducer and host
        self.due_s = float("inf")

    def heard(self, entry: Entry, now: float) -> None:
        """One more stranger is ALIVE."""
        table = self._table
        wait_s = 0.0 if table.mine.record.id < entry.record.id else GIVE_WAY_S
        if len(table.met) >= FEW:
            wait_s += SPREAD_S * len(table.alive) * self._rng.random()
        entry.try_s = now + wait_s
        if entry.try_s < self.due_s:
            self.due_s = entry.try_s

    def failed(self, entry: Entry, now: float) -> bool:
        """Nobody answered where it should be. Once says nothing of a stranger but that others come first; returns
        whether it is often enough to doubt that there is such a member."""
        ours = self._under_way.pop(entry.record.id, None) is not None
        if not ours or entry.state is MemberState.DEAD:  # for another who probes it, or to see whether it is back
            return False
        entry.tries += 1
        self._later(entry, now)
        return entry.tries >= DOUBTED

    def over(self, peer: PeerId) -> None:
        """The member has answered: its dial does not count against its host."""
        under_way = self._under_way.pop(peer, None)
        if under_way is not None:
            under_way[1].give_back()

    def _later(self, entry: Entry, now: float) -> None:
        wait_s = RETRY_S * 2 ** min(max(entry.tries - 1, 0), DOUBLINGS)
        entry.try_s = now + wait_s * (0.75 + 0.5 * self._rng.random())

    def tick(self, now: float, out: list[Effect]) -> None:
        """Dial some whose turn it is: of any introducer alike, so that one who tells of hundreds delays few others."""
        table = self._table
        self.due_s = now + LOOK_S if table.strangers else float("inf")
        for _ in range(int(AT_ONCE)):
            if len(self._under_way) >= AT_ONCE:
                self._under_way = {peer: one for peer, one in self._under_way.items() if one[0] > now - ANSWERED_S}
            if len(self._under_way) >= AT_ONCE:  # addresses that swallow packets: the rest would only stand behind them
                return
            entry = self._draw(now)
            if entry is None or not self._allowance.take(now):
                return
            address, introducer = entry.record.address, entry.introducer
            assert address is not None
            assert introducer is not None
            self._later(entry, now)  # unless it answers: one dial at a time
            of_host = self._of_host(introducer, address.host, now)
            if not of_host.take(now):  # the introducer names many ports of a host at which nobody answers
                self._allowance.give_back()
                continue
            self._under_way[entry.record.id] = now, of_host
            out.append(Dial(address, entry.record.id))

    def _of_host(self, introducer: PeerId, host: str, now: float) -> Allowance:
        """Return the allowance of dials to ``host`` for members that ``introducer`` told of."""
        allowance = self._hosts.get((introducer, host))
        if allowance is None:
            allowance = self._hosts[introducer, host] = Allowance(1 / HOST_RETRY_S, OF_ONE_HOST, now)
            if len(self._hosts) > HOSTS:
                self._hosts.popitem(last=False)
        self._hosts.move_to_end((introducer, host))
        return allowance

    def _draw(self, now: float) -> Entry | None:
        table, rng = self._table, self._rng
        for _ in range(DRAWS):
            peer = table.stranger(rng)
            if peer is None:
                return None
            entry = table.entries[peer]
            if entry.try_s <= now and entry.state is ALIVE and entry.record.address is not None:
                return entry
        return None
