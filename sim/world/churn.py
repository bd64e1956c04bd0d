"""Churn: the times at which each peer is up."""

import csv
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from gossip.errors import ConfigError, DataError
from sim.scenario.conditions import ChurnSpec
from sim.scenario.distribution import Distribution
from sim.seeds import generator

SHORTEST_S = 1e-3  # Weibull times of a small shape come arbitrarily near 0, and time must pass.
COLUMNS = ("peer", "from_s", "until_s")


class Uptime(NamedTuple):
    """A session of a peer, from one time to another (math.inf: to the end).

    ``farewell``: it announces its end. ``silent``: its machine loses power, so that connections are not even reset.
    """

    from_s: float
    until_s: float
    farewell: bool
    silent: bool = False


class Churn:
    """No churn: each peer has one session. Subclasses override :meth:`spans`."""

    def __init__(self, seed: int, farewell: float = 0.0, silent: float = 0.0) -> None:
        self.seed, self.farewell, self.silent = seed, farewell, silent

    def sessions(self, name: str, index: int) -> Iterator[Uptime]:
        """Yield the sessions of one peer in order of time, drawn from the seed and its name alone.

        A trace identifies the peer by ``index``. The sequence may be endless: take as many as the run needs.
        """
        farewell_draws, power_draws = generator(self.seed, name, "farewell"), generator(self.seed, name, "power")
        for from_s, until_s in self.spans(name, index):
            has_end = math.isfinite(until_s)
            farewell = has_end and farewell_draws.random() < self.farewell
            silent = has_end and not farewell and power_draws.random() < self.silent
            yield Uptime(from_s, until_s, farewell, silent)

    def spans(self, name: str, index: int) -> Iterator[tuple[float, float]]:
        """Yield the beginning and end of each session, in seconds."""
        yield 0.0, math.inf


class Renewal(Churn):
    """Times up and down drawn alternately: an alternating renewal process (D. R. Cox, Renewal Theory, 1962).

    Without times down each peer has one session and never returns.
    """

    def __init__(self, spec: ChurnSpec, seed: int) -> None:
        super().__init__(seed, spec.farewell, spec.silent)
        assert spec.up is not None
        self.up, self.down, self.start = spec.up, spec.down, spec.start

    def spans(self, name: str, index: int) -> Iterator[tuple[float, float]]:
        rng = generator(self.seed, name, "churn")
        now = 0.0
        if self.start == "steady":
            # Start at a random time of a process without beginning. The chance to be up is the mean time up over the
            # sum of both means. A random time lies in a long duration more often than in a short one, so the rest of
            # the current duration has a distribution of its own (Distribution.residual).
            assert self.down is not None
            if rng.random() * (self.up.mean + self.down.mean) < self.up.mean:
                end_s = max(self.up.residual(rng), SHORTEST_S)
                yield now, end_s
                now = end_s + draw_s(self.down, rng)
            else:
                now = max(self.down.residual(rng), SHORTEST_S)
        while True:
            end_s = now + draw_s(self.up, rng)
            yield now, end_s
            if self.down is None:
                return
            now = end_s + draw_s(self.down, rng)


def draw_s(times: Distribution, rng: np.random.Generator) -> float:
    """Draw a duration in seconds, which is never so short that time stands still."""
    return max(float(times.draw(rng, 1)[0]), SHORTEST_S)


@dataclass(frozen=True, slots=True)
class TraceRow:
    """A session in a trace, with its line in the file."""

    peer: int
    from_s: float
    until_s: float
    line: int


class Trace(Churn):
    """Sessions read from a file."""

    def __init__(self, path: str, seed: int, peers: int, spec: ChurnSpec) -> None:
        super().__init__(seed, spec.farewell, spec.silent)
        self.by_peer: dict[int, list[TraceRow]] = {}
        for row in read_trace(path, peers):
            self.by_peer.setdefault(row.peer, []).append(row)
        for rows in self.by_peer.values():
            rows.sort(key=lambda row: row.from_s)
            for earlier, later in itertools.pairwise(rows):
                if later.from_s <= earlier.until_s:
                    raise ConfigError(
                        f"{path}, line {later.line}: peer {later.peer} comes at {later.from_s:g} s and is still up "
                        f"from line {earlier.line}: its sessions must lie apart."
                    )

    def spans(self, name: str, index: int) -> Iterator[tuple[float, float]]:
        for row in self.by_peer.get(index, ()):
            yield row.from_s, row.until_s


def read_trace(path: str, peers: int) -> Iterator[TraceRow]:
    """Yield the sessions of a CSV file in its order. Raises DataError or ConfigError, which name the line."""
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except OSError as error:
        wanted = f"name a CSV file of {', '.join(COLUMNS)}"
        raise DataError(f"churn.trace: cannot read {path} ({error.strerror}): {wanted}.") from error
    except UnicodeDecodeError as error:
        raise DataError(f"churn.trace: {path} is not text: it must be CSV of {', '.join(COLUMNS)}.") from error
    table = csv.DictReader(text.splitlines())
    wanted = "a peer's number and two times in seconds (nothing or inf for until_s: to the end)"
    try:
        records = [(table.line_num, record) for record in table]
    except csv.Error as error:
        raise ConfigError(f"{path}, line {table.reader.line_num}: {error}; each line must give {wanted}.") from error
    if missing := [name for name in COLUMNS if name not in (table.fieldnames or ())]:
        raise ConfigError(f"{path} has no column {missing[0]}: its first line must be {','.join(COLUMNS)}.")
    for line, record in records:
        try:
            if None in record:
                raise ValueError("cells beyond the columns")
            until_s = math.inf if record["until_s"] == "" else float(record["until_s"])
            row = TraceRow(int(record["peer"]), float(record["from_s"]), until_s, line)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{path}, line {line}: each line must give {wanted}.") from error
        if not 0 <= row.peer < peers:
            raise ConfigError(f"{path}, line {line}: there is no peer {row.peer}: peers = {peers}, numbered from 0.")
        if not 0 <= row.from_s < row.until_s:
            raise ConfigError(f"{path}, line {line}: until_s must be above from_s, and from_s at least 0.")
        yield row


def churn_of(spec: ChurnSpec | None, seed: int, peers: int) -> Churn:
    """Return the churn that a scenario describes; with None all peers stay.

    A trace is read and checked here. Raises :class:`~gossip.errors.DataError` if it is missing, and
    :class:`~gossip.errors.ConfigError` if its contents are impossible.
    """
    if spec is None:
        return Churn(seed)
    if spec.trace is not None:
        return Trace(spec.trace, seed, peers, spec)
    return Renewal(spec, seed)
