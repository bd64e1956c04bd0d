"""A scenario of the simulator: peers, their task and their surroundings. It is frozen, and its seed repeats a run."""

from __future__ import annotations

import difflib
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from gossip.config import PRESETS, Config, as_published, read_toml
from gossip.config.methods import METHODS
from gossip.config.selections import SELECTIONS
from gossip.errors import LONGEST_WORD, ConfigError
from sim.scenario import tables, worlds
from sim.scenario.adversaries import COLLUDING, AttackersSpec
from sim.scenario.conditions import ChurnSpec, MembershipSpec, NetworkSpec
from sim.scenario.distribution import Distribution
from sim.scenario.fidelity import check_exchanges
from sim.scenario.fleet import PeerSpec, check_fleet
from sim.scenario.tables import KeyFault, UnknownKey, require
from sim.scenario.task import LARGEST, Task

SHORTEST_STEP_S = 1e-6  # No model trains faster than this, and virtual time must advance.
MOST_ROWS = 400  # The most rows of a history.
# The likeness of names, 0 to 1: of a name and its beginning, the bonus of a key's own table, and the least to suggest.
PREFIX_LIKENESS, OWN_TABLE, LEAST_LIKENESS = 0.9, 0.15, 0.65


@dataclass(frozen=True, slots=True, kw_only=True)
class Stragglers(tables.KeyTable):
    """Slow peers: each is slow with probability ``share``, and its steps then take ``slowdown`` times as long."""

    share: float
    slowdown: float

    def __post_init__(self) -> None:
        tables.settle(self)
        require(0 <= self.share <= 1, "share", self.share, "a share from 0 to 1")
        require(1 <= self.slowdown < math.inf, "slowdown", self.slowdown, "a finite number, 1 or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class Compute(tables.KeyTable):
    """The duration of a training step, drawn for each step or once for each peer (``per``)."""

    step_s: Distribution = field(default_factory=lambda: Distribution.constant(0.1))
    per: Literal["step", "peer"] = "step"
    stragglers: Stragglers | None = None

    def __post_init__(self) -> None:
        tables.settle(self)
        require(self.step_s.mean > 0, "step_s", str(self.step_s), "longer than 0 s: time would stand still")
        is_long_enough = self.step_s.mean >= SHORTEST_STEP_S
        require(is_long_enough, "step_s", str(self.step_s), f"{SHORTEST_STEP_S:g} s or longer on average")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportSpec(tables.KeyTable):
    """The measurements of a run.

    Attributes:
        every_s: Seconds between two rows; None: 40 rows over the run.
        evaluate_peers: Peers, evenly chosen, that are evaluated for each row; more take longer and change no
            conclusion.

    Raises:
        ConfigError: A value cannot work.
    """

    every_s: float | None = None
    evaluate_peers: int = 256

    def __post_init__(self) -> None:
        tables.settle(self)
        is_valid = self.every_s is None or 0 < self.every_s < math.inf
        require(is_valid, "every_s", self.every_s, "a positive number of seconds")
        require(self.evaluate_peers >= 1, "evaluate_peers", self.evaluate_peers, "1 or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario(tables.KeyTable):
    """A whole experiment. Construct with keywords, or from TOML with :meth:`from_toml`.

    Attributes:
        name: Its name in reports.
        seed: The seed of all randomness.
        peers: The number of peers.
        duration_s: The end in virtual seconds; exactly one of this and ``rounds`` is given.
        rounds: The end, as mixes per peer on average.
        fidelity: "whole" plays every message of every peer, "exchange" each exchange as one event. "auto" is
            "exchange" if that can represent the scenario, else "whole".
        task: The task to learn.
        gossip: The settings of each peer.
        compute: Step times.
        network: The links.
        fleet: Peers that differ.
        churn: When peers come and go; None: all stay.
        attackers: Peers that attack.
        membership: How peers know each other.
        report: How often the swarm is measured.

    Raises:
        ConfigError: A value cannot work; one sentence names the key and an alternative.
    """

    name: str = "scenario"
    seed: int = 1
    peers: int = 100
    duration_s: float | None = None
    rounds: float | None = None
    fidelity: Literal["auto", "whole", "exchange"] = "auto"
    task: Task = field(default_factory=Task)
    gossip: Config = field(default_factory=Config)
    compute: Compute = Compute()
    network: NetworkSpec = field(default_factory=NetworkSpec)
    fleet: tuple[PeerSpec, ...] = ()
    churn: ChurnSpec | None = None
    attackers: AttackersSpec | None = None
    membership: MembershipSpec = field(default_factory=MembershipSpec)
    report: ReportSpec = ReportSpec()

    def __post_init__(self) -> None:
        tables.settle(self)
        require(bool(self.name) and self.name.isprintable(), "name", self.name, "a name of printable characters")
        require(self.seed >= 0, "seed", self.seed, "a whole number from 0 up")
        require(self.peers >= 1, "peers", self.peers, "1 or more")
        require(self.peers <= LARGEST, "peers", self.peers, f"{LARGEST:,} at most")
        if (self.duration_s is None) == (self.rounds is None):
            mistake = "neither is given" if self.rounds is None else "both are given"
            raise KeyFault("duration_s", f"or rounds must say when the run ends, and {mistake}.")
        for key, value in (("duration_s", self.duration_s), ("rounds", self.rounds)):
            require(value is None or 0 < value < math.inf, key, value, "a positive number")
        never_ends = self.rounds is not None and self.peers == 1
        require(
            not never_ends, "peers", self.peers,
            "2 or more, or duration_s must stand for rounds: one peer has no partner",
        )  # fmt: skip
        for place, cut in enumerate(self.network.partitions):
            fits = cut.groups <= self.peers
            require(
                fits, f"network.partitions[{place}].groups", cut.groups, f"{self.peers} at most, the number of peers"
            )
            ends_s = math.inf if self.duration_s is None else self.duration_s
            require(
                cut.at_s < ends_s, f"network.partitions[{place}].at_s", cut.at_s, f"below {ends_s:g}, the run's end"
            )
        self.check_nat()
        check_fleet(self.fleet, self.peers, self.network)
        self.check_attackers()
        lacks_newcomers = SELECTIONS[self.gossip.selection].file and self.churn is not None
        require(
            not lacks_newcomers, "gossip.selection", "graph",
            "another where nodes come and go, as 'uniform': a static graph has no place for newcomers",
        )  # fmt: skip
        self.check_report()
        if self.fidelity == "exchange":
            check_exchanges(self)

    @property
    def trains(self) -> bool:
        """Return True if models are trained, and not only averaged."""
        return self.task.trains

    @property
    def config(self) -> Config:
        """Return the settings of each peer, with the open ones decided as on a node."""
        return self.gossip.for_training() if self.trains else self.gossip

    def check_attackers(self) -> None:
        spec = self.attackers
        if spec is not None and spec.share > 0:
            wanted = f"a share that comes to 1 at least of {self.peers} peers, and leaves 1"
            count = spec.count(self.peers)
            require(1 <= count < self.peers, "attackers.share", spec.share, wanted)
            lacks_partner = self.gossip.mixing == "group" and spec.kind in COLLUDING
            wanted = "a kind that needs no single partner beside groups: sign-flip, scaled, random, nan"
            require(not lacks_partner, "attackers.kind", spec.kind, wanted)
            has_no_scale = spec.kind == "alie" and spec.scale is None and 2 * count >= self.peers
            require(not has_no_scale, "attackers.scale", spec.scale, "given for alie where half of the peers attack")

    def check_nat(self) -> None:
        nat, spec = self.network.nat, self.membership
        if nat is not None:
            wanted = f"a share that comes with mapped to 1 at least of {self.peers} peers: the others join there"
            require(nat.dialable(self.peers) >= 1, "network.nat.public", nat.public, wanted)
            wanted = "'protocol' or left out beside network.nat: the sampler has no links"
            require(spec.mode != "ideal", "membership.mode", spec.mode, wanted)
            wanted = "'seed' beside network.nat: peers behind routers join through one that can be dialled"
            require(spec.start == "seed", "membership.start", spec.start, wanted)

    def check_report(self) -> None:
        """Check that rows come at even intervals of a run of known length, at most MOST_ROWS of them."""
        every_s = self.report.every_s
        if every_s is None:
            return
        require(self.duration_s is not None, "report.every_s", every_s, "left out where rounds say when the run ends")
        assert self.duration_s is not None
        least_s = self.duration_s / MOST_ROWS
        wanted = f"{least_s:g} or more, for {MOST_ROWS} rows at most"
        require(every_s >= least_s * (1 - 1e-9), "report.every_s", every_s, wanted)  # The limit itself may be rounded.

    # -- tables --------------------------------------------------------------------------------------------------
    @classmethod
    def from_toml(
        cls, path: str | Path, *, seed: int | None = None, changes: Mapping[str, str] | None = None
    ) -> Scenario:
        """Read a scenario from a TOML file.

        The paths of a trace and a graph are relative to the file's folder.

        Args:
            path: The file.
            seed: A seed in place of the file's.
            changes: Texts by dotted key, as from ``--set gossip.mix_every_steps=4``, each parsed as TOML if possible.

        Raises:
            ConfigError: The file is missing, or a value in it cannot work.
        """
        path = Path(path)
        table = with_files_in(path.parent, read_toml(path, "scenario"))
        values: dict[str, Any] = {key: value_of(text) for key, text in (changes or {}).items()}
        if seed is not None:
            values["seed"] = seed
        ends = {key: values.pop(key) for key in ENDS if key in values}
        if ends:  # These replace the end that the file gives, if it gives one.
            table = {key: value for key, value in table.items() if key not in ENDS} | ends
        try:
            scenario = cls.from_mapping(table)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from error
        return scenario._changed(values, table) if values else scenario

    @classmethod
    def from_mapping(cls, table: Mapping[str, Any]) -> Scenario:
        """Create a scenario from nested mappings, or from the dataclasses themselves.

        Args:
            table: The keys of a scenario's file.

        Raises:
            ConfigError: A value cannot work.
        """
        try:
            return tables.record(cls, table)
        except UnknownKey as fault:
            raise suggest_table(fault) from None

    def to_mapping(self) -> dict[str, Any]:
        """Return nested mappings that :meth:`from_mapping` turns into an equal scenario.

        Presets are named where that leaves fewer keys.
        """
        table: dict[str, Any] = tables.plain(self)
        return table

    def to_toml(self) -> str:
        """Return the text of a file, to lie anywhere, that :meth:`from_toml` turns into an equal scenario."""
        return tables.toml_text(with_files_in(Path(), self.to_mapping()))

    def replace(self, **changes: Any) -> Scenario:
        """Return the scenario with other values under dotted keys.

        For example ``replace(**{"gossip.mix_every_steps": 4, "peers": 50})``. ``duration_s`` replaces ``rounds``, and
        the other way round. Another optimizer's name replaces the whole optimizer, and another preset or method every
        key that the presets or methods of its table fill in.

        Args:
            **changes: Values by dotted key; None removes a key.

        Raises:
            ConfigError: A value cannot work.
        """
        return self._changed(changes)

    def _changed(self, changes: Mapping[str, Any], file: Mapping[str, Any] | None = None) -> Scenario:
        """Return the scenario with changes, among which a preset or method stands beside the keys of its file."""
        # No preset is named: a change within a table that it fills in, as a rate, must leave the table's other keys.
        filled = {name: spec for name in ("network", "churn") if (spec := getattr(self, name)) is not None}
        table = self.to_mapping() | {name: tables.fields_of(spec) for name, spec in filled.items()}
        if sum(changes.get(key) is not None for key in ENDS) == 1:
            table = {key: value for key, value in table.items() if key not in ENDS}
        if changes.get("task.optimizer.name", self.task.optimizer.name) != self.task.optimizer.name:
            # Settings that suit one optimizer make another diverge.
            table["task"] = dict(table["task"]) | {"optimizer": {}}
        for key in changes:
            section, given = key.partition(".")[0], keys_given_by(key)
            if given and file is None:
                table[section] = {name: value for name, value in table.get(section, {}).items() if name not in given}
            elif given and file is not None:
                own = file.get(section, {})  # A name alone is a preset's.
                table[section] = own if isinstance(own, Mapping) else {} if own == tables.NONE else {"preset": own}
        return Scenario.from_mapping(tables.changed(table, changes))


def keys_given_by(key: str) -> set[str]:
    """Return the keys that the presets or methods under a dotted key fill in; none if it is another key."""
    if key in ("network.preset", "churn.preset"):
        kind = key.partition(".")[0]
        return {name for preset in worlds.names(kind) for name in worlds.world(kind, preset, key)}
    if key == "gossip.method":
        return {name for method in METHODS for name in as_published(method)}
    presets = [tables.fields_of(getattr(Config, preset)()) for preset in PRESETS if key == "gossip.preset"]
    return {name for table in presets for name in table if table[name] != presets[0].get(name)}


def with_files_in(folder: Path, table: Mapping[str, Any]) -> dict[str, Any]:
    """Return a scenario's table with absolute paths of the files that it names, which are relative to the folder."""
    paths = {}
    for section, key in (("churn", "trace"), ("gossip", "graph")):
        inner = table.get(section)
        name = inner.get(key) if isinstance(inner, Mapping) else None
        if isinstance(name, str) and name not in ("", tables.NONE):
            paths[f"{section}.{key}"] = str((folder / name).absolute())
    return tables.changed(table, paths)


ENDS = ("duration_s", "rounds")  # The keys that end a run, of which a scenario has one.


def value_of(text: str) -> Any:
    """Parse the command line's ``key=value``: as TOML if possible, else as text."""
    try:
        table = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):  # Not TOML, a number of thousands of digits, or a thousand brackets.
        return text
    value = table["value"]
    return value if len(table) == 1 and isinstance(value, str | int | float | bool | list | dict) else text


def suggest_table(fault: UnknownKey) -> ConfigError:
    """Suggest the keys of any table whose names are most like an unknown one."""
    above, _, last = fault.key.rpartition(".")
    last = last[:LONGEST_WORD]
    if "[" in above:  # It suggests a key of an item of a list, which exists nowhere else.
        return fault

    likeness: dict[str, float] = {}  # By key; one of the same table by its name alone.
    for path in tables.paths(Scenario):
        table, _, name = path.rpartition(".")
        ratio = difflib.SequenceMatcher(None, last, name).ratio()
        if (name.startswith(last) or last.startswith(name)) and min(len(last), len(name)) > 2:
            ratio = max(ratio, PREFIX_LIKENESS)  # As step and step_s, or latency_ms and latency.
        if ratio >= LEAST_LIKENESS:
            likeness[name if table == above else path] = ratio + OWN_TABLE * (table == above)
    near = " or ".join(repr(key) for key in likeness if likeness[key] == max(likeness.values()))
    return UnknownKey(fault.key, f"is not a key here (did you mean {near}?).") if near else fault
