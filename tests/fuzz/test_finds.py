"""The fuzzer's finds, each as its smallest input."""

import contextlib

import msgpack
import pytest

from gossip.config import Config
from gossip.errors import ConfigError, IdentityError, ProtocolError
from gossip.ids import parse_address
from gossip.selection.graphs import Graph
from gossip.wire.frames import PREFIX_BYTES, decode, encode
from node.identity.keys import Identity, read_secret
from sim.scenario.scenario import Scenario

DEEP = "part = " + "[" * 3_000
LONG = "mix_every_s = " + "9" * 5_000
HEX = "mix_every_s = 0x" + "f" * 5_000  # Python parses this number, but refuses to print it in decimal.


@pytest.mark.parametrize(
    "text", [DEEP, LONG, HEX, "swarm = 0x" + "f" * 5_000, "preset = 0x" + "f" * 5_000, "method = 0x" + "f" * 5_000]
)
def test_a_setting_beyond_all_bounds_is_refused_in_a_sentence(tmp_path, text):
    (tmp_path / "a.toml").write_text(text)
    with pytest.raises(ConfigError) as error:
        Config.from_toml(tmp_path / "a.toml")
    assert len(str(error.value)) < 400 + len(str(tmp_path))


@pytest.mark.parametrize("name", ["mix_every_s", "join_timeout_s", "group_size", "incoming_exchanges", "stall_s"])
def test_a_whole_number_that_no_float_holds_is_no_setting(name):
    with pytest.raises(ConfigError, match=name):
        Config(**{name: 10**400})


@pytest.mark.parametrize("text", ["[gossip]\n" + DEEP, "duration_s = 0x" + "f" * 5_000, "seed = " + "9" * 400, LONG])
def test_a_scenario_beyond_all_bounds_is_refused_in_a_sentence(tmp_path, text):
    (tmp_path / "a.toml").write_text(text)
    with pytest.raises(ConfigError):
        Scenario.from_toml(tmp_path / "a.toml")


@pytest.mark.parametrize("text", ["9" * 5_000, "[" * 3_000, "0x" + "f" * 5_000])
def test_a_change_on_the_command_line_beyond_all_bounds_is_refused(tmp_path, text):
    (tmp_path / "a.toml").write_text("peers = 8\nrounds = 4\n")
    with pytest.raises(ConfigError):
        Scenario.from_toml(tmp_path / "a.toml", changes={"peers": text})


def test_a_figure_of_a_status_is_no_larger_than_what_can_be_said_again():
    for figure, right in ((2**63 - 1, True), (2**63, False), (-(2**63), False)):
        header = msgpack.packb({"t": "status", "metrics": [figure], "members": [], "more": False})
        with contextlib.nullcontext() if right else pytest.raises(ProtocolError):
            message = decode(header)
            assert decode(encode(message)[PREFIX_BYTES:]) == message


def test_a_port_of_thousands_of_digits_is_no_port():
    with pytest.raises(ConfigError):
        parse_address("a:" + "9" * 5_000)


def test_a_path_with_a_null_byte_names_no_file(tmp_path):
    with pytest.raises(IdentityError):
        read_secret(tmp_path / "a\0b")
    with pytest.raises(ConfigError):
        Graph.from_file(tmp_path / "a\0b")


def test_a_key_of_another_kind_that_openssl_reads_and_cannot_use_is_no_key_of_a_node(tmp_path):
    """It once raised InternalError of the cryptography library, whose authors ask for a report."""
    path = tmp_path / "identity.pem"
    body = "MC4CAQAwBQYDK2VvBCIEIGFhYWFhYWFhYWFhYWFhYWFhYWFhYWFhYWFhYWFhYWFh"
    path.write_text(f"-----BEGIN PRIVATE KEY-----\n{body}\n-----END PRIVATE KEY-----\n")
    path.chmod(0o600)
    with pytest.raises(IdentityError):
        Identity.load(tmp_path)
