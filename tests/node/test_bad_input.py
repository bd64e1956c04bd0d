"""Whatever is wrong with what a node is given: one clear sentence, and nothing is lost."""

import contextlib
import os
import re
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from gossip.errors import CheckpointError, ConfigError, LocalError
from node import Node
from node.identity.keys import INVITE_PREFIX
from node.identity.statedir import StateDir
from tests.harness.configs import tuned
from tests.harness.ports import free_port
from tests.node.commands import secret_of
from tests.node.trainees import linear, sentences_in

MALFORMED = ["nowhere", "host:port", "127.0.0.1:99999", "127.0.0.1:", ":7700", "http://a:1", ""]
STARTS_ALONE = "No member could be reached: this node starts alone, and merges when it meets others."


def one_sentence(error):
    """Return the text of an error. Assert that it is one line that ends in a full stop, without class or trace."""
    text = str(error.value)
    assert "\n" not in text
    assert text.endswith(".") or text.endswith("?")
    assert len(text) < 400
    assert not re.search(r"Error|Traceback|<class|object at", text), text
    return text


def test_windows_is_led_to_wsl():
    code = "import os; os.name = 'nt'; from gossip import Node"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.splitlines()[-1].startswith(
        "ImportError: gossip-trainer needs Linux or macOS: on Windows run it"
    )


@pytest.mark.parametrize(
    ("call", "given", "error"),
    [("save", 3, CheckpointError), ("load", None, CheckpointError), ("reduce", [1], ConfigError)],
)
def test_what_is_no_path_and_no_mapping_is_refused(call, given, error, quick):
    with (
        Node(linear(), config=quick) as node,
        pytest.raises(error, match=f"and not {re.escape(repr(given))}") as refused,
    ):
        getattr(node, call)(given)
    one_sentence(refused)


# Addresses ------------------------------------------------------------------------------------------------------------
def test_with_an_unreachable_seed_a_node_waits_says_so_and_starts_alone(quick, tmp_path, monkeypatch):
    monkeypatch.setenv("GOSSIP_LOG", str(tmp_path / "log"))
    seed = f"127.0.0.1:{free_port()}"
    with Node(linear(), seeds=[seed], config=replace(quick, join_timeout_s=1.0)) as node:
        for _ in range(10):
            node.step()
        assert node.metrics().steps == 10
    assert sentences_in(tmp_path / "log", "started") == [STARTS_ALONE]
    assert sentences_in(tmp_path / "log", "seed") == [
        f"Seed {seed} refused the connection: no node listens there; it is tried again and again."
    ]


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
    options = {"secret": secret_of(tmp_path)} if secret else {}
    node = Node(linear(), seeds=[seed], config=config, **options)
    starter = threading.Thread(target=node.start, daemon=True)
    starter.start()
    starter.join(30.0)
    assert not starter.is_alive(), "it waits for a seed that is no node"
    node.close()
    assert sentences_in(tmp_path / "log", "started") == [STARTS_ALONE]


def test_a_node_that_must_join_fails_in_time_and_names_what_became_of_each_seed(quick):
    dead = f"127.0.0.1:{free_port()}"
    with pytest.raises(LocalError) as error:
        Node(linear(), seeds=[dead, "no-such-host.invalid:7"], config=quick, join_or_fail_s=1.0).__enter__()
    text = one_sentence(error)
    assert f"seed {dead} refused the connection" in text
    assert "within 1 s" in text


def test_a_seed_that_comes_up_later_is_found(train, until, quick):
    port = free_port()
    config = tuned(quick, join_timeout_s=0.2, seed_backoff_s=0.2)
    early = train(linear(), seeds=[f"127.0.0.1:{port}"], config=config)
    late = train(linear(), listen=f"127.0.0.1:{port}", config=config)
    until(lambda: early.node.metrics().members_alive == late.node.metrics().members_alive == 2)


def test_a_port_in_use_is_named_with_what_to_do(quick):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        where = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(LocalError) as error:
            Node(linear(), listen=where, config=quick).__enter__()
    text = one_sentence(error)
    assert where in text
    assert "in use" in text
    assert "--listen" in text


def test_an_address_of_another_machine_cannot_be_listened_on(quick, tmp_path):
    with pytest.raises(LocalError) as error:
        Node(linear(), listen="192.0.2.1:7700", secret=secret_of(tmp_path), config=quick).__enter__()
    assert "192.0.2.1:7700" in one_sentence(error)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        *[({"seeds": [seed]}, f"{re.escape(seed)}'? is not an address") for seed in MALFORMED],
        ({"seeds": ["127.0.0.1:7700#xyz"]}, "32 hexadecimal digits"),
        ({"seeds": [INVITE_PREFIX + "c2VjcmV0"]}, "invite"),
        ({"listen": "[::]:0"}, "without a secret .*'gossip secret'.* --insecure"),
        ({"secret": "nothing"}, "gossip secret"),
        ({"config": {"mix_every_steps": 4}}, r"config is a dict: give a gossip.Config, as Config\("),
        ({"config": "node.toml"}, r"config is a str: give a gossip.Config, as Config\("),
        ({"map_port": False}, "map_port is False: give 'auto' or 'off'"),
        ({"listen": 7700}, "listen is 7700: give HOST:PORT as a text"),
        ({"state_dir": 5}, "state_dir is 5: give DIR as a text"),
        ({"trace": True}, "trace is True: give FILE as a text"),
        ({"seeds": 5}, "seeds is 5: give 'host:port'"),
        ({"seeds": Path("seeds")}, "seeds is .*'@path' of a file"),
    ],
)
def test_an_option_that_cannot_work_is_refused_before_anything_starts(options, words, quick):
    with pytest.raises(LocalError, match=words) as error:
        Node(linear(), **{"config": quick} | options)
    assert "c2VjcmV0" not in one_sentence(error), "an invite is not repeated"


@pytest.mark.parametrize("word", ["0", "false"])
def test_only_a_1_in_the_variable_trusts_the_network(word, monkeypatch):
    monkeypatch.setenv("GOSSIP_INSECURE", word)
    with pytest.raises(ConfigError, match="without a secret" if word == "0" else "GOSSIP_INSECURE is 'false'"):
        Node(linear(), listen="0.0.0.0:0")


def test_a_faulty_file_that_the_environment_names_is_refused_by_its_name(tmp_path, monkeypatch):
    file = tmp_path / "gossip.toml"
    file.write_text("mix_evry_steps = 4")
    monkeypatch.setenv("GOSSIP_CONFIG", str(file))
    with pytest.raises(ConfigError, match="did you mean 'mix_every_steps'") as error:
        Node(linear())
    assert str(file) in one_sentence(error)


# Secrets --------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("of_swarm", "of_newcomer"),
    [("ours", "theirs"), ("ours", None), (None, "theirs")],
    ids=["another secret", "none where the swarm has one", "one where the swarm has none"],
)
def test_a_newcomer_without_the_swarms_secret_is_refused_in_a_sentence_and_costs_the_swarm_nothing(
    of_swarm, of_newcomer, train, until, quick, tmp_path
):
    def options(name):
        return {} if name is None else {"secret": secret_of(tmp_path, name)}

    first = train(linear(), **options(of_swarm))
    config = tuned(quick, hello_timeout_s=2.0, join_timeout_s=2.0)
    with pytest.raises(LocalError) as error:
        Node(linear(), seeds=[first.node.address], config=config, **options(of_newcomer)).__enter__()
    assert "secret" in one_sentence(error)
    steps = first.node.metrics().steps
    until(lambda: first.node.metrics().steps > steps + 10)
    assert first.node.metrics().members_alive == 1


# Models ---------------------------------------------------------------------------------------------------------------
def test_another_model_is_refused_with_both_fingerprints_and_the_first_difference(
    train, until, quick, tmp_path, monkeypatch
):
    monkeypatch.setenv("GOSSIP_LOG", str(tmp_path / "log"))
    first = train(linear())
    monkeypatch.delenv("GOSSIP_LOG")
    other = Node(linear(width=5), seeds=[first.node.address], config=quick)
    with pytest.raises(LocalError) as error:
        other.__enter__()
    text = one_sentence(error)
    assert first.side.live.state.layout.fingerprint[:12] in text
    assert other._training.live.state.layout.fingerprint[:12] in text
    assert "'weight' has shape (2, 5) here and (2, 4) there" in text
    until(lambda: sentences_in(tmp_path / "log", "refused"))
    assert "has shape (2, 4) here and (2, 5) there" in sentences_in(tmp_path / "log", "refused")[0]
    assert first.node.metrics().members_alive == 1


def test_another_swarms_name_is_refused(train, quick):
    first = train(linear())
    with pytest.raises(LocalError) as error:
        Node(linear(), seeds=[first.node.address], config=replace(quick, swarm="other")).__enter__()
    assert "'other'" in one_sentence(error)


# State directories ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("junk", [b"", b"garbage", os.urandom(5000), b"\x93\x01\x02\x91\xc0", b"\xdd\xff\xff\xff\xff"])
def test_a_damaged_address_book_is_set_aside_and_training_begins(junk, quick, tmp_path, monkeypatch):
    monkeypatch.setenv("GOSSIP_LOG", str(tmp_path / "log"))
    with Node(linear(), state_dir=tmp_path, config=quick) as node:
        who = node.id
    (tmp_path / "members.bin").write_bytes(junk)
    with Node(linear(), state_dir=tmp_path, config=quick) as node:
        assert node.id == who
        node.step()
    (told,) = sentences_in(tmp_path / "log", "state")
    assert "set aside" in told
    assert "seed" in told
    assert (tmp_path / "members.damaged").read_bytes() == junk
    assert StateDir(tmp_path).read().incarnation > 0


# Errors of the loop ---------------------------------------------------------------------------------------------------
def test_a_loop_that_raises_keeps_its_own_error_and_leaves_properly(train, until, quick):
    first = train(linear())
    node = Node(linear(1), seeds=[first.node.address], config=quick)

    def states():
        return {member.id: member.state for member in first.node.members}

    def run():
        with node:
            node.step()
            until(lambda: node.id in states())
            raise ValueError("mine")

    with pytest.raises(ValueError, match=r"^mine$"):
        run()
    until(lambda: states()[node.id] == "left", 5.0)
