"""Whatever is wrong with what a node is given: one clear sentence, and nothing is lost."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import subprocess
import threading
import time
from dataclasses import replace

import pytest
import torch
from torch import nn

from gossip.config import Config
from gossip.errors import CheckpointError, ConfigError, IdentityError, LocalError
from node import Node
from node.identity.keys import new_secret
from node.identity.statedir import StateDir
from node.model import checkpoint
from tests.harness import warm
from tests.harness.configs import tuned
from tests.harness.ports import free_port


def model(width=4):
    torch.manual_seed(0)
    return nn.Linear(width, 2)


def one_sentence(error):
    """Return the text of an error. Assert that it is one line that ends in a full stop, without class or trace."""
    text = str(error.value)
    assert "\n" not in text
    assert text.endswith(".") or text.endswith("?")
    assert len(text) < 400
    assert not re.search(r"Error|Traceback|<class|object at", text), text
    return text


def rows(log):
    return [json.loads(line) for line in log.read_text().splitlines()]


def write_secret(path):
    path.write_text(new_secret())
    path.chmod(0o600)
    return path


# Addresses ------------------------------------------------------------------------------------------------------------


def test_with_an_unreachable_seed_a_node_waits_says_so_and_starts_alone(quick, tmp_path, monkeypatch):
    monkeypatch.setenv("GOSSIP_LOG", str(tmp_path / "log"))
    seed = f"127.0.0.1:{free_port()}"
    with Node(model(), seeds=[seed], config=replace(quick, join_timeout_s=1.0)) as node:
        for _ in range(10):
            node.step()
        assert node.metrics().steps == 10
    told = [row["sentence"] for row in rows(tmp_path / "log") if row["event"] == "started"]
    assert len(told) == 1
    assert "No member could be reached" in told[0]
    assert "starts alone" in told[0]
    named = [row["sentence"] for row in rows(tmp_path / "log") if row["event"] == "seed"]
    assert named == [f"Seed {seed} refused the connection: no node listens there; it is tried again and again."]


def say_nothing(connection):
    connection.recv(1 << 20)
    time.sleep(60)


def drip(connection):
    for byte in b"GSP1" + bytes(60):
        connection.sendall(bytes([byte]))
        time.sleep(1.0)


def say_half_a_greeting(connection):
    connection.recv(1)
    connection.sendall(b"GSP1\0\0")


def speak_http(connection):
    connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")


@pytest.fixture
def strange_seed():
    """``strange_seed(answer)`` listens, and calls ``answer(connection)`` in a thread for each connection."""
    servers = []

    def listen(answer):
        server = socket.create_server(("127.0.0.1", 0))
        servers.append(server)

        def serve(connection):
            with connection, contextlib.suppress(OSError):
                answer(connection)

        def accept():
            with contextlib.suppress(OSError):
                while True:
                    threading.Thread(target=serve, args=(server.accept()[0],), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        return f"127.0.0.1:{server.getsockname()[1]}"

    yield listen
    for server in servers:
        server.close()


@pytest.mark.parametrize(
    ("answer", "secret"),
    [
        (say_nothing, False), (say_nothing, True), (drip, False), (drip, True), (say_half_a_greeting, False),
        (speak_http, False),
    ],
)  # fmt: skip
def test_a_seed_that_accepts_connections_and_never_greets_keeps_no_node_from_starting_alone(
    strange_seed, quick, answer, secret, tmp_path, monkeypatch
):
    monkeypatch.setenv("GOSSIP_LOG", str(tmp_path / "log"))
    seed = strange_seed(answer)
    config = tuned(quick, join_timeout_s=1.0, hello_timeout_s=0.4)
    options = {"secret": write_secret(tmp_path / "secret")} if secret else {}
    node = Node(model(), seeds=[seed], config=config, **options)
    starter = threading.Thread(target=node.start, daemon=True)
    starter.start()
    starter.join(30.0)
    assert not starter.is_alive(), "it waits for a seed that is no node"
    node.close()
    (told,) = [row["sentence"] for row in rows(tmp_path / "log") if row["event"] == "started"]
    assert told == "No member could be reached: this node starts alone, and merges when it meets others."


def test_a_node_that_must_join_fails_in_time_and_names_what_became_of_each_seed(quick):
    dead = f"127.0.0.1:{free_port()}"
    with pytest.raises(LocalError) as error:
        Node(model(), seeds=[dead, "no-such-host.invalid:7"], config=quick, join_or_fail_s=1.0).__enter__()
    text = one_sentence(error)
    assert f"seed {dead} refused the connection" in text
    assert "within 1 s" in text


def test_a_node_that_must_join_and_does_joins(train, until, quick):
    first = train(model(), config=quick)
    late = train(model(), seeds=[first.node.address], config=quick, join_or_fail_s=20.0)
    until(lambda: first.node.metrics().members_alive == late.node.metrics().members_alive == 2)


def test_a_seed_that_comes_up_later_is_found(train, until, quick):
    port = free_port()
    config = tuned(quick, join_timeout_s=0.2, seed_backoff_s=0.2)
    early = train(model(), seeds=[f"127.0.0.1:{port}"], config=config)
    late = train(model(), listen=f"127.0.0.1:{port}", config=config)
    until(lambda: early.node.metrics().members_alive == late.node.metrics().members_alive == 2)


def test_a_port_in_use_is_named_with_what_to_do(quick):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        where = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(LocalError) as error:
            Node(model(), listen=where, config=quick).__enter__()
    text = one_sentence(error)
    assert where in text
    assert "in use" in text
    assert "--listen" in text


def test_an_address_of_another_machine_cannot_be_listened_on(quick, tmp_path):
    with pytest.raises(LocalError) as error:
        Node(model(), listen="192.0.2.1:7700", secret=write_secret(tmp_path / "s"), config=quick).__enter__()
    assert "192.0.2.1:7700" in one_sentence(error)


@pytest.mark.parametrize("config", [{"mix_every_steps": 4}, "node.toml"])
def test_a_config_that_is_none_is_told_what_to_give(config):
    with pytest.raises(ConfigError, match=rf"config is a {type(config).__name__}: give a gossip.Config, as Config\("):
        Node(model(), config=config)


@pytest.mark.parametrize("seed", ["nowhere", "host:port", "127.0.0.1:99999", "127.0.0.1:", ":7700", "http://a:1", ""])
def test_a_malformed_seed_is_refused_before_anything_starts(seed, quick):
    with pytest.raises(LocalError) as error:
        Node(model(), seeds=[seed], config=quick)
    text = one_sentence(error)
    assert repr(seed) in text or seed in text
    assert "not an address" in text


def test_a_malformed_id_behind_a_seed_is_refused(quick):
    with pytest.raises(ConfigError) as error:
        Node(model(), seeds=["127.0.0.1:7700#xyz"], config=quick)
    assert "32 hexadecimal digits" in one_sentence(error)


def test_a_malformed_invite_is_refused_and_not_repeated(quick):
    from node.identity.keys import INVITE_PREFIX

    with pytest.raises(IdentityError) as error:
        Node(model(), seeds=[INVITE_PREFIX + "c2VjcmV0"], config=quick)
    assert "invite" in one_sentence(error)
    assert "c2VjcmV0" not in str(error.value)


@pytest.mark.parametrize("listen", ["0.0.0.0:0", "192.0.2.1:7700", "[::]:0"])
def test_listening_in_public_without_a_secret_is_refused(listen, quick):
    with pytest.raises(ConfigError) as error:
        Node(model(), listen=listen, config=quick)
    text = one_sentence(error)
    assert "gossip secret" in text
    assert "--insecure" in text


# Secrets --------------------------------------------------------------------------------------------------------------


def test_another_swarms_secret_is_refused_on_both_sides_and_costs_the_swarm_nothing(train, until, quick, tmp_path):
    ours, theirs = write_secret(tmp_path / "ours"), write_secret(tmp_path / "theirs")
    first = train(model(), secret=ours)
    with pytest.raises(LocalError) as error:
        Node(model(), secret=theirs, seeds=[first.node.address], config=quick).__enter__()
    assert "secret" in one_sentence(error)
    steps = first.node.metrics().steps
    until(lambda: first.node.metrics().steps > steps + 10)
    assert first.node.metrics().members_alive == 1


@pytest.mark.parametrize("with_secret", ["seed", "newcomer"])
def test_a_secret_on_one_side_only_is_refused_with_a_sentence(with_secret, train, quick, tmp_path):
    file = write_secret(tmp_path / "secret")
    first = train(model(), **({"secret": file} if with_secret == "seed" else {}))
    options = {"secret": file} if with_secret == "newcomer" else {}
    with pytest.raises(LocalError) as error:
        Node(
            model(), seeds=[first.node.address], config=tuned(quick, hello_timeout_s=1.0, join_timeout_s=1.0), **options
        ).__enter__()
    assert "secret" in one_sentence(error)


def test_a_secret_file_that_is_missing_or_holds_none_is_named(quick, tmp_path):
    with pytest.raises(IdentityError) as error:
        Node(model(), secret=tmp_path / "nothing", config=quick)
    assert "gossip secret" in one_sentence(error)
    (tmp_path / "junk").write_text("hello")
    with pytest.raises(IdentityError) as error:
        Node(model(), secret=tmp_path / "junk", config=quick)
    assert str(tmp_path / "junk") in one_sentence(error)


# Models ---------------------------------------------------------------------------------------------------------------


def test_another_model_is_refused_with_both_fingerprints_and_the_first_difference(
    train, until, quick, tmp_path, monkeypatch
):
    monkeypatch.setenv("GOSSIP_LOG", str(tmp_path / "log"))
    first = train(model())
    monkeypatch.delenv("GOSSIP_LOG")
    other = Node(model(5), seeds=[first.node.address], config=quick)
    with pytest.raises(LocalError) as error:
        other.__enter__()
    text = one_sentence(error)
    assert first.side.live.state.layout.fingerprint[:12] in text
    assert other._training.live.state.layout.fingerprint[:12] in text
    assert "'weight' has shape (2, 5) here and (2, 4) there" in text

    def told():
        return [row["sentence"] for row in rows(tmp_path / "log") if row["event"] == "refused"]

    until(lambda: told())
    assert "has shape (2, 4) here and (2, 5) there" in told()[0]
    assert first.node.metrics().members_alive == 1


def test_another_swarms_name_is_refused(train, quick):
    first = train(model())
    with pytest.raises(LocalError) as error:
        Node(model(), seeds=[first.node.address], config=replace(quick, swarm="other")).__enter__()
    assert "'other'" in one_sentence(error)


# Settings -------------------------------------------------------------------------------------------------------------


def test_an_unknown_codec_is_refused_with_those_that_exist():
    with pytest.raises(ConfigError) as error:
        Config(codec="int3")
    text = one_sentence(error)
    assert "int3" in text
    assert "bf16" in text


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("mix_evry_steps = 4", "mix_every_steps"),
        ("mix_every_steps = -1", "positive"),
        ('codec = "int3"', "bf16"),
        ("outer_rate = 5.0", "outer_rate"),
        ("[gossip", "TOML"),
        ('preset = "moon"', "wan"),
    ],
)
def test_a_config_file_with_a_fault_is_named_with_the_fault(text, words, tmp_path, monkeypatch):
    file = tmp_path / "gossip.toml"
    file.write_text(text)
    monkeypatch.setenv("GOSSIP_CONFIG", str(file))
    with pytest.raises(ConfigError) as error:
        Node(model())
    assert str(file) in str(error.value)
    assert words in str(error.value)


# State directories and disks ----------------------------------------------------------------------------------------


def test_a_damaged_identity_is_never_replaced_unasked(quick, tmp_path):
    (tmp_path / "identity.pem").write_bytes(b"garbage")
    with pytest.raises(IdentityError) as error:
        Node(model(), state_dir=tmp_path, config=quick)
    text = one_sentence(error)
    assert "identity.pem" in text
    assert "delete it" in text
    assert (tmp_path / "identity.pem").read_bytes() == b"garbage"


@pytest.mark.parametrize("junk", [b"", b"garbage", os.urandom(5000), b"\x93\x01\x02\x91\xc0", b"\xdd\xff\xff\xff\xff"])
def test_a_damaged_address_book_is_set_aside_and_training_begins(junk, quick, tmp_path, monkeypatch):
    monkeypatch.setenv("GOSSIP_LOG", str(tmp_path / "log"))
    with Node(model(), state_dir=tmp_path, config=quick) as node:
        who = node.id
    (tmp_path / "members.bin").write_bytes(junk)
    with Node(model(), state_dir=tmp_path, config=quick) as node:
        assert node.id == who
        node.step()
    told = [row["sentence"] for row in rows(tmp_path / "log") if row["event"] == "state"]
    assert len(told) == 1
    assert "set aside" in told[0]
    assert "seed" in told[0]
    assert (tmp_path / "members.damaged").read_bytes() == junk
    assert StateDir(tmp_path).read().incarnation > 0


def test_a_state_directory_that_is_a_file_is_named(quick, tmp_path):
    (tmp_path / "state").write_text("")
    with pytest.raises(IdentityError) as error:
        Node(model(), state_dir=tmp_path / "state", config=quick)
    assert str(tmp_path / "state") in one_sentence(error)


@contextlib.contextmanager
def small_disk(path, size):
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    path.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"a small file system cannot be mounted here: {mounted.stderr.strip()}")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


def test_a_full_disk_costs_the_checkpoint_and_nothing_else(quick, tmp_path):
    given = model(4096)  # 32 KiB
    with small_disk(tmp_path / "disk", "96k") as disk:
        with Node(given, config=quick) as node:
            node.step()
            node.save(disk / "run")
            (disk / "filler").write_bytes(b"x" * 30_000)
            node.step()
            with pytest.raises(CheckpointError) as error:
                node.save(disk / "run")
            text = one_sentence(error)
            assert "No space left" in text or "full" in text
            assert "previous checkpoint is intact" in text
            for _ in range(10):
                node.step()
            assert node.metrics().steps == 12
            (disk / "filler").unlink()
            node.save(disk / "run")
        assert checkpoint.load(disk / "run").meta["steps"] == 12
        assert torch.equal(checkpoint.load(disk / "run").tensors["weight"], given.weight.detach())


def test_a_full_disk_under_the_state_directory_costs_only_the_memory(quick, tmp_path):
    with small_disk(tmp_path / "disk", "64k") as disk:
        with Node(model(), state_dir=disk, config=quick) as node:
            who = node.id
            (disk / "filler").write_bytes(b"x" * 40_000)
            with contextlib.suppress(OSError):
                (disk / "more").write_bytes(b"x" * 65_536)
            node._training.service.book.save(node._training.network.peer)
            node.step()
        with Node(model(), state_dir=disk, config=quick) as node:
            assert node.id == who


@pytest.mark.parametrize("what", ["missing", "junk", "another model"])
def test_a_checkpoint_that_cannot_be_loaded_leaves_the_model_alone(what, quick, tmp_path):
    path = tmp_path / "run.safetensors"
    if what == "junk":
        path.write_bytes(b"junk" * 100)
    elif what == "another model":
        with Node(model(7), config=quick) as node:
            node.save(path)
    given = model()
    before = given.weight.detach().clone()
    with Node(given, config=quick) as node:
        with pytest.raises(CheckpointError) as error:
            node.load(path)
        assert str(path) in str(error.value)
        node.step()
    assert torch.equal(given.weight.detach(), before)


# Scripts --------------------------------------------------------------------------------------------------------------

RAISES = """
import sys, torch
from torch import nn
from gossip.config import Config
from node import Node
with Node(nn.Linear(4, 2), seeds=[sys.argv[1]], config=Config(mix_every_steps=2)) as node:
    print(node.id, flush=True)
    node.step()
    sys.stdin.readline()
    raise ValueError("mine")
"""


def test_a_script_that_raises_keeps_its_own_error_and_leaves_properly(train, until):
    first = train(model())
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with warm.Python("-c", RAISES, first.node.address, **streams, text=True) as process:
        peer = process.stdout.readline().strip()
        until(lambda: peer in {m.id for m in first.node.members})
        _, errors = process.communicate("\n", timeout=20)
    assert process.returncode == 1
    assert errors.strip().endswith("ValueError: mine")
    until(lambda: {m.id: m.state for m in first.node.members}[peer] == "left", 5.0)


def test_an_error_in_the_loop_ends_the_node_and_reaches_the_caller(quick):
    node = Node(model(), config=quick)

    def run():
        with node:
            node.step()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run()
    assert node._training.network.ended.is_set()
