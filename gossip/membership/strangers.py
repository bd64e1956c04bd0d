"""Introductions: the rate-limited dials of strangers, which are members known by hearsay alone.

A signature proves only that its author holds a key, and one peer can make a thousand keys. A member without a link to
us is therefore never a partner, an owner of data or a first dial. It is evicted first when the table is full. It is
dialled when its turn comes, and is a normal member from its first link on.
"""

import math
import random
from typing import NamedTuple

from gossip.effects import Dial, Effect, MemberState
from gossip.ids import PeerId
from gossip.membership.entry import Entry, TokenBucket
from gossip.membership.table import Table
from gossip.recent import Recent

# Dials at once and a second: a swarm of 8 is linked at once, one of 1,000 within minutes, since both sides dial.
DIAL_BURST, DIALS_PER_S = 8.0, 1.0
TICK_S = 1.0  # Time between two calls of tick.
MAX_DRAWS = 8  # Draws to find a stranger whose dial is due.
FEW_CONTACTS = 8  # A peer with fewer contacted members dials without a random delay.
# Largest random delay of a dial, for each ALIVE member: all hear of a newcomer at once and must not dial it at once.
SPREAD_S = 0.05
YIELD_S = 0.5  # Delay of the larger id: of two members that hear of each other, one dial is enough.
RETRY_S, MAX_DOUBLINGS = 60.0, 6  # Delay after a failed dial. It doubles at most 6 times, up to about an hour.
MAX_DIAL_S = 30.0  # Maximum duration of a dial, including its wait in the queue.
# Number of unanswered dials to one host for the members that one introducer names, and the time until the next dial.
HOST_BURST, HOST_RETRY_S = 4.0, 60.0
MAX_HOSTS = 1_024  # Pairs of introducer and host to remember.
# Failed dials, a minute apart, until a stranger is suspected. Otherwise a member that died before any peer linked with
# it would stay ALIVE for ever.
MAX_FAILED_DIALS = 2


class OpenDial(NamedTuple):
    """A dial of a stranger that is not answered yet."""

    began_at: float
    host_tokens: TokenBucket  # The rate limiter of its host, which gets the token back if the stranger answers.


class Introductions:
    """The dialler of strangers. Call :meth:`tick` at ``due_at``."""

    def __init__(self, table: Table, rng: random.Random, now: float) -> None:
        self._table, self._rng = table, rng
        self._tokens = TokenBucket(DIALS_PER_S, DIAL_BURST, now)
        self._open_dials: dict[PeerId, OpenDial] = {}
        self._host_tokens = Recent[tuple[PeerId, str], TokenBucket](MAX_HOSTS)  # By introducer and host.
        self.due_at = math.inf

    def schedule(self, entry: Entry, now: float) -> None:
        """Schedule the dial of a stranger that became ALIVE."""
        table = self._table
        wait_s = 0.0 if table.mine.record.id < entry.record.id else YIELD_S
        if len(table.contacted) >= FEW_CONTACTS:
            wait_s += SPREAD_S * len(table.alive) * self._rng.random()
        entry.dial_at = now + wait_s
        if entry.dial_at < self.due_at:
            self.due_at = entry.dial_at

    def tick(self, now: float, effects: list[Effect]) -> None:
        """Dial a few strangers that are due, drawn fairly: an introducer that tells of hundreds delays few others."""
        table = self._table
        self.due_at = now + TICK_S if table.strangers else math.inf
        for _ in range(int(DIAL_BURST)):
            if len(self._open_dials) >= DIAL_BURST:
                oldest = now - MAX_DIAL_S
                self._open_dials = {peer: dial for peer, dial in self._open_dials.items() if dial.began_at > oldest}
            # All wait for addresses that swallow packets. Further dials would only queue behind them.
            if len(self._open_dials) >= DIAL_BURST:
                return
            entry = self._draw(now)
            if entry is None or not self._tokens.take(now):
                return
            address, introducer = entry.record.address, entry.introducer
            assert address is not None
            assert introducer is not None
            host_tokens = self._limiter(introducer, address.host, now)
            spare = int(entry.failed_dials > 0)  # The last token is for a member that was never dialled.
            if not host_tokens.take(now, spare):  # The introducer names many ports of a host that does not answer.
                self._tokens.give_back()
                # An answered dial returns its token, so some strangers try before the rate limiter makes a new one.
                entry.dial_at = now + host_tokens.wait_s(spare) * self._rng.uniform(0.25, 1.25)
                continue
            self._back_off(entry, now)  # As after a failure, so that no second dial begins meanwhile.
            self._open_dials[entry.record.id] = OpenDial(now, host_tokens)
            effects.append(Dial(address, entry.record.id))

    def on_answer(self, peer: PeerId) -> None:
        """Handle a member that answered: its dial does not count against its host."""
        dial = self._open_dials.pop(peer, None)
        if dial is not None:
            dial.host_tokens.give_back()

    def on_dial_failed(self, entry: Entry, now: float) -> bool:
        """Handle a failed dial. Return True after enough of them that the member may not exist.

        The first failure only makes other strangers go first.
        """
        is_ours = self._open_dials.pop(entry.record.id, None) is not None
        if not is_ours or entry.state is MemberState.DEAD:  # The dial served an indirect probe or a heal.
            return False
        entry.failed_dials += 1
        self._back_off(entry, now)
        return entry.failed_dials >= MAX_FAILED_DIALS

    def _draw(self, now: float) -> Entry | None:
        """Return a random stranger whose dial is due."""
        table, rng = self._table, self._rng
        for _ in range(MAX_DRAWS):
            peer = table.draw_stranger(rng)
            if peer is None:
                return None
            entry = table.entries[peer]
            if entry.dial_at <= now:
                return entry
        return None

    def _back_off(self, entry: Entry, now: float) -> None:
        wait_s = RETRY_S * 2 ** min(max(entry.failed_dials - 1, 0), MAX_DOUBLINGS)
        entry.dial_at = now + wait_s * (0.75 + 0.5 * self._rng.random())

    def _limiter(self, introducer: PeerId, host: str, now: float) -> TokenBucket:
        """Return the rate limiter of dials to ``host`` for members that ``introducer`` told of."""
        known = self._host_tokens.get((introducer, host))
        tokens = self._host_tokens[introducer, host] = known or TokenBucket(1 / HOST_RETRY_S, HOST_BURST, now)
        return tokens
