"""When to mix, how, and every limit: one frozen Config, its keys, and what a person asks about them."""

from __future__ import annotations

from gossip.config.config import PRESETS, Config, as_published, read_toml
from gossip.config.setting import LARGEST, shown

__all__ = ["LARGEST", "PRESETS", "Config", "as_published", "read_toml", "shown"]
