"""The exchanges of a node that came to less than they should, because its vector is far from the others'."""

from collections import deque

from gossip.ids import PeerId

WINDOW_S = 60.0
MAX_EXCHANGES = 1_024  # Exchanges that are remembered; a busy node makes them in seconds.
MAX_SETBACK_SHARE = 0.1  # The share of exchanges from which on the user is told.
MIN_TAKEN_SHARE = 0.5  # The share of a difference below which it was cut short. Honest ones often lose a third.
# The smallest such difference, relative to our vector: coarse codecs round weights that hardly move by as much.
MIN_DISTANCE = 0.05
# Setbacks beyond MAX_SETBACK_SHARE that say nothing: a young node knows no usual distance yet.
ALLOWED_EXCESS = 5
LASTING_S = 5.0  # How long there must be more of them. A node that comes to a fast swarm catches up within seconds.


def is_cut_short(share: float, difference_sq: float, own_sq: float) -> bool:
    """Return True if an exchange of which a filter took this share came to less than it should."""
    return share < MIN_TAKEN_SHARE and difference_sq > MIN_DISTANCE**2 * own_sq


class Setbacks:
    """The last minute's exchanges, at most 1,024. A *setback* was refused for its distance, or cut short."""

    def __init__(self) -> None:
        # The time and the partner of each, and whether it was a setback.
        self.exchanges: deque[tuple[float, PeerId, bool]] = deque(maxlen=MAX_EXCHANGES)
        self.is_told = False  # The user has been told, and it has not become better since.
        self.too_many_since: float | None = None  # None while there are few setbacks.

    def note(self, partner: PeerId, is_setback: bool, now: float) -> bool:
        """Note an exchange, and return True if the user is to be told now.

        If exchanges with most partners are setbacks, this node is far away. If few are, these partners are, whose own
        nodes tell their users.
        """
        exchanges = self.exchanges
        exchanges.append((now, partner, is_setback))
        while now - exchanges[0][0] > WINDOW_S:
            exchanges.popleft()
        if not (is_setback or self.is_told or self.too_many_since is not None):
            return False
        partners = {partner for _, partner, _ in exchanges}
        far_partners = {partner for _, partner, is_setback in exchanges if is_setback}
        is_ours = 2 * len(far_partners) > len(partners)
        excess = self.count - MAX_SETBACK_SHARE * len(exchanges)
        if not (is_ours and excess > ALLOWED_EXCESS):
            self.too_many_since = None
        elif self.too_many_since is None:
            self.too_many_since = now
        is_lasting = self.too_many_since is not None and now - self.too_many_since >= LASTING_S
        must_tell = is_setback and is_lasting and not self.is_told
        self.is_told = excess > 0 and (self.is_told or must_tell)
        return must_tell

    @property
    def count(self) -> int:
        """Return the number of setbacks."""
        return sum(is_setback for *_, is_setback in self.exchanges)

    @property
    def sentence(self) -> str:
        """Return the sentence for the user, in which ``{tensor}`` stands for the tensor that is furthest."""
        return (
            f"{self.count} of the last {len(self.exchanges)} exchanges of this node were refused or cut short, because "
            "its {tensor} is far from the others': give all nodes the same learning rate, batch size and kind of data, "
            "and no last batch of a few samples."
        )
