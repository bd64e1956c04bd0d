"""One frozen Config, the same for a node and for a simulated peer; the formula stands beside the knob."""

from __future__ import annotations

import dataclasses
import difflib
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gossip.codecs import AUTO, get_codec
from gossip.errors import ConfigError
from gossip.mixing import check_outer
from gossip.parts import check_part
from gossip.published import METHODS, method
from gossip.removed import check_removed
from gossip.together import check_together

__all__ = ["Config"]

PLAIN, NOLOCO = (0.0, 1.0), (0.5, 0.7)  # of the outer step: momentum and rate


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """When to mix, how, and every limit. Construct with keywords, from a preset, or with :meth:`from_toml`.

    Raises :class:`~gossip.errors.ConfigError` for a value that cannot work, naming what would.
    """

    swarm: str = "default"  # swarms of different names refuse each other

    # -- with whom (gossip.selection) --------------------------------------------------------------------------------
    selection: str = "uniform"  # uniform, ring, torus, graph, exponential, grid, nearest
    graph: str = ""  # for "graph": a file of edges
    shortcuts: float = 0.1  # for "nearest": share of mixes with anybody, however far
    group_size: int = 4  # members of one group: for mixing = "group" and for "grid"; 0: everybody, 16 at most
    partners: int = 1  # of one mix, 0: all neighbours at once, each pair weighted by Metropolis

    # -- when to mix (gossip.schedule) -------------------------------------------------------------------------------
    mix_every_steps: int | None = 8  # local steps for each finished exchange, whoever asked for it (jittered by 25 %)
    mix_every_s: float | None = None  # or this many seconds, whichever comes first; None: steps alone
    max_version_gap: float | None = None  # intervals that a loop trains on while a mix is under way; 0: lockstep pairs
    consensus_target: float | None = None  # keep nodes so many steps apart: mix 4x as often, or as rarely

    # -- how to mix (gossip.mixing states the equations) -------------------------------------------------------------
    mixing: str = "pair"  # pair, group (means, of all that take part), push-sum, row-stochastic (both one way)
    outer_momentum: float | None = None  # alpha: m <- alpha m + beta (mean - phi). Neither: see for_training()
    outer_rate: float | None = None  # beta: phi <- phi + m; stable for 0 < beta < 2 (1 - alpha^2). 0 and 1: plain means
    staleness_exponent: float = 0.0  # a: weight = 1/2 (1 + gap)^-a, gap in whole mixing rounds; 0: all pairs alike
    codec: str = "fp32"  # what crosses the wire: fp32, bf16, fp16, int8, int4, moniqua4, or auto
    part: str = "all"  # which elements: all, "mask 0.005" (a random share), "top 0.01", "fragments 8" (one at a time)
    average_optimizer: bool = False  # average the optimizer's state (momentum, second moments) with the weights

    # -- what to accept (gossip.filters) -----------------------------------------------------------------------------
    norm_bound: float = 10.0  # refuse |theirs - ours| > bound * (|ours| + sqrt(elements))
    filter: str = "auto"  # clip (cut long differences off), balance (refuse them), trimmed (mean, of a group), none
    clip_radius: float | None = None  # the longest difference taken whole; None: by the usual distance
    clip_factor: float = 1.5  # times the usual distance: the lower quartile of the last 16, and half of own steps
    trim: int = 1  # for "trimmed": values of each element left out at either end
    balance_gamma: float = 0.3  # refuse |theirs - ours| > gamma exp(-kappa t/T) |ours|, t in mixing rounds
    balance_kappa: float = 1.0
    balance_rounds: float = 1000.0  # T

    # -- exchanges ---------------------------------------------------------------------------------------------------
    incoming_exchanges: int = 2  # at once, beside one outgoing; each costs two vectors of memory. 1 with outer momentum
    reply_timeout_s: float = 5.0  # an offer without an answer; a partner answers at its next step boundary or BUSY
    boundary_patience_s: float = 2.0  # BUSY when the training loop has reached no step boundary for this long
    slowest_rate_mb_s: float = 0.5  # MB/s; a transfer may take median + 6 MAD, never less than bytes over this rate
    stall_s: float = 3.0  # a transfer in which nothing moved for this long has failed
    bench_s: float = 30.0  # a partner that failed is not sampled for this long, doubling up to 16 times this
    doubt_s: float = 30.0  # how long a COMMIT without an answer is asked after before the exchange is dropped

    # -- membership: SWIM with Lifeguard -----------------------------------------------------------------------------
    probe_period_s: float = 2.0
    probe_timeout_min_s: float = 0.5  # timeout = clamp(3 RTT, min, max) * (1 + local health)
    probe_timeout_max_s: float = 1.0
    indirect_probes: int = 3
    suspicion_periods: float = 4.0  # suspicion lasts this * max(1, log10 N) probe periods, less with more accusers
    gossip_period_s: float = 0.5
    gossip_fanout: int = 3
    push_pull_period_s: float = 30.0
    heal_period_s: float = 30.0  # one DEAD record or seed is dialled this often, which heals partitions
    dead_kept_s: float = 86_400.0  # DEAD means "do not sample", never "forget"
    max_members: int = 10_000  # about 250 B each; the largest full table measured
    progress_period_s: float = 0.25  # a member signs its own step, sample and loss counts anew at most this often
    fastest_member: float = 16.0  # times the median pace: what a member states beyond it counts later (gossip.credit)

    # -- joining -----------------------------------------------------------------------------------------------------
    join_timeout_s: float = 20.0  # with nobody reachable for this long a node starts alone (and merges later)
    merge: str = "auto"  # with a larger run: auto (its weights are judged first), ask (node.merge), never
    donors: int = 4  # members that a newcomer fetches its state from at once
    seed_backoff_s: float = 1.0  # first retry of a seed that is down; doubles
    seed_backoff_max_s: float = 60.0

    # -- links -------------------------------------------------------------------------------------------------------
    max_links: int = 256  # kept connections
    idle_s: float = 60.0  # a link without traffic for this long is closed
    hello_timeout_s: float = 5.0  # from the first byte to a finished Hello
    chunk_elements: int = 131_072  # 512 KiB of fp32: in cache, and 0.2 s at 20 Mbit/s before a probe gets through

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            check_type(field.name, getattr(self, field.name), str(field.type))
        if self.mix_every_steps is None and self.mix_every_s is None:
            raise ConfigError("Nothing says when to mix: set mix_every_steps (as 8) or mix_every_s (as 30.0).")
        for name in POSITIVE:
            value = getattr(self, name)
            if value is not None and not (value > 0 and math.isfinite(value)):
                raise ConfigError(f"{name} = {value!r} cannot work: it must be a positive number.")
        if not 1 <= self.incoming_exchanges <= 8:
            raise ConfigError("incoming_exchanges must lie between 1 and 8: each costs two vectors of memory.")
        if not 0 <= self.staleness_exponent <= 4:
            raise ConfigError("staleness_exponent must lie between 0 (no weighting) and 4.")
        if not 1024 <= self.chunk_elements <= 1 << 20:
            raise ConfigError("chunk_elements must lie between 1024 and 1048576 (4 KiB to 4 MiB of fp32).")
        if self.probe_timeout_min_s > self.probe_timeout_max_s:
            raise ConfigError("probe_timeout_min_s is above probe_timeout_max_s: exchange the two.")
        if self.seed_backoff_s > self.seed_backoff_max_s:
            raise ConfigError("seed_backoff_s is above seed_backoff_max_s: exchange the two.")
        if not self.swarm or len(self.swarm) > 64 or not self.swarm.isprintable():
            raise ConfigError("swarm must be a name of 1 to 64 printable characters.")
        check_outer(*self.outer, self.averaged)
        check_removed("codec", self.codec)
        if self.codec != AUTO:
            get_codec(self.codec)
        check_part(self.part)
        self.check_choices()
        check_together(self)

    def check_choices(self) -> None:
        for name, known in CHOICES.items():
            value = getattr(self, name)
            if value not in known:
                near = difflib.get_close_matches(value, known, n=1)
                meant = f" (did you mean {near[0]!r}?)" if near else ""
                raise ConfigError(f"{name} = {value!r} is unknown: take one of {', '.join(known)}{meant}.")
        if not 0 <= self.partners <= MOST_PARTNERS:
            raise ConfigError(f"partners must lie between 0 (all neighbours at once) and {MOST_PARTNERS}.")
        if self.group_size != 0 and not 2 <= self.group_size <= MOST_PARTNERS:
            raise ConfigError(f"group_size must lie between 2 and {MOST_PARTNERS}, or be 0 for everybody.")
        if not 1 <= self.trim <= MOST_PARTNERS // 2:
            raise ConfigError(f"trim must lie between 1 and {MOST_PARTNERS // 2}.")
        if not 0 <= self.shortcuts <= 1:
            raise ConfigError("shortcuts is a share, from 0 (the nearest alone) to 1 (anybody).")
        if self.max_version_gap is not None and not 0 <= self.max_version_gap < math.inf:
            raise ConfigError("max_version_gap must be 0 (lockstep pairs) or more; leave it out for no bound.")

    @property
    def outer(self) -> tuple[float, float]:
        """Momentum and rate of the outer step in use; left open it is the plain mean."""
        momentum, rate = self.outer_momentum, self.outer_rate
        return PLAIN[0] if momentum is None else momentum, PLAIN[1] if rate is None else rate

    @property
    def plain(self) -> bool:
        """Whether a mix is the plain mean, without outer momentum."""
        return self.outer == PLAIN

    def for_training(self, quasi_global: bool) -> Config:
        """What is left open, decided for a loop with an optimizer: NoLoCo's outer step where a node mixes its whole
        vector with one other; not beside ``quasi_global`` momentum, as a second momentum over the mixes takes from the
        first. Drivers do not ask for arrays that nobody trains, whose mean is wanted."""
        given = self.outer_momentum is not None or self.outer_rate is not None
        if given or quasi_global or self.mixing != "pair" or self.partners != 1 or self.part != "all":
            return self
        return dataclasses.replace(self, outer_momentum=NOLOCO[0], outer_rate=NOLOCO[1])

    @property
    def averaged(self) -> int:
        """How many vectors a mix averages, as the stability of the outer step asks."""
        return (self.group_size or MOST_PARTNERS) if self.mixing == "group" else 2

    @property
    def incoming_limit(self) -> int:
        """Incoming exchanges at once: with outer momentum one exchange at a time in all, since two concurrent outer
        steps would count the same local progress twice."""
        return self.incoming_exchanges if self.plain else 1

    @property
    def watches_movement(self) -> bool:
        """Whether a driver measures how far local steps alone move the model (gossip.progress)."""
        return self.consensus_target is not None or (self.filtering == "clip" and self.clip_radius is None)

    @property
    def pushes(self) -> bool:
        """Whether vectors travel one way."""
        return self.mixing in ("push-sum", "row-stochastic")

    @property
    def conserves(self) -> bool:
        """Whether what one gives away is taken from oneself."""
        return self.mixing == "push-sum"

    @property
    def filtering(self) -> str:
        """The filter in use: what "auto" comes to is to clip, but for push-sum, whose mass nobody may cut off, and for
        groups, which have a trimmed mean."""
        if self.filter != "auto":
            return self.filter
        return "clip" if self.mixing in ("pair", "row-stochastic") else "none"

    # -- presets -----------------------------------------------------------------------------------------------------
    @classmethod
    def lan(cls, **changes: Any) -> Config:
        """Machines of one network: 1 Gbit/s, under a millisecond. The defaults."""
        return cls(**changes)

    @classmethod
    def wan(cls, **changes: Any) -> Config:
        """Scattered machines: 100 Mbit/s and 50 ms, lossy. Half the bytes, mixed four times as rarely."""
        preset: dict[str, Any] = {
            "mix_every_steps": 32,
            "codec": "bf16",
            "reply_timeout_s": 10.0,
            "slowest_rate_mb_s": 0.1,
            "stall_s": 10.0,
            "hello_timeout_s": 10.0,
            "join_timeout_s": 60.0,
            "chunk_elements": 32_768,
        }
        return cls(**(preset | changes))

    @classmethod
    def datacentre(cls, **changes: Any) -> Config:
        """10 Gbit/s and more: mix twice as often, expect answers sooner, longer chunks."""
        preset: dict[str, Any] = {
            "mix_every_steps": 4,
            "slowest_rate_mb_s": 10.0,
            "stall_s": 2.0,
            "chunk_elements": 262_144,
        }
        return cls(**(preset | changes))

    @classmethod
    def published(cls, name: str, **changes: Any) -> Config:
        """A method as its paper has it, by its name in :data:`gossip.published.METHODS` (``gossip methods`` lists
        them), with further changes."""
        return cls(**(as_published(name) | changes))

    @classmethod
    def from_toml(cls, path: str | Path) -> Config:
        """A TOML file of these keys, at the top or under ``[gossip]``. ``preset = "wan"`` names where to start from and
        ``method = "noloco"`` a published method."""
        table = read_toml(Path(path), "config")
        section = table.get("gossip", table)
        if not isinstance(section, dict):
            raise ConfigError(f"{path}: gossip must be a table, written [gossip].")
        try:
            return cls.from_mapping(section)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from error

    @classmethod
    def from_mapping(cls, table: Mapping[str, Any]) -> Config:
        """The same keys from a mapping, as a scenario's ``[gossip]`` section gives them."""
        changes = dict(table)
        if (name := changes.pop("method", None)) is not None:
            changes = as_published(name) | changes
        preset = changes.pop("preset", "lan")
        if preset not in PRESETS:
            raise ConfigError(f"preset = {shown(preset)} is unknown: take one of {', '.join(PRESETS)}.")
        known = {field.name for field in dataclasses.fields(cls)}
        for name in changes:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                raise ConfigError(f"{name!r} is not a setting" + (f"; did you mean {near[0]!r}?" if near else "."))
        config: Config = getattr(cls, preset)(**changes)
        return config


def read_toml(path: Path, what: str) -> dict[str, Any]:
    """The table of a file of ``what``; raises ConfigError for whatever is none."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"Cannot read the {what} {path}: {error.strerror}.") from error
    except RecursionError as error:
        raise ConfigError(f"{path} nests tables too deeply: none of a {what} lies deeper than a few.") from error
    except ValueError as error:  # a TOMLDecodeError, no UTF-8, or a number of thousands of digits
        raise ConfigError(f"{path} is not TOML: {error}.") from error


CHOICES = {
    "merge": ("auto", "ask", "never"),
    "selection": ("uniform", "ring", "torus", "graph", "exponential", "grid", "nearest"),
    "mixing": ("pair", "group", "push-sum", "row-stochastic"),
    "filter": ("auto", "none", "clip", "balance", "trimmed"),
}
MOST_PARTNERS = 16  # each costs a stream, and two vectors of memory where both stream


def as_published(name: object) -> dict[str, Any]:
    """The settings of a method: no paper's figures are of a filter or a momentum that the paper does not have."""
    if not isinstance(name, str):  # a file may hold anything, also what Python refuses to write down
        raise ConfigError(f"No method is called {shown(name)}: there are {', '.join(METHODS)}.")
    return {"filter": "none", "outer_momentum": PLAIN[0], "outer_rate": PLAIN[1]} | method(name).changes


LARGEST = 2**53  # of whole numbers: exact as a float too, which TOML's need not be
PRESETS = ("lan", "wan", "datacentre")
POSITIVE = (
    "mix_every_steps", "mix_every_s", "norm_bound", "reply_timeout_s", "boundary_patience_s", "slowest_rate_mb_s",
    "stall_s", "bench_s", "doubt_s", "probe_period_s", "probe_timeout_min_s", "probe_timeout_max_s", "indirect_probes",
    "suspicion_periods", "gossip_period_s", "gossip_fanout", "push_pull_period_s", "heal_period_s", "dead_kept_s",
    "max_members", "progress_period_s", "fastest_member", "join_timeout_s", "donors", "seed_backoff_s",
    "seed_backoff_max_s", "max_links", "idle_s", "hello_timeout_s", "consensus_target", "clip_radius", "clip_factor",
    "balance_gamma", "balance_kappa", "balance_rounds",
)  # fmt: skip


def check_type(name: str, value: object, annotation: str) -> None:
    """Refuse a value of another type than the annotation's (TOML gives 8 where 8.0 is meant; that is allowed)."""
    wanted = annotation.replace(" | None", "")
    if value is None and "None" in annotation:
        return
    right = {
        "int": isinstance(value, int) and not isinstance(value, bool),
        "float": isinstance(value, int | float) and not isinstance(value, bool),
        "str": isinstance(value, str),
        "bool": isinstance(value, bool),
    }[wanted]
    if right and isinstance(value, int) and abs(value) > LARGEST:
        raise ConfigError(f"{name} = {shown(value)} cannot work: it must be a number below 2**53.")
    if not right:
        kind = {"int": "a whole number", "float": "a number", "str": "a text", "bool": "true or false"}[wanted]
        raise ConfigError(f"{name} = {shown(value)} cannot work: it must be {kind}.")


def shown(value: object) -> str:
    """A value in a sentence: cut when long, and Python refuses to write whole numbers of thousands of digits."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):
        return "a value beyond all bounds"
    return text if len(text) <= 60 else text[:57] + "..."
