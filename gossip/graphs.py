"""Graphs of who mixes with whom: read from a file, or written down, with their mixing matrices and spectral gaps."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from gossip.errors import ConfigError
from gossip.ids import Address, PeerId, parse_address

__all__ = [
    "Graph",
    "complete",
    "dumbbell",
    "expected_pair_mean",
    "metropolis",
    "one_peer_exponential",
    "ring",
    "spectral_gap",
    "static_exponential",
    "torus",
    "uniform_weights",
]

Matrix = NDArray[np.float64]  # (n, n): entry [i, j] is of what i takes from j
Kind = Literal["rank", "address", "id"]
Name = int | Address | str  # of a node: its rank, where it listens, or the first digits of its id

ID_DIGITS = 8  # what people are shown of an id; a decimal number of as many digits is no rank, but an id's beginning
MAX_NODES = 10_000  # as many as there are members at most
SAID = {"rank": "a rank", "address": "an address", "id": "the beginning of an id"}


@dataclass(frozen=True, slots=True)
class Graph:
    """A connected undirected graph over members. ``links[i]`` are the numbers of node i's neighbours, sorted, and
    ``names[i]`` is who plays it: a rank among the sorted ids (and then it is i), an address, or an id's first digits.
    """

    kind: Kind
    names: tuple[Name, ...]
    links: tuple[tuple[int, ...], ...]

    @classmethod
    def from_file(cls, path: str | Path) -> Graph:
        """One link a line, as ``0 1``; ``#`` begins a comment. A member is named by its rank (0, 1 ...), by the address
        that it announces (``10.0.0.5:7700``) or by the first 8 or more hexadecimal digits of its id: all in one way.

        Raises :class:`~gossip.errors.ConfigError` in one sentence for whatever is no connected graph.
        """
        try:
            text = Path(path).read_text(encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"Cannot read the graph {path}: {error.strerror}.") from error
        except UnicodeDecodeError as error:
            raise ConfigError(f"The graph {path} is not a text: write one link a line, as in 0 1.") from error
        except ValueError as error:
            raise ConfigError("The graph's path holds a null byte: name a file.") from error
        return cls.from_text(text, str(path))

    @classmethod
    def from_text(cls, text: str, where: str = "the graph") -> Graph:
        """As :meth:`from_file`; ``where`` is how errors call it."""
        pairs: list[tuple[Name, Name]] = []
        kind: Kind | None = None
        for number, line in enumerate(text.splitlines(), 1):
            tokens = line.partition("#")[0].split()
            if not tokens:
                continue
            at = f"{where}, line {number}"
            if len(tokens) != 2:
                raise ConfigError(f"{at}: {' '.join(tokens)!r} is no link: name two members, as in 0 1.")
            ends: list[Name] = []
            for token in tokens:
                this, name = read_name(token, at)
                if kind is not None and this != kind:
                    raise ConfigError(f"{at}: {token!r} is {SAID[this]} after {SAID[kind]}: name all in one way.")
                kind = this
                ends.append(name)
            if ends[0] == ends[1]:
                raise ConfigError(f"{at}: {tokens[0]!r} is linked with itself: name two members.")
            pairs.append((ends[0], ends[1]))
        if kind is None:
            raise ConfigError(f"{where} has no links: write one a line, as in 0 1.")
        names = ordered_names({end for pair in pairs for end in pair}, kind, where)
        number_of = {name: number for number, name in enumerate(names)}
        return cls._connected(kind, names, [(number_of[a], number_of[b]) for a, b in pairs], where)

    @classmethod
    def from_adjacency(cls, adjacency: Matrix) -> Graph:
        """The graph of ranks with a link wherever this symmetric (n, n) matrix is not 0 off its diagonal."""
        if not np.array_equal(adjacency != 0, (adjacency != 0).T):
            raise ConfigError("The adjacency is not symmetric: whoever mixes with another is mixed with by it.")
        pairs = [(int(a), int(b)) for a, b in np.argwhere(np.triu(adjacency, 1))]
        return cls._connected("rank", tuple(range(len(adjacency))), pairs, "The adjacency")

    @classmethod
    def _connected(cls, kind: Kind, names: tuple[Name, ...], pairs: Iterable[tuple[int, int]], where: str) -> Graph:
        links: list[set[int]] = [set() for _ in names]
        for a, b in pairs:
            links[a].add(b)
            links[b].add(a)
        reached = reach(links, 0)
        if len(reached) < len(names):
            outside = next(node for node in range(len(names)) if node not in reached)
            one, other = (some(names, part) for part in (reached, reach(links, outside)))
            raise ConfigError(
                f"{where} is not connected, and its parts would never agree: no path leads from {one} to {other}; add "
                f"a link between them."
            )
        return cls(kind, names, tuple(tuple(sorted(those)) for those in links))

    def adjacency(self) -> Matrix:
        """(n, n), 1 where two nodes are linked."""
        matrix = np.zeros((len(self.links),) * 2)
        for node, others in enumerate(self.links):
            matrix[node, list(others)] = 1
        return matrix

    @property
    def max_degree(self) -> int:
        return max(map(len, self.links))

    def players(self, members: Sequence[tuple[PeerId, Address | None]]) -> dict[PeerId, int]:
        """Which node each of these members, sorted by id, plays; those that play none are left out."""
        if self.kind == "rank":
            return {peer: rank for rank, (peer, _) in enumerate(members[: len(self.names)])}
        number_of = {name: number for number, name in enumerate(self.names)}
        if self.kind == "address":
            return {peer: number_of[address] for peer, address in members if address in number_of}
        lengths = sorted({len(str(name)) for name in self.names})
        played = {}
        for peer, _ in members:
            digits = peer.hex()
            for length in lengths:
                node = number_of.get(digits[:length])
                if node is not None:
                    played[peer] = node
        return played


def read_name(token: str, at: str) -> tuple[Kind, Name]:
    if ":" in token:
        try:
            return "address", parse_address(token)
        except ConfigError as error:
            raise ConfigError(f"{at}: {error}") from error
    if token.isascii() and token.isdigit() and len(token) < ID_DIGITS:
        return "rank", int(token)
    digits = token.lower()
    if ID_DIGITS <= len(digits) <= 32 and not set(digits) - set("0123456789abcdef"):
        return "id", digits
    raise ConfigError(
        f"{at}: {token!r} names no member: write a rank (0, 1 ...), an address (host:port) or the first {ID_DIGITS} or "
        f"more hexadecimal digits of an id."
    )


def ordered_names(names: set[Name], kind: Kind, where: str) -> tuple[Name, ...]:
    if len(names) > MAX_NODES:
        raise ConfigError(f"{where} names {len(names)} members: {MAX_NODES} are the most that a swarm has.")
    if kind == "rank":
        last = max(name for name in names if isinstance(name, int))
        missing = next((rank for rank in range(last) if rank not in names), None)
        if missing is not None:
            raise ConfigError(
                f"{where} names {last} and not {missing}: ranks count the members from 0, so name every one from 0 up."
            )
    ordered = tuple(sorted(names))
    if kind == "id":
        for shorter, longer in pairwise(ordered):  # sorted: what begins alike lies side by side
            if str(longer).startswith(str(shorter)):
                raise ConfigError(
                    f"{where}: {shorter!r} and {longer!r} may be one member: write as many digits of both."
                )
    return ordered


def reach(links: Sequence[Iterable[int]], start: int) -> set[int]:
    """The nodes to which a path leads."""
    reached, edge = {start}, [start]
    while edge:
        for other in links[edge.pop()]:
            if other not in reached:
                reached.add(other)
                edge.append(other)
    return reached


def some(names: Sequence[Name], part: set[int]) -> str:
    """Up to three of them, for a sentence."""
    said = ", ".join(str(names[node]) for node in sorted(part)[:3])
    return said if len(part) <= 3 else f"{said} and {len(part) - 3} more"


# -- written down ------------------------------------------------------------------------------------------------------
def circulant(n: int, hops: Iterable[int]) -> Matrix:
    """1 from i to i + hop modulo n."""
    adjacency = np.zeros((n, n))
    here = np.arange(n)
    for hop in hops:
        adjacency[here, (here + hop) % n] = 1
    np.fill_diagonal(adjacency, 0)
    return adjacency


def complete(n: int) -> Matrix:
    """Everybody with everybody: (n, n)."""
    return np.ones((n, n)) - np.eye(n)


def ring(n: int) -> Matrix:
    """Each with the one before it and the one behind it: (n, n)."""
    return circulant(n, (1, -1))


def torus(q: int, q2: int) -> Matrix:
    """``q`` columns by ``q2`` rows, numbered row by row, closed at both ends: (n, n) with n = q q2."""
    place = np.arange(q * q2).reshape(q2, q)
    adjacency = np.zeros((q * q2, q * q2))
    for axis in (0, 1):
        for shift in (1, -1):
            adjacency[place, np.roll(place, shift, axis)] = 1
    np.fill_diagonal(adjacency, 0)
    return adjacency


def static_exponential(n: int) -> Matrix:
    """To those 1, 2, 4 ... further on: (n, n), directed (Assran et al. 2019; Ying et al. 2021)."""
    return circulant(n, (1 << power for power in range((n - 1).bit_length())))


def one_peer_exponential(n: int, round: int) -> Matrix:
    """To the one ``2^(round mod ceil(log2 n))`` further on: (n, n), directed. With n a power of two, log2 n rounds of
    :func:`uniform_weights` give everybody the exact mean (Ying et al. 2021, lemma 1)."""
    powers = (n - 1).bit_length()
    return circulant(n, (1 << round % powers,) if powers else ())


def dumbbell(n: int) -> Matrix:
    """Two cliques, the first of ceil(n / 2), with one link between the last of the first and the first of the second
    (He, Karimireddy and Jaggi 2022): (n, n)."""
    half = (n + 1) // 2
    adjacency = np.zeros((n, n))
    adjacency[:half, :half] = complete(half)
    adjacency[half:, half:] = complete(n - half)
    if n > half:
        adjacency[half - 1, half] = adjacency[half, half - 1] = 1
    return adjacency


# -- mixing matrices ---------------------------------------------------------------------------------------------------
def metropolis(adjacency: Matrix) -> Matrix:
    """Weight 1 / (1 + max of the two degrees) on each link, the rest on oneself: symmetric, and so doubly stochastic
    whatever the degrees (Xiao, Boyd and Lall 2006). ``adjacency`` is symmetric, (n, n)."""
    linked = adjacency != 0
    degrees = linked.sum(1)
    weights = np.where(linked, 1.0 / (1.0 + np.maximum.outer(degrees, degrees)), 0.0)
    np.fill_diagonal(weights, 1.0 - weights.sum(1))
    return np.asarray(weights, np.float64)


def uniform_weights(adjacency: Matrix) -> Matrix:
    """The mean of oneself and those one takes from: row-stochastic, and doubly where all have one degree in and out."""
    taken = (adjacency != 0) + np.eye(len(adjacency))
    return np.asarray(taken / taken.sum(1, keepdims=True), np.float64)


def expected_pair_mean(choice: Matrix) -> Matrix:
    """The expected mixing matrix of ONE exchange: a node drawn uniformly takes the mean with the one that its row of
    ``choice`` (n, n; chances, 0 on the diagonal) draws. ``I - (D - P - P^T) / (2 n)``, D the row and column sums (Boyd,
    Ghosh, Prabhakar and Shah 2006, "Randomized gossip algorithms").

    A pair mean is a projection, so ``E V' = x^T W x`` and V shrinks by at least this matrix's spectral gap in
    expectation. n exchanges, as many as a round, are n gaps: uniform choice has 1 / (n - 1) of one exchange.
    """
    n = len(choice)
    both = choice + choice.T
    return np.asarray(np.eye(n) - (np.diag(both.sum(1)) - both) / (2 * n), np.float64)


def spectral_gap(matrix: Matrix) -> float:
    """1 - the second largest |eigenvalue| of a mixing matrix (n, n): 1 is the mean at once, 0 is never.

    Ring 2/3 (1 - cos(2 pi / n)) and torus 2/5 (1 - cos(2 pi / q)) with :func:`metropolis`, static exponential
    2 / (1 + log2 n) with :func:`uniform_weights` and n a power of two.
    """
    symmetric = np.array_equal(matrix, matrix.T)
    values = np.linalg.eigvalsh(matrix) if symmetric else np.linalg.eigvals(matrix)
    if len(values) < 2:
        return 1.0
    gap = 1.0 - float(np.sort(np.abs(values))[-2])
    return 0.0 if math.isclose(gap, 0.0, abs_tol=1e-12) else gap
