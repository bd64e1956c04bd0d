"""How members that settle come to the very same bits: means first, then one side's vector for both.

A pair's mean is exact, and so the mean of the swarm stays where it is. But means of pairs round differently, and many
more of them would follow before all members hold one number in each element. Once a pair is *near*, it therefore
*joins*: both sides take the vector that is larger in the first element in which they differ. Each side sees by itself
whose that is, from the sign of the difference.

Joining ends. That order is a total order of vectors, and a join never lowers the larger side. So the largest vector
spreads like a rumour, and no other is made. (Where one element is far smaller than the difference, the sum rounds, and
the side that joins comes within 2^-24 of the difference. The next join of the two is exact.)

All pairs become near. Means shrink differences: in simulated swarms of 3, 8 and 50, all are near after some 4, 10 and
18 exchanges of each member. Where rounding stops that, as with bfloat16, :data:`MAX_MEANS` does it. The sides need not
be near at the same time: if one joins and the other takes the mean, their difference at least halves.
"""

# Near, as a share of the largest difference of this settling. The vector that is joined is then about so far from the
# mean of all. With 1/4 it would be a fifth, and with 1/64 take two more exchanges each. No power of 1/2, since means
# halve differences: drivers add up squares in different orders, and would decide differently at the limit.
NEAR_SHARE = 0.06
MAX_MEANS = 16  # Exchanges since the largest difference after which a pair is near at any distance.
LARGER = 1.001  # A square is larger only beyond this factor, for the same reason.


class Convergence:
    """The differences that one member found since it began to settle."""

    def __init__(self) -> None:
        self.largest_sq = 0.0  # Of the differences that were taken whole, so that no lie can make all others near.
        self.count = 0  # Exchanges since the largest.

    def is_near(self, difference_sq: float) -> bool:
        """Return True if a pair with this squared difference joins."""
        if difference_sq > LARGER * self.largest_sq:
            return False
        return self.count >= MAX_MEANS or difference_sq <= NEAR_SHARE**2 * self.largest_sq

    def note(self, difference_sq: float) -> None:
        """Note the squared difference of an exchange that was taken whole."""
        is_largest = difference_sq > LARGER * self.largest_sq
        self.largest_sq = max(self.largest_sq, difference_sq)
        self.count = 0 if is_largest else self.count + 1
