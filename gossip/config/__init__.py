"""The configuration: one frozen Config with the schedule, the method and all limits, its keys, and their reference."""

from gossip.config.config import FILE_KEYS, PRESETS, Config, as_published, read_toml
from gossip.config.setting import LARGEST, shown

__all__ = ["FILE_KEYS", "LARGEST", "PRESETS", "Config", "as_published", "read_toml", "shown"]
