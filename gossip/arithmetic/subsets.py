"""The elements of the vector that one exchange mixes: all, a random share, or one fragment.

The code calls these elements the *part* of an exchange. Both sides take the same elements of their snapshots and mix
them like a whole vector: the part's mean is kept, and the other elements stay as they are. Positions are never sent:
they follow from a seed, or from the fragment's number.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from gossip.errors import ConfigError

Positions = NDArray[np.int64]

MAX_FRAGMENTS = 256  # With more, a node would take hundreds of mixes to mix every element once.
MAX_RUN_ELEMENTS = 4_096  # Consecutive elements of a fragment: 16 KiB, so that extraction is a copy and no search.
MIN_SHARE = 1e-6  # Of a billion elements a thousand, a few kilobytes: less costs as much as the messages.
SEED_COUNT = 2**32
PATTERN = re.compile(
    r"all|mask ([0-9.]{1,20}(?:e-?[0-9]{1,2})?)(?: (0|[1-9][0-9]{0,9}))?|fragment ([0-9]{1,3})/([0-9]{1,3})"
)


@dataclass(frozen=True, slots=True)
class Subset:
    """The elements of one exchange. ``str(part)`` is the wire form, which :meth:`parse` reads.

    - ``all``
    - ``mask SHARE SEED``: a random share of the elements (SPARTA; Baioumy and Cheema 2025). The vector is cut into
      equal ranges (strata), and one element is drawn from each. So the size is exact, as it would not be with
      independent draws. The seed is below 2^32. The session's number serves if there is none, but it changes with each
      partner that is asked, and the snapshot of these elements is taken before.
    - ``fragment I/N``: every N-th run of up to 4,096 consecutive elements, from the I-th on (the strided fragments of
      Streaming DiLoCo; Douillard et al. 2025).
    """

    kind: Literal["all", "mask", "fragment"] = "all"
    share: float = 1.0  # Of the vector's elements.
    index: int = 0  # Number of the fragment, from 0 on.
    count: int = 1  # Number of fragments.
    seed: int | None = None  # Seed of a mask; None for one that the session's number seeds.

    def __str__(self) -> str:
        match self.kind:
            case "all":
                return "all"
            case "fragment":
                return f"fragment {self.index}/{self.count}"
        return f"mask {self.share:.6g}" + ("" if self.seed is None else f" {self.seed}")

    def with_seed(self, number: int) -> Subset:
        """Return the part with this seed, modulo 2^32, if it is a mask."""
        return replace(self, seed=number % SEED_COUNT) if self.kind == "mask" else self

    @classmethod
    def parse(cls, text: str) -> Subset | None:
        """Parse the wire form of a part; return None for any text that :meth:`__str__` does not write."""
        part = parse_setting(text)
        return part if part is not None and str(part) == text else None

    def elements(self, size: int) -> int:
        """Return how many of the ``size`` elements of a vector belong to the part."""
        match self.kind:
            case "all":
                return size
            case "fragment":
                run_length = self.run_elements(size)
                whole_rounds, rest = divmod(size, run_length * self.count)  # A round is one run of each fragment.
                return whole_rounds * run_length + min(max(rest - self.index * run_length, 0), run_length)
        return max(1, math.ceil(self.share * size))

    def run_elements(self, size: int) -> int:
        """Return the length of a fragment's runs.

        Small models get shorter runs, so that every fragment has eight of them and none holds one layer alone.
        """
        return max(1, min(MAX_RUN_ELEMENTS, size // (8 * self.count)))

    def positions(self, size: int, session: int) -> Positions | None:
        """Return the part's positions in a vector of ``size``, ascending int64 (elements,); None for all.

        ``session`` seeds a mask that has no seed of its own.
        """
        match self.kind:
            case "all":
                return None
            case "fragment":
                run_length = self.run_elements(size)
                starts = np.arange(self.index * run_length, size, run_length * self.count)
                places = (starts[:, None] + np.arange(run_length)).reshape(-1)
                return places[places < size]
        elements = self.elements(size)
        # Stratum k is [k size / m, (k + 1) size / m), rounded down, with one position each. Some strata are one element
        # longer than others. So one more draw rotates all, and every position is equally likely.
        draws = np.random.Generator(np.random.PCG64(session if self.seed is None else self.seed)).random(elements + 1)
        width, longer_count = divmod(size, elements)
        strata = np.arange(elements + 1)
        edges = strata * width + strata * longer_count // elements
        places = edges[:-1] + (draws[:-1] * np.diff(edges)).astype(np.int64) + int(draws[-1] * size)
        inside = int(np.searchsorted(places, size))  # The rotation moves the places after these over the end.
        places[inside:] -= size
        return np.roll(places, elements - inside)


ALL = Subset()


class Fragments:
    """The fragments of a vector, ordered by their last mix: a node offers the one that was mixed longest ago."""

    def __init__(self, count: int) -> None:
        self.order = [Subset("fragment", 1 / count, index, count) for index in range(count)]

    def next_fragment(self) -> Subset:
        return self.order[0]

    def on_mixed(self, part: Subset) -> None:
        """Note that this part was mixed, by an offer of ours or of another member."""
        if part in self.order:
            self.order.remove(part)
            self.order.append(part)


def fragments_of(part: str, elements: int) -> Fragments | None:
    """Return the fragments of the setting "fragments N", none of them without elements; None for other parts."""
    kind, _, count = part.partition(" ")
    return Fragments(min(int(count), elements)) if kind == "fragments" else None


def lasting_parts(part: str, elements: int) -> list[Subset]:
    """Return the parts with the same elements in every mix: the fragments of "fragments N", or the whole vector."""
    fragments = fragments_of(part, elements)
    return [ALL] if fragments is None else fragments.order


def parse_setting(text: str) -> Subset | None:
    """Parse a part as a user may write it; return None if it is none. A share keeps six digits."""
    match = PATTERN.fullmatch(text)
    if match is None:
        return None
    share_text, seed_text, index_text, count_text = match.groups()
    if share_text is not None:
        try:
            share = float(f"{float(share_text):.6g}")
        except ValueError:  # For example two points.
            return None
        seed = None if seed_text is None else int(seed_text)
        is_valid = MIN_SHARE <= share <= 1 and (seed is None or seed < SEED_COUNT)
        return Subset("mask", share, seed=seed) if is_valid else None
    if count_text is None:
        return ALL
    index, count = int(index_text), int(count_text)
    return Subset("fragment", 1 / count, index, count) if index < count <= MAX_FRAGMENTS else None


def check_part(text: str) -> None:
    """Raise :class:`ConfigError` unless ``text`` fits the setting ``part``: "all", "mask SHARE" or "fragments N"."""
    if text in {f"fragments {count}" for count in range(2, MAX_FRAGMENTS + 1)}:
        return
    part = parse_setting(text)
    if part is not None and part.kind != "fragment" and part.seed is None:
        if str(part) == text:
            return
        raise ConfigError(f"part = {text!r} is not how a part is written: write {str(part)!r}.")
    raise ConfigError(
        f"part = {text!r} cannot work: write 'all', 'mask 0.005' (a random share of the elements) or 'fragments 8' "
        f"(of 2 to {MAX_FRAGMENTS}, one at a time)."
    )
