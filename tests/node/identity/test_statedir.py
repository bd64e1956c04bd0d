"""A state directory is read back exactly as it was written, or not at all."""

import random
import shutil
import stat
import subprocess
import threading

import msgpack
import pytest
from torch import nn

from gossip.config import Config
from gossip.errors import IdentityError, LocalError
from gossip.ids import Address, MemberRecord, PeerId, parse_address
from gossip.wire.records import MAX_COUNT
from node import Node
from node.identity.keys import InviteToken, new_secret, parse_secret, read_secret
from node.identity.statedir import VERSION, Memory, StateDir, checksum
from node.options import NodeOptions
from node.settings import Settings, advertised_address, own_addresses
from node.transport.tcp import is_loopback
from tests.harness import warm

BOOK = [
    MemberRecord(PeerId(bytes([n]) * 16), b"k" * 32, n, address=Address("10.0.0.5", 7700 + n), extra=("new", n))
    for n in range(1, 5)
]


def written(path, *values):
    body = msgpack.packb(values)
    (path / "members.bin").write_bytes(body + checksum(body))


def test_no_bit_of_an_address_book_flips_unnoticed(tmp_path):
    """The owner would sign a count with a flipped bit, and all members would refuse it."""
    StateDir(tmp_path).write(7, 1000, BOOK)
    file = tmp_path / "members.bin"
    whole = file.read_bytes()
    rng = random.Random(3)
    for at in range(len(whole)):
        flipped = bytearray(whole)
        flipped[at] ^= 1 << rng.randrange(8)
        file.write_bytes(flipped)
        state = StateDir(tmp_path)
        assert state.read() == Memory()
        assert "set aside" in state.damage
    for length in range(len(whole)):
        file.write_bytes(whole[:length])
        assert StateDir(tmp_path).read() == Memory()


def test_values_that_a_newer_version_appended_are_kept(tmp_path):
    written(tmp_path, VERSION, 7, 1000, [], {"run": b"r"}, "new")
    state = StateDir(tmp_path)
    assert state.read() == Memory(7, 1000, [], ({"run": b"r"}, "new"))
    state.write(8, 2000, BOOK)
    assert StateDir(tmp_path).read() == Memory(8, 2000, BOOK, ({"run": b"r"}, "new"))


def test_a_format_that_cannot_be_read_is_set_aside_and_both_are_named(tmp_path):
    written(tmp_path, VERSION + 3, "other")
    state = StateDir(tmp_path)
    assert state.read() == Memory()
    assert f"format {VERSION + 3}" in state.damage
    assert f"reads {VERSION}" in state.damage
    assert (tmp_path / "members.newer").exists()
    assert not (tmp_path / "members.damaged").exists()


def test_impossible_counts_are_damage_although_the_checksum_is_right(tmp_path):
    for counts in ((-1, 0), (0, -1), (MAX_COUNT, 0), (0, MAX_COUNT), (True, 0), (0.5, 0), (None, 0)):
        written(tmp_path, VERSION, *counts, [])
        state = StateDir(tmp_path)
        assert state.read() == Memory()
        assert state.damage


# -- one node each -----------------------------------------------------------------------------------------------------
HOLDS = """
import sys
from pathlib import Path
from node.identity.statedir import StateDir
print(StateDir(Path(sys.argv[1])).lock(), flush=True)
sys.stdin.read()
"""


def test_a_directory_that_another_process_holds_is_free_when_it_was_killed(tmp_path):
    with warm.Python("-c", HOLDS, tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout.readline() == "True\n"
        state = StateDir(tmp_path)
        assert not state.lock()
        assert f"process {holder.pid} on " in state.holder
        holder.kill()
        holder.wait()
        assert state.lock()
        state.release()


def test_a_second_node_in_a_directory_is_refused_in_a_sentence_and_the_first_goes_on(
    train, quick, tmp_path, monkeypatch
):
    monkeypatch.setattr("node.network.service.HANDOVER_S", 0.2)
    first = train(nn.Linear(4, 2), state_dir=tmp_path)
    with pytest.raises(IdentityError, match=r"another node of this process: close\(\) that one, or give this one"):
        Node(nn.Linear(4, 2), state_dir=tmp_path, config=quick).__enter__()
    first.stop()
    with Node(nn.Linear(4, 2), state_dir=tmp_path, config=quick) as again:
        assert again.id == first.node.id


def test_a_node_waits_for_one_of_its_process_whose_last_write_takes_long(quick, tmp_path, monkeypatch):
    monkeypatch.setattr("node.network.service.HANDOVER_S", 0.2)
    closing = StateDir(tmp_path)
    assert closing.lock()
    closing.is_closing = True
    written = threading.Timer(0.8, closing.release)
    written.start()
    with Node(nn.Linear(4, 2), state_dir=tmp_path, config=quick):
        assert closing._lock_file is None, "it began before the other had released the directory"
    written.join()


def test_an_address_that_changed_is_the_one_that_others_learn_whatever_the_directory_had(
    train, until, tmp_path, monkeypatch
):
    """The directory is older than what the others know of the node.

    Once, they tried the address of its earlier life and did not reach it, and the node withdrew its new address.
    """
    for name in ("gossip.discovery.reachability.PATIENCE_S", "gossip.discovery.reachability.TRY_EVERY_S"):
        monkeypatch.setattr(name, 1.0)
    first = train(nn.Linear(4, 2))
    second = train(nn.Linear(4, 2), seeds=[first.node.address], state_dir=tmp_path)
    until(lambda: len(first.side.view.owners) == 2)
    second.stop()
    (tmp_path / "members.bin").unlink()
    again = train(nn.Linear(4, 2), seeds=[first.node.address], state_dir=tmp_path, listen="127.0.0.2:0")
    assert again.node.id == second.node.id
    until(lambda: again.side.network.peer.reach.verdict is not None)
    assert again.node.address.startswith("127.0.0.2:")
    shown = {member.id: member.address for member in first.node.members}
    assert shown[again.node.id] == again.node.address


def test_a_copy_of_a_directory_is_noticed_at_the_seed(train, quick, tmp_path):
    """Two machines may share a home directory without locks."""
    first = train(nn.Linear(4, 2), state_dir=tmp_path / "one")
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    with pytest.raises(LocalError, match="has this node's key"):
        Node(nn.Linear(4, 2), state_dir=tmp_path / "two", seeds=[first.node.address], config=quick).__enter__()


def test_a_seed_that_was_set_up_anew_is_found_by_those_that_it_had_invited(train, until, tmp_path, secret):
    """It has its old address and secret, and a new key. Once, its invites and all address books refused it for good."""
    first = train(nn.Linear(4, 2), secret=secret)
    address = parse_address(first.node.address)
    invite = InviteToken(read_secret(secret), (address,), PeerId(bytes.fromhex(first.node.id))).text
    second = train(nn.Linear(4, 2), seeds=[invite], state_dir=tmp_path / "second")
    until(lambda: len(second.side.view.owners) == 2)
    first.stop()
    anew = train(nn.Linear(4, 2), secret=secret, listen=str(address))
    assert anew.node.id != first.node.id
    until(lambda: anew.node.id in {member.id for member in second.node.members if member.state == "alive"})
    until(lambda: len(second.side.view.owners) == 2)


def test_a_node_with_a_seed_elsewhere_and_a_secret_listens_where_others_can_reach_it(tmp_path, secret):
    other, here = Address("192.0.2.7", 7700), "127.0.0.1:7700"
    assert not is_loopback(gathered(tmp_path, InviteToken(b"s" * 32, (other,), PeerId(b"i" * 16)).text).listen.host)
    with_secret = {"GOSSIP_SECRET_FILE": str(secret)}
    assert is_loopback(gathered(tmp_path, here, environment=with_secret).listen.host)
    assert is_loopback(gathered(tmp_path, str(other)).listen.host), "without a secret"
    assert gathered(tmp_path, str(other), environment=with_secret | {"GOSSIP_LISTEN": "none"}).listen is None


# -- what a start finds ------------------------------------------------------------------------------------------------
def gathered(state_dir, *seeds, environment=None):
    return Settings.gather(NodeOptions(seeds=seeds, state_dir=state_dir, config=Config()), environment or {})


def test_gathering_settings_writes_nothing(tmp_path, secret, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert gathered("state").state_dir == tmp_path / "state", "wherever the program goes later"
    invite = InviteToken(b"s" * 32, (Address("10.0.0.5", 7700),), PeerId(b"i" * 16)).text
    seeds = tmp_path / "seeds"
    seeds.write_text(invite)
    before = sorted(tmp_path.iterdir())
    assert gathered(tmp_path / "state", invite).secret == b"s" * 32
    assert gathered(tmp_path / "state", f"@{seeds}").secret == b"s" * 32
    assert gathered(tmp_path / "state", environment={"GOSSIP_SECRET_FILE": str(secret)}).secret == read_secret(secret)
    assert sorted(tmp_path.iterdir()) == before


def test_the_secret_that_an_invite_brought_is_there_at_the_next_start(train, tmp_path):
    invite = InviteToken(b"s" * 32, (Address("127.0.0.1", 1),), PeerId(b"i" * 16)).text
    train(nn.Linear(4, 2), seeds=[invite], state_dir=tmp_path / "state").stop()
    assert gathered(tmp_path / "state").secret == b"s" * 32
    assert stat.S_IMODE((tmp_path / "state" / "swarm.secret").stat().st_mode) == 0o600
    assert gathered(tmp_path / "other").secret is None
    assert gathered(tmp_path / "state", environment={"GOSSIP_INSECURE": "1"}).secret is None


@pytest.mark.parametrize("way", ["argument", "environment"])
def test_no_node_of_a_swarm_with_a_secret_runs_open_after_a_restart(way, train, tmp_path, until, monkeypatch, secret):
    if way == "environment":
        monkeypatch.setenv("GOSSIP_SECRET_FILE", str(secret))
    options = {"secret": secret} if way == "argument" else {}
    first = train(nn.Linear(4, 2), state_dir=tmp_path / "first", **options)
    later = train(nn.Linear(4, 2), state_dir=tmp_path / "later", seeds=[first.node.address], **options)
    until(lambda: later.node.id in {member.id for member in first.node.members})
    first.stop(), later.stop()
    monkeypatch.delenv("GOSSIP_SECRET_FILE", raising=False)
    first = train(nn.Linear(4, 2), state_dir=tmp_path / "first")
    later = train(nn.Linear(4, 2), state_dir=tmp_path / "later", seeds=[first.node.address])
    assert first.side.service.settings.secret == later.side.service.settings.secret == read_secret(secret)
    until(lambda: later.node.id in {member.id for member in first.node.members})


def test_a_secret_that_is_given_replaces_the_one_that_was_kept(train, tmp_path, secret):
    for text in (new_secret(), new_secret()):
        secret.write_text(text)
        train(nn.Linear(4, 2), secret=secret, state_dir=tmp_path / "state").stop()
        assert gathered(tmp_path / "state").secret == parse_secret(text)


@pytest.mark.parametrize(
    ("own", "shown"),
    [
        (["127.0.0.1", "192.168.7.5"], "192.168.7.5"), (["127.0.0.1", "127.0.1.1"], "127.0.0.1"), ([], "127.0.0.1"),
    ],
)  # fmt: skip
def test_without_a_default_route_an_address_that_others_reach_is_shown(own, shown, monkeypatch):
    """Once, the machine's name was shown, which often means loopback, and nodes did not meet."""
    monkeypatch.setattr("node.settings.routed", lambda _target, _v6: None)
    monkeypatch.setattr("node.settings.own_addresses", lambda: iter(own))
    settings = gathered(None)
    assert advertised_address(settings, Address("0.0.0.0", 7700)) == Address(shown, 7700)


def test_the_kernel_names_the_addresses_of_its_interfaces():
    assert "127.0.0.1" in list(own_addresses())
