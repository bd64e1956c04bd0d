"""One frozen Config, the same for a node and for a simulated peer; its keys are in gossip.config.keys."""

from __future__ import annotations

import dataclasses
import difflib
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gossip.arithmetic.correction import check_correction
from gossip.arithmetic.mixing import check_outer
from gossip.arithmetic.subsets import check_part
from gossip.codecs import AUTO, get_codec
from gossip.config.derived import PLAIN, Derived
from gossip.config.filters import FILTERS
from gossip.config.methods import METHODS, method
from gossip.config.removed import KEYS, check_removed
from gossip.config.rules import check_together
from gossip.config.setting import check, settings_of, shown
from gossip.errors import ConfigError

__all__ = ["PRESETS", "Config", "as_published", "read_toml", "unknown"]

PRESETS = ("lan", "wan", "datacentre")
NOLOCO = (0.5, 0.7)  # momentum and rate of the outer step
KAPPA = 0.2  # of the correction


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(Derived):
    """When to mix, how, and every limit. Construct with keywords, from a preset, or with :meth:`from_toml`.

    Raises :class:`~gossip.errors.ConfigError` for a value that cannot work, naming what would.
    """

    def __post_init__(self) -> None:
        for name, (field, setting) in settings_of(self).items():
            check(name, getattr(self, name), str(field.type), setting)
        if self.mix_every_steps is None and self.mix_every_s is None:
            raise ConfigError("Nothing says when to mix: set mix_every_steps (as 8) or mix_every_s (as 30.0).")
        if self.probe_timeout_min_s > self.probe_timeout_max_s:
            raise ConfigError("probe_timeout_min_s is above probe_timeout_max_s: exchange the two.")
        if self.seed_backoff_s > self.seed_backoff_max_s:
            raise ConfigError("seed_backoff_s is above seed_backoff_max_s: exchange the two.")
        if not self.swarm or len(self.swarm) > 64 or not self.swarm.isprintable():
            raise ConfigError("swarm must be a name of 1 to 64 printable characters.")
        check_outer(*self.outer, self.averaged)
        check_correction(self.kappa)
        check_removed("codec", self.codec)
        check_removed("part", self.part)
        if self.codec != AUTO:
            get_codec(self.codec)
        check_part(self.part)
        check_together(self)

    def for_training(self, quasi_global: bool) -> Config:
        """What is left open, decided for a loop that trains: NoLoCo's outer step and the correction where a node mixes
        its whole vector with one other; not beside ``quasi_global`` momentum, as a second momentum over the mixes takes
        from the first. A Node always asks, whatever optimizes; a simulator does not for vectors that nobody trains."""
        given = self.outer_momentum is not None or self.outer_rate is not None
        if given or quasi_global or not self.paired or self.partners != 1 or self.part != "all":
            return self
        kappa = KAPPA if self.correction is None and self.mix_every_steps is not None else self.correction
        return dataclasses.replace(self, outer_momentum=NOLOCO[0], outer_rate=NOLOCO[1], correction=kappa)

    def unfiltered(self) -> Config:
        """The same without a filter, and without what is for one alone."""
        own = [key for rule in FILTERS.values() for key in rule.keys]
        plain: dict[str, Any] = {key: field.default for key, (field, _) in settings_of(self).items() if key in own}
        return dataclasses.replace(self, filter="none", **plain)

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
        """A method as its paper has it, by its name in :data:`gossip.config.methods.METHODS` (``gossip methods`` lists
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
        known = settings_of(cls)
        for name in changes:
            if name not in known:
                raise unknown(name)
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


def unknown(name: str) -> ConfigError:
    """For a key that is none, or none any more."""
    if name in KEYS:
        return ConfigError(f"{name} was removed: {KEYS[name]}.")
    near = difflib.get_close_matches(name, settings_of(Config), n=1)
    return ConfigError(f"{shown(name)} is not a setting" + (f"; did you mean {near[0]!r}?" if near else "."))


def as_published(name: object) -> dict[str, Any]:
    """The settings of a method: no paper's figures are of a filter or a momentum that the paper does not have."""
    if not isinstance(name, str):  # a file may hold anything, also what Python refuses to write down
        raise ConfigError(f"No method is called {shown(name)}: there are {', '.join(METHODS)}.")
    plain = {"filter": "none", "outer_momentum": PLAIN[0], "outer_rate": PLAIN[1], "correction": 0.0}
    return plain | method(name).changes
