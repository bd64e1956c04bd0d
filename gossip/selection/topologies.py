"""Selection by rank on a ring, a torus, the exponential graph or a grid, or on a graph from a file.

A rank is a place among the sorted ids of the living members, as one peer sees them. Peers that see different members
derive different ranks. Then a mix uses another edge than the graph's, where a pair mean is as good. A member *fits* if
it can mix now. One that does not keeps its rank and is skipped, so that the graph closes over it and no peer waits.

``weight`` is the largest weight of a pair's difference. If a mix is with all neighbours at once, it is the Metropolis
weight ``1 / (1 + max of both degrees)``, with which every node keeps a share of itself.
"""

from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import Callable, Container, Iterator, Sequence
from functools import lru_cache
from math import isqrt, prod

from gossip.errors import ConfigError
from gossip.ids import PeerId
from gossip.selection.graphs import Graph
from gossip.selection.rule import Candidates, Options, Selector
from gossip.wire.messages import MAX_GROUP

# Shift of ranks per cycle through a grid's dimensions, as a share of n. The multiples of the golden ratio are spread
# evenly for all n.
GOLDEN = (5**0.5 - 1) / 2


class Ranked(Selector):
    """The base class of rules by rank: it sorts the members, and chooses a random neighbour."""

    def __init__(self, at_once: bool = False) -> None:
        super().__init__(at_once)
        # ``Candidates.changes`` and the number of members when they were last sorted; -1 before.
        self._seen = (-1, -1)
        self._order: list[PeerId] = []

    def ranking(self, swarm: Candidates) -> tuple[list[PeerId], int]:
        """Return the sorted ids of the living members and ourselves, and our rank. O(log n) until a change."""
        alive, me = swarm.alive(), swarm.me
        seen = (swarm.changes, len(alive))
        if seen == self._seen:
            rank = bisect_left(self._order, me)
            if rank < len(self._order) and self._order[rank] == me:
                return self._order, rank
        self._seen, self._order = seen, sorted({*alive, me})
        return self._order, bisect_left(self._order, me)

    def choose(self, swarm: Candidates, asked: Container[PeerId], rng: random.Random) -> PeerId | None:
        unasked = [peer for peer in self.neighbours(swarm) if peer not in asked]
        return unasked[int(rng.random() * len(unasked))] if unasked else None


class Ring(Ranked):
    """A ring: the neighbours are the previous and the next rank."""

    name = "ring"

    def neighbours(self, swarm: Candidates) -> list[PeerId]:
        order, rank = self.ranking(swarm)
        return circle_neighbours(order, rank, swarm.fits)

    def weight(self, swarm: Candidates, partner: PeerId) -> float:
        return 1 / 3 if self.at_once else 0.5  # Metropolis weight: both have two neighbours.


class Torus(Ranked):
    """A torus: the neighbours are left, right, up and down in rows of ``ceil(sqrt n)``, which are closed.

    If n is no square, the last row is short. It closes over its members, and the columns that it does not reach close
    one row earlier. A member without a fitting neighbour in row and column takes the ring's neighbours.
    """

    # Rows of the factor of n nearest to its root would be worse: a prime number of members would be a ring. 32 members
    # mix better in rows of 6 with a short last one (gap 0.163) than as 4 by 8 (0.117).

    name = "torus"

    def neighbours(self, swarm: Candidates) -> list[PeerId]:
        order, rank = self.ranking(swarm)
        length = isqrt(len(order) - 1) + 1  # ceil(sqrt n)
        row, column = divmod(rank, length)
        in_row = order[row * length : (row + 1) * length]
        in_column = order[column::length]
        neighbours = [*circle_neighbours(in_row, column, swarm.fits), *circle_neighbours(in_column, row, swarm.fits)]
        return list(dict.fromkeys(neighbours)) or circle_neighbours(order, rank, swarm.fits)

    def weight(self, swarm: Candidates, partner: PeerId) -> float:
        return 0.2 if self.at_once else 0.5  # Metropolis weight: four neighbours, or fewer.


class Exponential(Ranked):
    """One peer per round: the one ``2^(round mod ceil(log2 n))`` ranks ahead (Assran et al. 2019; Ying et al. 2021).

    The graph is directed: we send to that peer, and receive from the one as far behind us. If it does not fit, or was
    asked already, the next power replaces it. If no power fits, the next member that fits does.
    """

    name = "exponential"

    def neighbours(self, swarm: Candidates) -> list[PeerId]:
        partner = next(self.candidates_ahead(swarm), None)
        return [] if partner is None else [partner]

    def choose(self, swarm: Candidates, asked: Container[PeerId], rng: random.Random) -> PeerId | None:
        return next((peer for peer in self.candidates_ahead(swarm) if peer not in asked), None)

    def candidates_ahead(self, swarm: Candidates) -> Iterator[PeerId]:
        """Yield the fitting partners, this round's first."""
        order, rank = self.ranking(swarm)
        n = len(order)
        powers = (n - 1).bit_length()
        has_fitting = False
        for power in range(powers):
            peer = order[(rank + (1 << (swarm.round + power) % powers)) % n]
            if swarm.fits(peer):
                has_fitting = True
                yield peer
        if not has_fitting:
            yield from circle_neighbours(order, rank, swarm.fits)[:1]


class Grid(Ranked):
    """A virtual grid of d dimensions with sides of at most ``group_size``.

    A round's group shares all coordinates but that round's (Moshpit: Ryabinin et al. 2021, "Moshpit SGD"). With n =
    group_size^d members, d rounds of group means give all the exact mean. With any other n the sides are the shortest
    that hold n. The last layer is not full, and its members change every d rounds. A round of group means then leaves
    0.07 to 0.5 of the members' variance about their mean (measured, 3 to 1,025 members). If the members of the last
    layer did not change, it would be 0.76 for 33 members in groups of 2.
    """

    name = "grid"

    def __init__(self, group_size: int = 4) -> None:
        if not 2 <= group_size <= MAX_GROUP:
            raise ConfigError(f"group_size = {group_size!r} cannot work: a group has from 2 to {MAX_GROUP} members.")
        super().__init__()
        self.group_size = group_size

    @classmethod
    def from_options(cls, options: Options) -> Grid:
        return cls(options.group_size)

    def group(self, swarm: Candidates, size: int) -> list[PeerId]:
        """Return this round's group in groups of at most ``size``: ourselves and the fitting members, sorted."""
        order, rank = self.ranking(swarm)
        me, fits = swarm.me, swarm.fits
        return [peer for peer in cell_mates(order, rank, size, swarm.round) if peer == me or fits(peer)]

    def neighbours(self, swarm: Candidates) -> list[PeerId]:
        """Return the others of this round's group; if it is empty, the next dimension's; if all are, the ring's."""
        order, rank = self.ranking(swarm)
        n, fits = len(order), swarm.fits
        for turn in range(len(sides(n, self.group_size))):
            mates = cell_mates(order, rank, self.group_size, swarm.round + turn)
            fitting = [peer for peer in mates if fits(peer)]
            if fitting:
                return fitting
        return circle_neighbours(order, rank, fits)


class OnGraph(Ranked):
    """A static graph from a file: only its edges are used, since a missing edge may be forbidden.

    Members outside the graph do not mix.
    """

    name = "graph"

    def __init__(self, graph: Graph, at_once: bool = False) -> None:
        super().__init__(at_once)
        self.graph = graph
        # The ranking of the last placement, and what :meth:`placement` returned for it.
        self._placement: tuple[list[PeerId], dict[PeerId, int], dict[int, PeerId]] = ([], {}, {})

    @classmethod
    def from_options(cls, options: Options) -> OnGraph:
        if options.graph is None:
            raise ConfigError("selection = 'graph' needs a graph: name its file, with one link a line, as in 0 1.")
        return cls(options.graph, options.at_once)

    def neighbours(self, swarm: Candidates) -> list[PeerId]:
        node_of, member_of = self.placement(swarm)
        our_node = node_of.get(swarm.me)
        if our_node is None:
            return []
        neighbours = (member_of.get(node) for node in self.graph.links[our_node])
        return [peer for peer in neighbours if peer is not None and swarm.fits(peer)]

    def placement(self, swarm: Candidates) -> tuple[dict[PeerId, int], dict[int, PeerId]]:
        """Return the node of each member, and the member of each node."""
        order, _ = self.ranking(swarm)
        if self._placement[0] is not order:
            node_of = self.graph.node_numbers([(peer, swarm.address(peer)) for peer in order])
            self._placement = order, node_of, {node: peer for peer, node in node_of.items()}
        return self._placement[1], self._placement[2]

    def weight(self, swarm: Candidates, partner: PeerId) -> float:
        """Return the Metropolis weight 1 / (1 + max of both degrees) with ``at_once``, if ids name the nodes.

        The node of a rank or an address depends on a peer's view. So there every edge has the weight of the graph's
        busiest node.
        """
        if not self.at_once:
            return 0.5
        graph = self.graph
        if graph.kind != "id":
            return 1 / (1 + graph.max_degree)
        node_of = graph.node_numbers([(swarm.me, None), (partner, None)])
        return 1 / (1 + max((len(graph.links[node]) for node in node_of.values()), default=graph.max_degree))


def circle_neighbours(order: Sequence[PeerId], rank: int, fits: Callable[[PeerId], bool]) -> list[PeerId]:
    """Return the next and the previous fitting member of this circle; one if they are the same."""
    n = len(order)
    next_place = next((rank + step for step in range(1, n) if fits(order[(rank + step) % n])), None)
    if next_place is None:
        return []
    previous_place = next(rank - step for step in range(1, n) if fits(order[rank - step]))
    next_peer, previous_peer = order[next_place % n], order[previous_place]
    return [next_peer] if next_peer == previous_peer else [next_peer, previous_peer]


def cell_mates(order: list[PeerId], rank: int, size: int, round: int) -> list[PeerId]:
    """Return the sorted members that share all coordinates with this rank but the round's one, itself included."""
    n = len(order)
    shape = sides(n, size)
    if not shape:
        return order
    dimension = round % len(shape)
    stride = prod(shape[:dimension])
    # Cells are filled from the first on: lowering a coordinate leads to a filled one, so that every member has a path
    # to cell 0. (Evenly spread empty cells would split 67 members in groups of 2.) Each cycle through the dimensions
    # moves the incomplete last layer to other members.
    shift = round // len(shape) * int(GOLDEN * n) if n < prod(shape) else 0
    cell = (rank + shift) % n
    first = cell - cell // stride % shape[dimension] * stride
    cells = range(first, min(first + shape[dimension] * stride, n), stride)
    return [order[mate] for mate in sorted((cell - shift) % n for cell in cells)]


@lru_cache(64)
def sides(n: int, size: int) -> tuple[int, ...]:
    """Return the sides of the smallest grid that holds n, each at most ``size``; none for n = 1.

    The grid has as few dimensions as possible, and sides as equal as possible.
    """
    dimensions = 0
    while size**dimensions < n:
        dimensions += 1
    shape = [1] * dimensions
    turn = 0
    while prod(shape) < n:
        shape[turn % dimensions] += 1
        turn += 1
    return tuple(shape)
