"""The `gossip` command: what it refuses, its status, and its invites."""

import json
import math
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from gossip.errors import ConfigError
from gossip.ids import Address
from node.cli import main as cli
from node.identity.keys import InviteToken, new_secret, parse_secret, read_secret
from node.options import NodeOptions
from node.settings import Settings
from tests.node.commands import SEED_ID, gossip, secret_of
from tests.node.pretended import script_of


# -- the command itself ------------------------------------------------------------------------------------------------
def test_help_imports_nothing_heavy():
    probe = (
        "import sys\nfrom gossip.__main__ import main\nsys.argv[1:] = ['--help']\ntry:\n    main()\nfinally:\n"
        "    print(*({'torch', 'trio', 'numpy', 'rich', 'cryptography', 'node.node', 'sim'} & set(sys.modules)), 'END')"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, timeout=60, check=True)
    assert "run a training script" in done.stdout.lower()
    assert done.stdout.split("\n")[-2] == "END"


def test_inspect_prints_the_inventory_and_joins_nothing(tmp_path):
    script = script_of(
        tmp_path,
        """
        from torch import nn
        from gossip import Node
        with Node(nn.BatchNorm1d(3), seeds=["127.0.0.1:1"]):
            raise RuntimeError
        """,
    )
    done = gossip("inspect", script)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].split()[:4] == ["num_batches_tracked", "scalar", "int64", "copy"]


def test_the_version_is_the_distribution_s():
    assert gossip("--version").stdout == version("gossip-trainer") + "\n"


def test_the_shell_completes_commands_and_options(monkeypatch):
    monkeypatch.setenv("_GOSSIP_COMPLETE", "complete_bash")
    for typed, offered in (("gossip st", ["status"]), ("gossip fetch --ev", ["--every"])):
        monkeypatch.setenv("COMP_WORDS", typed)
        monkeypatch.setenv("COMP_CWORD", str(typed.count(" ")))
        assert gossip().stdout.split() == offered


@pytest.mark.parametrize(("mask", "said"), [(0o077, "Only you may read that file"), (0o022, "umask 077")])
def test_how_to_keep_a_secret_is_said_to_those_who_have_not(mask, said, tmp_path):
    with (tmp_path / "swarm.secret").open("wb") as file:
        os.fchmod(file.fileno(), 0o666 & ~mask)
        done = subprocess.run(
            [sys.executable, "-m", "gossip", "secret"], stdout=file, stderr=subprocess.PIPE, check=True
        )
    assert said in done.stderr.decode()
    assert len(parse_secret((tmp_path / "swarm.secret").read_text())) == 32


# -- gossip run: what is refused ---------------------------------------------------------------------------------------
def test_each_setting_that_cannot_work_gets_its_own_sentence_and_code_2(called, tmp_path):
    script = script_of(tmp_path, "raise AssertionError('the script ran')")
    broken = script_of(tmp_path, "mix_every_stepz = 3", "broken.toml")
    junk = script_of(tmp_path, "password", "junk.secret")
    gone = tmp_path / "gone"
    for options, sentence in (
        ([gone], f"There is no script {gone}: name a Python file."),
        (["--seed", "10.0.0.5", script], "'10.0.0.5' is not an address: write host:port, as in 10.0.0.5:7700."),
        (["--seed", "h:0", script], "--seed h:0 cannot be dialled: name the port."),
        (["--seed", "gossip-invite-1:xx", script], "This is not a whole invite: copy it again"),
        (["--listen", "::1:7700", script], "write an IPv6 host in brackets"),
        (["--advertise", "1.2.3.4:0", script], "--advertise 1.2.3.4:0 cannot be dialled: name the port."),
        (
            ["--listen", "0.0.0.0:7700", script],
            "Listening on 0.0.0.0:7700 without a secret would let anybody change this model",
        ),
        (["--secret-file", gone, script], f"There is no swarm secret at {gone}"),
        (["--secret-file", junk, script], f"{junk} does not hold a swarm secret"),
        (["--insecure", "--secret-file", junk, script], "exclude each other: leave one out."),
        (["--config", gone, script], f"Cannot read the config {gone}: No such file or directory."),
        (["--config", broken, script], "'mix_every_stepz' is not a setting (did you mean 'mix_every_steps'?)."),
        (["--log", gone / "log", script], f"The log's folder {gone} does not exist: make it first."),
    ):
        done = called("run", *options)
        assert done.returncode == 2
        assert sentence in done.stderr
        assert done.stderr.startswith("gossip: ")
        assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.1", "::1", "localhost"])
def test_loopback_needs_no_secret(host):
    listen = str(Address(host, 7700))
    assert cli.environment_of(dict(listen=listen), {})["GOSSIP_LISTEN"] == listen


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.5", "node-3.example.org", "localhost.example.org"])
def test_every_other_host_needs_a_secret_or_a_clear_word(host, tmp_path):
    listen = str(Address(host, 7700))
    with pytest.raises(ConfigError, match="without a secret"):
        cli.environment_of(dict(listen=listen), {})
    with pytest.raises(ConfigError, match="without a secret"):
        cli.environment_of({}, {"GOSSIP_LISTEN": listen})
    secret_file = secret_of(tmp_path)
    for settings, environment in (
        (dict(listen=listen, secret=secret_file), {}),
        (dict(listen=listen), {"GOSSIP_SECRET_FILE": str(secret_file)}),
        (dict(listen=listen, insecure=True), {}),
        (dict(listen=listen), {"GOSSIP_INSECURE": "1"}),
    ):
        assert cli.environment_of(settings, environment)["GOSSIP_LISTEN"] == listen


# -- gossip status and invite ------------------------------------------------------------------------------------------
ANSWER = {
    "id": SEED_ID.hex(),
    "address": "127.0.0.1:7700",
    "swarm": "default",
    "metrics": {"steps": 1204, "loss": math.nan, "consensus_distance": None, "refused": [["cd" * 16, "clipped", 31]]},
    "members": [
        {"id": "ab" * 16, "address": None, "state": "alive", "steps": 7, "samples": 70, "loss": 0.5, "ready": True}
    ],
}


@pytest.fixture
def status(monkeypatch, capsys):
    """Return a function that returns what `gossip status` prints of an answer."""

    def show(answer, as_json=False, **how):
        questions = []
        monkeypatch.setattr(cli, "ask", lambda *question: questions.append(question) or answer)
        cli.status("127.0.0.1:7700", secret_file=None, as_json=as_json, timeout_s=2.0, **how)
        assert questions == [("127.0.0.1:7700", None, 2.0)]
        return capsys.readouterr().out

    return show


def test_status_is_a_table_for_people_and_json_for_programs(status):
    printed = status(ANSWER, as_json=True)
    assert "NaN" not in printed
    assert json.loads(printed) == {**ANSWER, "metrics": ANSWER["metrics"] | {"loss": None}}
    table = status(ANSWER)
    assert f"node {SEED_ID.hex()} at 127.0.0.1:7700, swarm 'default'" in table
    assert all(shown in table for shown in ("1,204", "abababab", "cdcdcdcd", "clipped"))


def test_of_those_who_left_the_status_has_a_count_and_names_them_when_asked(status):
    gone = [{**ANSWER["members"][0], "id": f"{n:02d}" * 16, "state": "left"} for n in range(10, 13)]
    dead = {**ANSWER["members"][0], "id": "fe" * 16, "state": "dead"}
    answer = {**ANSWER, "members": [*ANSWER["members"], *gone, dead]}
    shown, everybody = status(answer), status(answer, with_left=True)
    assert "and 3 members that left within a day; --all names them" in shown
    assert "fefefefe" in shown
    assert "10101010" not in shown
    assert "10101010" in everybody
    assert "--all" not in everybody
    assert len(json.loads(status(answer, as_json=True))["members"]) == 5


@pytest.mark.parametrize("named", ["[/x]", "[link=http://evil.example]here[/link]", ":boom:", "[bold]h:1"])
def test_what_a_member_calls_itself_is_printed_as_it_is(status, named):
    member = {**ANSWER["members"][0], "address": named}
    metrics = ANSWER["metrics"] | {"refused": [[named, named, 3]]}
    printed = status({**ANSWER, "swarm": named, "metrics": metrics, "members": [member]})
    assert printed.count(named[:4]) >= 4


def test_nodes_print_to_terminals_in_one_way_alone():
    """Another console might read markup in names that members choose."""
    root = Path(cli.__file__).parents[1]
    made = [path.name for path in root.rglob("*.py") if "Console(" in path.read_text(encoding="utf-8")]
    assert made == ["terminal.py"]


@pytest.mark.parametrize("seed", ["file", "argument"])
def test_an_invite_among_the_arguments_is_told_since_others_can_read_it(tmp_path, seed):
    invite = InviteToken(parse_secret(new_secret()), (Address("127.0.0.1", 9),), SEED_ID).text
    file = tmp_path / "invite"
    file.write_text(invite)
    file.chmod(0o600)
    script = script_of(tmp_path, "print('runs')")
    done = gossip("run", "--quiet", "--seed", f"@{file}" if seed == "file" else invite, str(script))
    assert "runs" in done.stdout
    assert ("read the arguments of this process" in done.stderr) == (seed == "argument")


def test_an_invite_names_the_id_that_the_node_proved(monkeypatch, capsys, tmp_path):
    secret_file = secret_of(tmp_path)
    monkeypatch.setattr(cli, "ask", lambda *_: ANSWER)
    cli.invite("127.0.0.1:7700", secret_file=secret_file, timeout_s=5.0)
    invite = capsys.readouterr().out.strip()
    assert cli.resolve_seeds([invite]) == ([f"127.0.0.1:7700#{SEED_ID.hex()}"], read_secret(secret_file))


def test_what_an_invite_brought_is_found_at_the_next_start_without_one(tmp_path):
    secret = parse_secret(new_secret())
    invite = InviteToken(secret, (Address("10.0.0.5", 7700),), SEED_ID).text
    state = tmp_path / "state"
    first = cli.environment_of(dict(seeds=(invite,), state_dir=state), {})
    assert first["GOSSIP_SECRET_FILE"] == str(state / "swarm.secret")
    again = cli.environment_of(dict(state_dir=state, listen="0.0.0.0:7700"), {})
    assert Settings.gather(NodeOptions(), again).secret == secret
    other = secret_of(tmp_path)
    assert cli.environment_of(dict(state_dir=state, secret=other), {})["GOSSIP_SECRET_FILE"] == str(other)
    assert cli.environment_of(dict(state_dir=state, insecure=True), {})["GOSSIP_SECRET_FILE"] is None
