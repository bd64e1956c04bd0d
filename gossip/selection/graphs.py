"""Static mixing graphs, read from a file."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Literal

from gossip.errors import ConfigError
from gossip.ids import Address, PeerId, parse_address

Kind = Literal["rank", "address", "id"]
Name = int | Address | str  # A node's rank, its listening address, or the first digits of its id.

# Fewest digits that name an id, as many as in all output. A decimal number of this length is such digits and no rank.
ID_DIGITS = 8
MAX_NODES = 10_000  # The most members of a swarm.
KIND_NAMES = {"rank": "a rank", "address": "an address", "id": "the beginning of an id"}


@dataclass(frozen=True, slots=True)
class Graph:
    """A connected undirected graph over members.

    ``links[i]`` are the numbers of node i's neighbours, sorted. ``names[i]`` tells which member is node i: a rank among
    the sorted ids (which is then i), an address, or an id's first digits.
    """

    kind: Kind
    names: tuple[Name, ...]
    links: tuple[tuple[int, ...], ...]

    @classmethod
    def from_file(cls, path: str | Path) -> Graph:
        """Read a graph with one link per line, as in ``0 1``; ``#`` begins a comment.

        All members are named in one way: by rank (0, 1 ...), by the address that they announce (``10.0.0.5:7700``), or
        by the first 8 or more hexadecimal digits of their id.

        Raises:
            ConfigError: The file does not hold a connected graph.
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
    def from_text(cls, text: str, source: str = "the graph") -> Graph:
        """Parse a graph as :meth:`from_file` does; errors call it ``source``."""
        pairs: list[tuple[Name, Name]] = []
        kind: Kind | None = None
        for number, line in enumerate(text.splitlines(), 1):
            tokens = line.partition("#")[0].split()
            if not tokens:
                continue
            place = f"{source}, line {number}"
            if len(tokens) != 2:
                raise ConfigError(f"{place}: {' '.join(tokens)!r} is no link: name two members, as in 0 1.")
            ends: list[Name] = []
            for token in tokens:
                token_kind, name = read_name(token, place)
                if kind is not None and token_kind != kind:
                    raise ConfigError(
                        f"{place}: {token!r} is {KIND_NAMES[token_kind]} after {KIND_NAMES[kind]}: name all in one way."
                    )
                kind = token_kind
                ends.append(name)
            if ends[0] == ends[1]:
                raise ConfigError(f"{place}: {tokens[0]!r} is linked with itself: name two members.")
            pairs.append((ends[0], ends[1]))
        if kind is None:
            raise ConfigError(f"{source} has no links: write one a line, as in 0 1.")
        names = ordered_names({end for pair in pairs for end in pair}, kind, source)
        number_of = {name: number for number, name in enumerate(names)}
        return cls._connected(kind, names, [(number_of[first], number_of[second]) for first, second in pairs], source)

    @classmethod
    def _connected(cls, kind: Kind, names: tuple[Name, ...], pairs: Iterable[tuple[int, int]], source: str) -> Graph:
        """Return the graph of these links, or raise ConfigError if they do not connect all nodes."""
        links: list[set[int]] = [set() for _ in names]
        for first, second in pairs:
            links[first].add(second)
            links[second].add(first)
        reached = reachable_nodes(links, 0)
        if len(reached) < len(names):
            outside = next(node for node in range(len(names)) if node not in reached)
            one_part, other_part = listed(names, reached), listed(names, reachable_nodes(links, outside))
            raise ConfigError(
                f"{source} is not connected, and its parts would never agree: no path leads from {one_part} to "
                f"{other_part}; add a link between them."
            )
        return cls(kind, names, tuple(tuple(sorted(neighbours)) for neighbours in links))

    @property
    def max_degree(self) -> int:
        return max(map(len, self.links))

    def node_numbers(self, members: Sequence[tuple[PeerId, Address | None]]) -> dict[PeerId, int]:
        """Return the node number of each of these members, sorted by id; members outside the graph are left out."""
        if self.kind == "rank":
            return {peer: rank for rank, (peer, _) in enumerate(members[: len(self.names)])}
        number_of = {name: number for number, name in enumerate(self.names)}
        if self.kind == "address":
            return {peer: number_of[address] for peer, address in members if address in number_of}
        lengths = sorted({len(str(name)) for name in self.names})
        numbers = {}
        for peer, _ in members:
            digits = peer.hex()
            for length in lengths:
                node = number_of.get(digits[:length])
                if node is not None:
                    numbers[peer] = node
        return numbers


def read_name(token: str, place: str) -> tuple[Kind, Name]:
    if ":" in token:
        try:
            return "address", parse_address(token)
        except ConfigError as error:
            raise ConfigError(f"{place}: {error}") from error
    if token.isascii() and token.isdigit() and len(token) < ID_DIGITS:
        return "rank", int(token)
    digits = token.lower()
    if ID_DIGITS <= len(digits) <= 32 and not set(digits) - set("0123456789abcdef"):
        return "id", digits
    raise ConfigError(
        f"{place}: {token!r} names no member: write a rank (0, 1 ...), an address (host:port) or the first {ID_DIGITS} "
        f"or more hexadecimal digits of an id."
    )


def ordered_names(names: set[Name], kind: Kind, source: str) -> tuple[Name, ...]:
    """Return the names in the order of the node numbers, or raise ConfigError if two could name the same member."""
    if len(names) > MAX_NODES:
        raise ConfigError(f"{source} names {len(names)} members: {MAX_NODES} are the most that a swarm has.")
    if kind == "rank":
        last_rank = max(name for name in names if isinstance(name, int))
        missing = next((rank for rank in range(last_rank) if rank not in names), None)
        if missing is not None:
            raise ConfigError(
                f"{source} names {last_rank} and not {missing}: ranks count the members from 0, so name every one from "
                f"0 up."
            )
    ordered = tuple(sorted(names))
    if kind == "id":
        for shorter, longer in pairwise(ordered):  # Sorted names with a common prefix are adjacent.
            if str(longer).startswith(str(shorter)):
                raise ConfigError(
                    f"{source}: {shorter!r} and {longer!r} may be one member: write as many digits of both."
                )
    return ordered


def reachable_nodes(links: Sequence[Iterable[int]], start: int) -> set[int]:
    """Return the nodes that paths from ``start`` reach."""
    reached, unvisited = {start}, [start]
    while unvisited:
        for other in links[unvisited.pop()]:
            if other not in reached:
                reached.add(other)
                unvisited.append(other)
    return reached


def listed(names: Sequence[Name], part: set[int]) -> str:
    """Return up to three of the names, for an error message."""
    names_text = ", ".join(str(names[node]) for node in sorted(part)[:3])
    return names_text if len(part) <= 3 else f"{names_text} and {len(part) - 3} more"
