"""The reference of keys and methods, for a terminal and as docs/config.md (``python -m gossip.config.reference``)."""

from __future__ import annotations

import json
import sys
from dataclasses import Field
from typing import Any

from gossip.config.config import PRESETS, Config, as_published, unknown_key
from gossip.config.methods import METHODS, method
from gossip.config.setting import Setting, settings_of

WIDTH = 16  # Width of a method's name.

HEAD = """\
# Every setting

Written by `make reference` from `gossip/config/keys.py`; a test holds that it is up to date. In Python these are
arguments, `Config(mix_every_steps=4)`; for `gossip run --config FILE` lines of a TOML file, `mix_every_steps = 4`; in a
scenario the same under `[gossip]`. `preset = "wan"` (or `Config.wan()`) and `method = "noloco"` (or
`Config.published("noloco")`) name where to start from. `gossip config` lists the keys in the terminal, and `gossip
config KEY` explains one. Settings that exclude each other are refused with the reason; how to choose among methods:
[algorithms.md](algorithms.md).
"""


def range_text(field: Field[Any], setting: Setting) -> str:
    """Return the range of a key, including the meaning of leaving it out."""
    if field.type == "bool":
        return "true or false"
    text = setting.range
    if field.type.startswith("int") and setting.positive:
        text = "a positive whole number" + (f', or "{setting.word}"' if setting.word else "")
    return text + (f"; left out: {setting.left_out}" if setting.left_out else "")


def default(field: Field[Any]) -> str:
    """Return the default of a key as it is written in a file; "left out" for None."""
    return "left out" if field.default is None else json.dumps(field.default)


def all_keys() -> str:
    """Return every key with its default and meaning, under section headings."""
    lines: list[str] = []
    for name, (field, setting) in settings_of(Config).items():
        if setting.section:
            lines += ["", setting.section] if lines else [setting.section]
        lines.append(f"  {name:<20}  {default(field):<10}  {setting.meaning}".replace("`", ""))
    return "\n".join((*lines, "", "gossip config KEY explains one; docs/config.md has them all."))


def explained(name: str) -> str:
    """Explain one key. Raise ConfigError for an unknown one, naming a similar one."""
    if name not in settings_of(Config):
        raise unknown_key(name)
    field, setting = settings_of(Config)[name]
    texts = {"meaning": setting.meaning, "unit": setting.unit, "range": range_text(field, setting)}
    texts["when to change"] = setting.advice
    for preset in PRESETS:
        if (value := getattr(getattr(Config, preset)(), name)) != field.default:
            texts[f"preset {preset}"] = json.dumps(value)
    lines = [f"  {property_:<15} {text}" for property_, text in texts.items() if text]
    return "\n".join((f"{name} = {default(field)}", *lines)).replace("`", "")


def page() -> str:
    """Return the text of docs/config.md."""
    lines = [HEAD.rstrip()]
    for name, (field, setting) in settings_of(Config).items():
        if setting.section:
            lines += ["", f"## {setting.section}", "", "| key | meaning | range | default | when to change it |"]
            lines.append("|---|---|---|---|---|")
        unit = f" ({setting.unit})" if setting.unit else ""
        cells = (f"`{name}`{unit}", setting.meaning, range_text(field, setting), f"`{default(field)}`", setting.advice)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    lines += ["", "## Presets", "", "`lan` is the defaults.", "", "| key | " + " | ".join(PRESETS) + " |"]
    lines.append("|---" * (1 + len(PRESETS)) + "|")
    presets = [getattr(Config, preset)() for preset in PRESETS]
    for name in settings_of(Config):
        values = [getattr(preset, name) for preset in presets]
        if len(set(values)) > 1:
            lines.append(f"| `{name}` | " + " | ".join(json.dumps(value) for value in values) + " |")
    return "\n".join(lines) + "\n"


# -- gossip methods ----------------------------------------------------------------------------------------------------
def all_methods() -> str:
    """Return a line for every method, and how to use one."""
    lines = [f"{entry.name:<{WIDTH}}  {entry.title}: {entry.paper}" for entry in METHODS.values()]
    return "\n".join((
        *lines, "",
        "gossip methods NAME shows the settings of one. Use it in a file of settings or a scenario, as",
        "method = \"noloco\" under [gossip], or in Python: Config.published(\"noloco\").",
    ))  # fmt: skip


def one_method(name: str) -> str:
    """Return one method as a [gossip] section, with its needs and its differences from the paper."""
    chosen = method(name)
    lines = [f"# {chosen.title}: {chosen.paper}"]
    if chosen.needs:
        lines.append(f"# needs {chosen.needs}")
    if chosen.differs:
        lines.append(f"# differs: {chosen.differs}")
    return "\n".join(
        (*lines, "[gossip]", *(f"{key} = {json.dumps(value)}" for key, value in as_published(name).items()))
    )


if __name__ == "__main__":
    sys.stdout.write(page())
