"""One frozen Config, the same for a node and for a simulated peer; its keys are in gossip.config.keys."""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gossip.arithmetic.correction import check_correction
from gossip.arithmetic.outer_step import check_outer
from gossip.arithmetic.subsets import check_part
from gossip.codecs import AUTO, get_codec
from gossip.config.derived import PLAIN, Derived
from gossip.config.internal import Internal
from gossip.config.methods import METHODS, method
from gossip.config.rules import check_together, interval_conflict
from gossip.config.setting import check, settings_of, shown
from gossip.errors import ConfigError, did_you_mean

PRESETS = ("lan", "wan", "datacentre")
FILE_KEYS = {"preset": "Config.lan, Config.wan or Config.datacentre", "method": "Config.published"}
KAPPA = 0.2  # The default correction's kappa.
MAX_SWARM_NAME = 64  # Characters of a swarm's name.


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(Derived):
    """The schedule, the method and all limits. Construct it with keywords, from a preset, or with :meth:`from_toml`.

    Raises:
        ConfigError: A value cannot work; the message names what would.
    """

    def __new__(cls, **changes: Any) -> Config:
        """Refuse unknown keys, and name the nearest known one; Python would only call them unexpected."""
        for name in changes:
            if name not in cls.__dataclass_fields__:
                raise unknown_key(name)
        return object.__new__(cls)

    def __post_init__(self) -> None:
        for name, (field, setting) in settings_of(self).items():
            check(name, getattr(self, name), str(field.type), setting)
        if not self.swarm or len(self.swarm) > MAX_SWARM_NAME or not self.swarm.isprintable():
            raise ConfigError(f"swarm must be a name of 1 to {MAX_SWARM_NAME} printable characters.")
        check_outer(*self.outer, self.averaged)
        check_correction(self.kappa)
        if self.codec_name != AUTO:
            get_codec(self.codec_name)
        check_part(self.part)
        check_together(self)

    def for_training(self) -> Config:
        """Return this Config with open choices, keys that are None, decided for a training loop.

        A node that mixes its whole vector with one partner gets the outer step and the correction, and chooses its
        interval and codecs itself. A Node always calls this; a simulator does not for vectors without training.

        Returns:
            A new Config, or this one if nothing is open.
        """
        has_numbers = self.outer_momentum not in (None, AUTO) or self.outer_rate is not None
        if has_numbers or not self.paired or self.partners != 1 or self.part != "all":
            return self
        kappa = KAPPA if self.correction is None and self.interval_steps is not None else self.correction
        interval = self.mix_every_steps
        if interval is None and self.mix_every_s is None and not any(interval_conflict(self)):
            interval = AUTO
        return dataclasses.replace(self, outer_momentum=AUTO, correction=kappa, mix_every_steps=interval)

    def unfiltered(self) -> Config:
        """Return this Config without a filter."""
        return dataclasses.replace(self, filter="none", filter_limit=None)

    # -- presets -----------------------------------------------------------------------------------------------------
    @classmethod
    def lan(cls, **changes: Any) -> Config:
        """Return the defaults with changes: machines of one network, 1 Gbit/s and under a millisecond."""
        return cls(**changes)

    @classmethod
    def wan(cls, **changes: Any) -> Config:
        """Return the settings for scattered machines, 100 Mbit/s and 50 ms, lossy: more patience with links."""
        return cls(**({"stall_s": 10.0, "join_timeout_s": 60.0} | changes))

    @classmethod
    def datacentre(cls, **changes: Any) -> Config:
        """Return the settings for 10 Gbit/s and more: shorter timeouts, longer chunks."""
        return cls(**({"slowest_rate_mb_s": 10.0, "stall_s": 2.0} | changes))

    @classmethod
    def published(cls, name: str, **changes: Any) -> Config:
        """Return a method as its paper publishes it.

        Args:
            name: Its name in :data:`gossip.config.methods.METHODS`, which ``gossip methods`` lists.
            **changes: Further settings.
        """
        return cls(**(as_published(name) | changes))

    @classmethod
    def from_toml(cls, path: str | Path) -> Config:
        """Read a TOML file with keys at the top or under ``[gossip]``.

        ``preset = "wan"`` names the preset to start from, and ``method = "noloco"`` a published method.

        Raises:
            ConfigError: The file cannot be read, or a value cannot work.
        """
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
        """Create a Config from a mapping of the same keys, as in a scenario's ``[gossip]`` section.

        ``internal`` is accepted only as an :class:`Internal`, which no file can hold.
        """
        changes = dict(table)
        if (name := changes.pop("method", None)) is not None:
            changes = as_published(name) | changes
        preset = changes.pop("preset", "lan")
        if preset not in PRESETS:
            raise ConfigError(f"preset = {shown(preset)} is unknown: take one of {', '.join(PRESETS)}.")
        known = settings_of(cls)
        for name in changes:
            if name not in known and not isinstance(changes[name], Internal):
                raise unknown_key(name)
        config: Config = getattr(cls, preset)(**changes)
        return config


def read_toml(path: Path, what: str) -> dict[str, Any]:
    """Return the table of a TOML file; raise ConfigError if it cannot be read. ``what`` names the file in errors."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"Cannot read the {what} {path}: {error.strerror}.") from error
    except RecursionError as error:
        raise ConfigError(f"{path} nests tables too deeply: a {what} needs only a few levels.") from error
    # A TOMLDecodeError, invalid UTF-8, or a number of thousands of digits.
    except ValueError as error:
        raise ConfigError(f"{path} is not TOML: {error}.") from error


def unknown_key(name: str) -> ConfigError:
    """Return the error for an unknown key."""
    if name in FILE_KEYS:
        return ConfigError(f"{name} is a key of files: in Python call {FILE_KEYS[name]}.")
    return ConfigError(f"{shown(name)} is not a setting{did_you_mean(name, (*settings_of(Config), *FILE_KEYS))}.")


def as_published(name: object) -> dict[str, Any]:
    """Return a method's settings, without a filter, a momentum or mixed moments that its paper does not have."""
    if not isinstance(name, str):  # A file may hold any value, even one that repr() refuses.
        raise ConfigError(f"No method is called {shown(name)}: there are {', '.join(METHODS)}.")
    plain = {
        "filter": "none", "outer_momentum": PLAIN[0], "outer_rate": PLAIN[1], "correction": 0.0, "mix_state": "off",
    }  # fmt: skip
    return plain | method(name).changes
