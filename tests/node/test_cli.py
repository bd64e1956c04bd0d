"""The `gossip` command: what it refuses, what it passes on, and how it ends."""

from __future__ import annotations

import importlib
import json
import math
import os
import signal
import stat
import subprocess
import sys
import textwrap
import threading
import time
from functools import partial
from pathlib import Path

import pytest

from gossip import __main__ as command
from gossip.errors import ConfigError, IdentityError
from gossip.ids import Address, PeerId
from node.cli import main as cli
from node.identity.keys import InviteToken, new_secret, parse_secret, read_secret
from node.settings import Settings

SEED_ID = PeerId(bytes(range(16)))
NODE = "import torch, node; node.Node({'w': torch.zeros(4)})"


def secret_of(folder: Path) -> Path:
    path = script_of(folder, new_secret(), "secret")
    path.chmod(0o600)
    return path


def script_of(folder: Path, text: str, name: str = "train.py") -> Path:
    path = folder / name
    path.write_text(textwrap.dedent(text))
    return path


def gossip(*args: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("GOSSIP_")}
    return subprocess.run(
        [sys.executable, "-m", "gossip", *map(str, args)],
        env={**inherited, **variables}, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


def refused(monkeypatch, capsys, *args: str | Path) -> tuple[int, str]:
    """The exit code and stderr of a command that is refused before it does anything."""
    monkeypatch.setattr(sys, "argv", ["gossip", *map(str, args)])
    with pytest.raises(SystemExit) as ended:
        command.main()
    code = ended.value.code
    assert isinstance(code, int)
    return code, capsys.readouterr().err


# -- the command itself ------------------------------------------------------------------------------------------------
def test_a_time_to_join_reaches_the_node(tmp_path):
    settings = cli.RunSettings(must_join=2.5)
    assert cli.environment_of(settings, {})["GOSSIP_MUST_JOIN"] == "2.5"
    gather = partial(Settings.gather, (), None, None, None, None, None)
    assert gather({"GOSSIP_MUST_JOIN": "2.5"}).join_or_fail_s == 2.5
    assert gather({}).join_or_fail_s is None
    for text in ("soon", "nan", "-1", "0", "inf"):
        with pytest.raises(ConfigError, match="GOSSIP_MUST_JOIN"):
            gather({"GOSSIP_MUST_JOIN": text})


def test_how_many_to_wait_for_reaches_the_node():
    changes = cli.environment_of(cli.RunSettings(wait_for=4, wait_s=2.5), {})
    assert (changes["GOSSIP_WAIT_FOR"], changes["GOSSIP_WAIT_S"]) == ("4", "2.5")
    with pytest.raises(ConfigError, match="wait_for"):
        cli.environment_of(cli.RunSettings(), {"GOSSIP_WAIT_FOR": "all"})


def test_help_imports_nothing_heavy():
    probe = (
        "import sys\nfrom gossip.__main__ import main\nsys.argv[1:] = ['--help']\ntry:\n    main()\nfinally:\n"
        "    print(*({'torch', 'trio', 'numpy', 'rich', 'cryptography', 'node', 'sim'} & set(sys.modules)), 'END')"
    )
    began = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, timeout=60, check=True)
    print(f"gossip --help: {time.perf_counter() - began:.3f} s")
    assert "run a training script" in done.stdout.lower()
    assert done.stdout.split("\n")[-2] == "END"


def test_every_command_of_the_contract_is_there():
    commands = command.app.registered_commands
    names = {each.name or each.callback.__name__ for each in commands if each.callback}
    assert {"run", "local", "demo", "status", "secret", "invite", "version"} <= names


def test_the_version_is_the_distribution_s():
    from importlib.metadata import version

    assert gossip("--version").stdout == gossip("version").stdout == version("gossip-trainer") + "\n"


def test_a_new_secret_is_alone_on_stdout_and_can_be_read_back():
    done = gossip("secret")
    assert len(parse_secret(done.stdout)) == 32
    assert "umask 077" in done.stderr


@pytest.mark.parametrize(("mask", "said"), [(0o077, "Only you may read that file"), (0o022, "umask 077")])
def test_how_to_keep_a_secret_is_said_to_those_who_have_not(mask, said, tmp_path):
    with (tmp_path / "swarm.secret").open("wb") as file:
        os.fchmod(file.fileno(), 0o666 & ~mask)
        done = subprocess.run(
            [sys.executable, "-m", "gossip", "secret"], stdout=file, stderr=subprocess.PIPE, check=True
        )
    assert said in done.stderr.decode()


# -- gossip run: what is refused ---------------------------------------------------------------------------------------
def test_each_setting_that_cannot_work_gets_its_own_sentence_and_code_2(monkeypatch, capsys, tmp_path):
    monkeypatch.delenv("GOSSIP_SECRET_FILE", raising=False)
    monkeypatch.delenv("GOSSIP_LISTEN", raising=False)
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
        (["--config", broken, script], "'mix_every_stepz' is not a setting; did you mean 'mix_every_steps'?"),
        (["--log", gone / "log", script], f"The log's folder {gone} does not exist: make it first."),
    ):
        code, told = refused(monkeypatch, capsys, "run", *options)
        assert code == 2
        assert sentence in told
        assert told.startswith("gossip: ")
        assert told.count("\n") == 1


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.1", "::1", "localhost"])
def test_loopback_needs_no_secret(host):
    listen = str(Address(host, 7700))
    assert cli.environment_of(cli.RunSettings(listen=listen), {})["GOSSIP_LISTEN"] == listen


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.5", "node-3.example.org", "localhost.example.org"])
def test_every_other_host_needs_a_secret_or_a_clear_word(host, tmp_path):
    listen = str(Address(host, 7700))
    with pytest.raises(ConfigError, match="without a secret"):
        cli.environment_of(cli.RunSettings(listen=listen), {})
    with pytest.raises(ConfigError, match="without a secret"):
        cli.environment_of(cli.RunSettings(), {"GOSSIP_LISTEN": listen})
    secret_file = secret_of(tmp_path)
    for settings, environment in (
        (cli.RunSettings(listen=listen, secret_file=secret_file), {}),
        (cli.RunSettings(listen=listen), {"GOSSIP_SECRET_FILE": str(secret_file)}),
        (cli.RunSettings(listen=listen, insecure=True), {}),
        (cli.RunSettings(listen=listen), {"GOSSIP_INSECURE": "1"}),
    ):
        assert cli.environment_of(settings, environment)["GOSSIP_LISTEN"] == listen


# -- gossip run: what is passed on -------------------------------------------------------------------------------------
def test_settings_become_the_variables_that_node_reads(tmp_path):
    secret_file = secret_of(tmp_path)
    config = script_of(tmp_path, 'preset = "wan"', "config.toml")
    settings = cli.RunSettings(
        seeds=("10.0.0.5:7700", "[::1]:7701"), listen="0.0.0.0:7700", advertise="1.2.3.4:80", secret_file=secret_file,
        state_dir=tmp_path / "state", config=config, log=tmp_path / "log", quiet=True,
    )  # fmt: skip
    assert cli.environment_of(settings, {"GOSSIP_INSECURE": "1"}) == {
        "GOSSIP_SEEDS": "10.0.0.5:7700,[::1]:7701",
        "GOSSIP_LISTEN": "0.0.0.0:7700",
        "GOSSIP_ADVERTISE": "1.2.3.4:80",
        "GOSSIP_SECRET_FILE": str(secret_file),
        "GOSSIP_INSECURE": None,  # the option wins over what was inherited
        "GOSSIP_STATE_DIR": str(tmp_path / "state"),
        "GOSSIP_CONFIG": str(config),
        "GOSSIP_LOG": str(tmp_path / "log"),
        "GOSSIP_PROGRESS": "off",
    }


def test_what_is_not_given_is_left_to_the_environment():
    assert cli.environment_of(cli.RunSettings(), {"GOSSIP_SEEDS": "a:1"}) == {"GOSSIP_PROGRESS": "line"}


def test_a_file_of_seeds_is_passed_on_as_one_and_from_where_the_command_was_given(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    one = f"h:1#{SEED_ID.hex()}"
    assert cli.environment_of(cli.RunSettings(seeds=("@seeds", one)), {})["GOSSIP_SEEDS"] == f"@{tmp_path}/seeds,{one}"
    for text, words in (("@a,b", "comma"), ("@", "names no file"), ("h:0", "name the port"), ("h:1#ab", "32 hexa")):
        with pytest.raises(ConfigError, match=words):
            cli.environment_of(cli.RunSettings(seeds=(text,)), {})


@pytest.mark.parametrize("with_state_dir", [False, True])
def test_an_invite_becomes_seeds_with_their_id_and_a_private_secret_file(tmp_path, with_state_dir):
    secret = parse_secret(new_secret())
    invite = InviteToken(secret, (Address("10.0.0.5", 7700), Address("::1", 7700)), SEED_ID).text
    settings = cli.RunSettings(seeds=(invite, "h:1"), state_dir=tmp_path / "state" if with_state_dir else None)
    variables = cli.environment_of(settings, {})
    assert variables["GOSSIP_SEEDS"] == f"10.0.0.5:7700#{SEED_ID.hex()},[::1]:7700#{SEED_ID.hex()},h:1"
    path = Path(variables["GOSSIP_SECRET_FILE"] or "")
    assert read_secret(path) == secret
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert (path.parent == tmp_path / "state") == with_state_dir
    assert cli.environment_of(settings, {})["GOSSIP_SEEDS"] == variables["GOSSIP_SEEDS"]  # a restart keeps working


def test_invites_that_contradict_each_other_or_the_options_are_refused(tmp_path):
    mine, other = (InviteToken(parse_secret(new_secret()), (Address("h", 1),), SEED_ID).text for _ in range(2))
    with pytest.raises(ConfigError, match="different swarms"):
        cli.environment_of(cli.RunSettings(seeds=(mine, other)), {})
    for options in ({"insecure": True}, {"secret_file": tmp_path / "secret"}):
        with pytest.raises(ConfigError, match="An invite carries the swarm's secret"):
            cli.environment_of(cli.RunSettings(seeds=(mine,), **options), {})
    with pytest.raises(IdentityError):
        cli.environment_of(cli.RunSettings(seeds=(mine[:-3],)), {})


def test_options_after_the_script_are_the_script_s_own(tmp_path):
    script_of(tmp_path, "NAME = 'beside'", "helper.py")
    script = script_of(
        tmp_path,
        """
        import json, os, sys
        import helper
        names = ("GOSSIP_SEEDS", "GOSSIP_PROGRESS", "OMP_NUM_THREADS")
        print(json.dumps([sys.argv, __name__, helper.NAME, [os.environ.get(name) for name in names]]))
        sys.exit(7)
        """,
    )
    own = ["--seed", "3", "--listen", "--", "-x", "data"]
    done = gossip("run", "--seed", "h:1", "--seed", "h:2", "--threads", "1", script, *own)
    assert done.returncode == 7, done.stderr
    assert json.loads(done.stdout) == [[str(script), *own], "__main__", "beside", ["h:1,h:2", "line", "1"]]


@pytest.mark.parametrize("hidden", ["node.py", "node/__init__.py", "gossip.py"])
@pytest.mark.parametrize("words", [["run"], ["local", "-n", "1"]])
def test_a_file_of_our_name_beside_the_script_hides_nothing_of_ours_and_is_named(tmp_path, hidden, words):
    (tmp_path / "node").mkdir()
    script_of(tmp_path, "raise RuntimeError('the wrong one')", hidden)
    script_of(tmp_path, "NAME = 'beside'", "helper.py")
    script = script_of(tmp_path, f"import helper\n{NODE}\nprint(helper.NAME)\nimport sys; sys.exit(7)")
    here = Path(sys.executable)
    starts = [[here.with_name("gossip")], [here, "-m", "gossip"]]
    for start in starts if hidden != "gossip.py" else starts[:1]:  # Python itself takes a gossip.py for -m gossip
        done = subprocess.run(
            [*map(str, start), *words, str(script)],
            cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert done.returncode == 7, done.stderr
        assert done.stdout.endswith("beside\n")
        assert f"{tmp_path / hidden} is hidden by the package '{hidden[:-3].partition('/')[0]}'" in done.stderr


# -- gossip run: how it ends -------------------------------------------------------------------------------------------
def test_a_script_without_a_node_is_told_that_it_was_in_no_swarm_and_ends_with_code_2(tmp_path):
    for text in ("print('trained')", "import sys; sys.exit(0)"):
        done = gossip("run", script_of(tmp_path, text))
        assert done.returncode == 2
        assert done.stderr.endswith(
            "train.py has ended and made no Node, so it was in no swarm. "
            "Put 'with Node(model, optimizer) as node:' around its loop.\n"
        )
    done = gossip("run", script_of(tmp_path, "import sys; sys.exit(4)"))
    assert (done.returncode, done.stderr) == (4, ""), "it says why itself"


@pytest.mark.parametrize(
    "text", [NODE, f"import subprocess, sys; subprocess.run([sys.executable, '-c', {NODE!r}], check=True)"]
)
def test_a_node_counts_in_the_script_and_in_a_process_that_it_starts(tmp_path, text):
    done = gossip("run", script_of(tmp_path, text))
    assert (done.returncode, done.stderr) == (0, "")


def test_a_script_that_trains_without_a_node_is_told_so_while_it_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(cli, "NODELESS_S", 0.2)
    monkeypatch.setattr(cli.running, "made", lambda: False)
    imports = iter([True, True, False, False])
    monkeypatch.setattr(cli, "is_importing", lambda _thread: next(imports, False))
    log = tmp_path / "log.jsonl"
    cli.tell_of_missing_node(Path("train.py"), log)
    assert next(imports, None) is None
    said = "train.py has run for 0.2 s since its last import and has made no Node yet"
    assert said in capsys.readouterr().err
    (row,) = map(json.loads, log.read_text().splitlines())
    assert row["event"] == "nodeless"
    assert said in row["sentence"]


def test_a_script_with_a_node_is_told_nothing_while_it_runs(monkeypatch, capsys):
    monkeypatch.setattr(cli, "NODELESS_S", 0.2)
    monkeypatch.setattr(cli.running, "made", lambda: True)
    cli.tell_of_missing_node(Path("train.py"), None)
    assert capsys.readouterr().err == ""


def test_a_thread_that_imports_is_seen(tmp_path, monkeypatch):
    go = str(tmp_path / "go")
    script_of(tmp_path, f"import os, time\nwhile not os.path.exists({go!r}): time.sleep(0.01)", "slow_module.py")
    monkeypatch.syspath_prepend(str(tmp_path))
    thread = threading.Thread(target=lambda: importlib.import_module("slow_module"))
    thread.start()
    until = time.monotonic() + 30
    while not cli.is_importing(thread):
        assert time.monotonic() < until
    (tmp_path / "go").touch()
    thread.join()
    assert not cli.is_importing(threading.current_thread())


def test_a_script_that_raises_ends_with_code_1_and_its_own_traceback(tmp_path):
    script = script_of(
        tmp_path,
        """
        class Node:
            def __enter__(self): return self
            def __exit__(self, *_): print("left")
        with Node():
            {}["weights"]
        """,
    )
    done = gossip("run", script)
    assert done.returncode == 1
    assert done.stdout == "left\n"
    assert done.stderr.startswith(f'Traceback (most recent call last):\n  File "{script}", line 6, in <module>\n')
    assert done.stderr.endswith("KeyError: 'weights'\n")
    assert "runpy" not in done.stderr


def test_a_script_that_does_not_parse_is_shown_where_it_breaks(tmp_path):
    done = gossip("run", script_of(tmp_path, "loss = = 3"))
    assert done.returncode == 1
    assert "loss = = 3" in done.stderr
    assert "runpy" not in done.stderr


@pytest.mark.parametrize(
    ("text", "code", "told"),
    [
        ("import sys; sys.exit(5)", 5, ""),
        ("import sys; sys.exit('no data')", 1, "no data\n"),
        ("raise KeyboardInterrupt", 130, ""),
        ("from gossip.errors import *; raise ConfigError('codec is unknown.')", 2, "gossip: codec is unknown.\n"),
        ("from gossip.errors import *; raise LocalError('Port 7 is in use.')", 3, "gossip: Port 7 is in use.\n"),
        ("from gossip.errors import *; raise RefusedError('secret', 'Wrong secret.')", 3, "gossip: Wrong secret.\n"),
    ],
)
def test_the_exit_code_says_who_has_to_act(tmp_path, text, code, told):
    done = gossip("run", script_of(tmp_path, text))
    assert (done.returncode, done.stderr) == (code, told)


def test_a_sigterm_that_an_import_swallows_ends_the_script_where_it_would_train(tmp_path):
    text = """
import os, signal, time
import torch
from torch import nn
from node import Node
try:  # as libraries do around what they can do without
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(5)
except BaseException:
    print("swallowed", flush=True)
with Node(nn.Linear(4, 2)) as node:
    print("trains", flush=True)
    for _ in range(500):
        node.step()
        time.sleep(0.01)
"""
    done = gossip("run", script_of(tmp_path, text))
    assert done.stdout.split() == ["swallowed"]
    assert done.returncode == 143


def test_sigterm_unwinds_the_script_and_ends_with_143(tmp_path):
    script = script_of(
        tmp_path,
        """
        import time
        try:
            print("ready", flush=True)
            time.sleep(60)
        finally:
            print("left", flush=True)
        """,
    )
    arguments = [sys.executable, "-m", "gossip", "run", script]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.terminate()
        assert process.stdout.read() == "left\n"
    assert process.returncode == 143


def test_a_second_interrupt_while_the_interpreter_ends_cuts_it_short_without_a_traceback(tmp_path):
    script = script_of(
        tmp_path,
        """
        import atexit, signal, time
        signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored, where the tests run in the background
        atexit.register(lambda: (print("ending", flush=True), time.sleep(60)))
        print("ready", flush=True)
        time.sleep(60)
        """,
    )
    arguments = [sys.executable, "-m", "gossip", "run", script]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        for line in ("ready\n", "ending\n"):
            assert process.stdout.readline() == line
            process.send_signal(signal.SIGINT)
        assert process.stderr.read() == ""
    assert process.returncode == -signal.SIGINT


def test_the_demo_without_scikit_learn_says_how_to_get_it(monkeypatch, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    code, told = refused(monkeypatch, capsys, "demo")
    assert code == 3
    assert told.endswith("pip install 'gossip-trainer[examples]'.\n")


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
def asked(monkeypatch):
    """Answers instead of a node; the questions that were asked."""
    questions = []

    def answer(address, secret_file, timeout_s):
        questions.append((address, secret_file, timeout_s))
        return ANSWER

    monkeypatch.setattr(cli, "ask", answer)
    return questions


def test_status_is_a_table_for_people_and_json_for_programs(asked, capsys):
    cli.status("127.0.0.1:7700", secret_file=None, as_json=True, timeout_s=2.0)
    printed = capsys.readouterr().out
    assert "NaN" not in printed
    assert json.loads(printed) == {**ANSWER, "metrics": ANSWER["metrics"] | {"loss": None}}
    cli.status("127.0.0.1:7700", secret_file=None, as_json=False, timeout_s=2.0)
    table = capsys.readouterr().out
    assert f"node {SEED_ID.hex()} at 127.0.0.1:7700, swarm 'default'" in table
    assert "1,204" in table
    assert "abababab" in table
    assert "cdcdcdcd" in table
    assert "clipped" in table
    assert asked == 2 * [("127.0.0.1:7700", None, 2.0)]


def test_of_those_who_left_the_status_has_a_count_and_names_them_when_asked(monkeypatch, capsys):
    gone = [{**ANSWER["members"][0], "id": f"{n:02d}" * 16, "state": "left"} for n in range(10, 13)]
    dead = {**ANSWER["members"][0], "id": "fe" * 16, "state": "dead"}
    answer = {**ANSWER, "members": [*ANSWER["members"], *gone, dead]}
    monkeypatch.setattr(cli, "ask", lambda *_: answer)

    def printed(**how):
        cli.status("127.0.0.1:7700", secret_file=None, timeout_s=2.0, **{"as_json": False, **how})
        return capsys.readouterr().out

    shown, everybody = printed(), printed(everybody=True)
    assert "and 3 who left within a day; --all names them" in shown
    assert "fefefefe" in shown
    assert "10101010" not in shown
    assert "10101010" in everybody
    assert "--all" not in everybody
    assert len(json.loads(printed(as_json=True))["members"]) == 5


def test_an_invite_names_the_id_that_the_node_proved(asked, capsys, tmp_path):
    secret_file = secret_of(tmp_path)
    cli.invite("127.0.0.1:7700", secret_file=secret_file, timeout_s=5.0)
    invite = capsys.readouterr().out.strip()
    assert cli.resolve_seeds([invite]) == ([f"127.0.0.1:7700#{SEED_ID.hex()}"], read_secret(secret_file))


def test_what_an_invite_brought_is_found_at_the_next_start_without_one(tmp_path):
    secret = parse_secret(new_secret())
    invite = InviteToken(secret, (Address("10.0.0.5", 7700),), SEED_ID).text
    state = tmp_path / "state"
    first = cli.environment_of(cli.RunSettings(seeds=(invite,), state_dir=state), {})
    assert first["GOSSIP_SECRET_FILE"] == str(state / "swarm.secret")
    again = cli.environment_of(cli.RunSettings(state_dir=state, listen="0.0.0.0:7700"), {})
    assert Settings.gather(None, None, None, None, None, None, again).secret == secret
    other = secret_of(tmp_path)
    assert cli.environment_of(cli.RunSettings(state_dir=state, secret_file=other), {})["GOSSIP_SECRET_FILE"] == str(
        other
    )
    assert cli.environment_of(cli.RunSettings(state_dir=state, insecure=True), {})["GOSSIP_SECRET_FILE"] is None
