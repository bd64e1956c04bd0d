"""The configuration: one frozen Config with the schedule, the method and all limits, its keys, and their reference."""

from __future__ import annotations

from gossip.config.config import PRESETS, Config, as_published, read_toml
from gossip.config.setting import LARGEST, shown

__all__ = ["LARGEST", "PRESETS", "Config", "as_published", "read_toml", "shown"]
