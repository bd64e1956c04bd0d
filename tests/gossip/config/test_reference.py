"""The reference of the settings: whole, up to date, and what `gossip config` says."""

from pathlib import Path

import pytest

from gossip.config import Config
from gossip.config.reference import all_keys, explained, page
from gossip.config.setting import settings_of

PAGE = Path(__file__).parents[3] / "docs" / "config.md"


def test_the_page_is_what_the_keys_say():
    assert PAGE.read_text(encoding="utf-8") == page(), "make reference writes it anew"


@pytest.mark.parametrize("name", settings_of(Config))
def test_every_key_says_what_a_person_asks(name):
    field, setting = settings_of(Config)[name]
    for text in (setting.meaning, setting.advice):
        assert len(text) > 10
        assert text[0].isupper() or text[0] == "`", "a sentence, whatever table it stands in"
        assert text.endswith(".")
    number = field.type.split(" | ")[0] in ("int", "float")
    assert number == bool(setting.unit), "numbers have a unit, texts have none"
    assert name.endswith(("_s", "_mb_s")) == (setting.unit in ("s", "MB/s"))
    assert ("None" in field.type) == bool(setting.left_out), "what leaving it out means"


def test_one_key_is_explained_with_what_the_presets_make_of_it():
    assert explained("mix_every_steps") == (
        "mix_every_steps = left out\n"
        "  meaning         The mean number of local steps between two finished exchanges, whichever side requested "
        "them. "
        'Each interval is drawn within a quarter of it. "auto" lets each node mix as often as its link and CPU allow, '
        "at no more bytes than an fp32 exchange every 8 steps.\n"
        "  unit            local steps\n"
        '  range           a positive whole number, or "auto"; left out: "auto" with the default outer step; else 8, '
        "or none with mix_every_s\n"
        "  when to change  Raise it to send fewer bytes. Set it where all nodes must mix equally often."
    )
    assert explained("stall_s").endswith("\n  preset wan      10.0\n  preset datacentre 2.0")


def test_the_command_lists_explains_and_refuses(called):
    assert called("config").stdout.strip() == all_keys()
    assert called("config", "codec").stdout.strip() == explained("codec")
    assert called("config", "codek").stderr == "gossip: 'codek' is not a setting (did you mean 'codec'?).\n"
