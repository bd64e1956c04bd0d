"""Introductions of strangers: members known by hearsay alone, grouped by their introducer.

A signature proves only that its author holds a key, and one peer can make a thousand keys. A member without a link to
us is therefore never a partner, an owner of data or a first dial. It is evicted first when the table is full. It is
dialled when its turn comes, and is a normal member from its first link on.
"""

from __future__ import annotations

import random
from collections import OrderedDict

from gossip.effects import Dial, Effect, MemberState
from gossip.ids import PeerId
from gossip.membership.entry import Allowance, Entry
from gossip.membership.table import Table

__all__ = ["Introductions"]

# Dials: a swarm of 8 is linked at once, one of 1,000 within minutes, since both sides dial.
AT_ONCE, A_SECOND = 8.0, 1.0
LOOK_S = 1.0  # time between two calls of tick
DRAWS = 8  # draws to find a stranger whose dial is due
FEW = 8  # a peer with fewer contacted members dials without delay
SPREAD_S = 0.05  # random delay for each member: all members hear of a newcomer at once and must not all dial it at once
GIVE_WAY_S = 0.5  # delay of the larger id: of two that hear of each other one dial is enough
RETRY_S, DOUBLINGS = 60.0, 6  # after a failed dial; doubles up to about an hour
ANSWERED_S = 30.0  # maximum duration of a dial, including its wait in the queue
# Unanswered dials to a host that one introducer names, and the time until the next one.
OF_ONE_HOST, HOST_RETRY_S = 4.0, 60.0
HOSTS = 1_024  # pairs of introducer and host to remember
# Failed dials, a minute apart. Otherwise a member that died before any peer linked with it would stay ALIVE for ever.
DOUBTED = 2


class Introductions:
    """A rate-limited dialler of strangers. At ``due_s`` call :meth:`tick`."""

    def __init__(self, table: Table, rng: random.Random, now: float) -> None:
        self._table, self._rng = table, rng
        self._allowance = Allowance(A_SECOND, AT_ONCE, now)
        # Unanswered dials: the start, and the rate limiter of the host.
        self._under_way: dict[PeerId, tuple[float, Allowance]] = {}
        self._hosts: OrderedDict[tuple[PeerId, str], Allowance] = OrderedDict()  # rate limiters by introducer and host
        self.due_s = float("inf")

    def heard(self, entry: Entry, now: float) -> None:
        """Schedule the dial of a stranger that became ALIVE."""
        table = self._table
        wait_s = 0.0 if table.mine.record.id < entry.record.id else GIVE_WAY_S
        if len(table.contacted) >= FEW:
            wait_s += SPREAD_S * len(table.alive) * self._rng.random()
        entry.try_s = now + wait_s
        if entry.try_s < self.due_s:
            self.due_s = entry.try_s

    def failed(self, entry: Entry, now: float) -> bool:
        """Note a failed dial. Return True after enough of them that the member may not exist.

        The first failure only makes other strangers go first.
        """
        ours = self._under_way.pop(entry.record.id, None) is not None
        if not ours or entry.state is MemberState.DEAD:  # the dial served an indirect probe or a heal
            return False
        entry.tries += 1
        self._later(entry, now)
        return entry.tries >= DOUBTED

    def over(self, peer: PeerId) -> None:
        """Note that the member answered: its dial does not count against its host."""
        under_way = self._under_way.pop(peer, None)
        if under_way is not None:
            under_way[1].give_back()

    def _later(self, entry: Entry, now: float) -> None:
        wait_s = RETRY_S * 2 ** min(max(entry.tries - 1, 0), DOUBLINGS)
        entry.try_s = now + wait_s * (0.75 + 0.5 * self._rng.random())

    def tick(self, now: float, out: list[Effect]) -> None:
        """Dial a few strangers that are due, drawn fairly: an introducer that tells of hundreds delays few others."""
        table = self._table
        self.due_s = now + LOOK_S if table.strangers else float("inf")
        for _ in range(int(AT_ONCE)):
            if len(self._under_way) >= AT_ONCE:
                self._under_way = {peer: one for peer, one in self._under_way.items() if one[0] > now - ANSWERED_S}
            # All wait for addresses that swallow packets. Further dials would only queue behind them.
            if len(self._under_way) >= AT_ONCE:
                return
            entry = self._draw(now)
            if entry is None or not self._allowance.take(now):
                return
            address, introducer = entry.record.address, entry.introducer
            assert address is not None
            assert introducer is not None
            of_host = self._of_host(introducer, address.host, now)
            spare = int(entry.tries > 0)  # a member that was never dialled goes first
            if not of_host.take(now, spare):  # the introducer names many ports of a host that does not answer
                self._allowance.give_back()
                # An answered dial returns its token, so some try before a token would be made.
                entry.try_s = now + of_host.wait_s(spare) * self._rng.uniform(0.25, 1.25)
                continue
            self._later(entry, now)  # back off unless it answers: one dial at a time
            self._under_way[entry.record.id] = now, of_host
            out.append(Dial(address, entry.record.id))

    def _of_host(self, introducer: PeerId, host: str, now: float) -> Allowance:
        """Return the rate limiter of dials to ``host`` for members that ``introducer`` told of."""
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
            if entry.try_s <= now:
                return entry
        return None
