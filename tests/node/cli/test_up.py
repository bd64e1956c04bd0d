"""`gossip up` starts a node on each host over ssh, shows their lines, and ends them."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from gossip.errors import ConfigError, LocalError
from node.cli.up import read_places, run_up
from node.identity.keys import new_secret
from tests.node.conftest import until

SSH = """\
#!/bin/sh
if [ "$1" = -G ]; then echo "hostname ${2#*@}.example"; exit; fi
echo "$1" >> "$0.hosts"
shift
exec sh -c "$1"
"""
NODE = """\
#!/bin/sh
trap 'kill $!; echo told; exit 143' TERM
echo "$@"
ls -l "$GOSSIP_SECRET_FILE" | cut -c 1-10
cat "$GOSSIP_SECRET_FILE"
echo "$GOSSIP_SECRET_FILE" >> files
for word; do
    case $word in code=*) exit "${word#code=}";; stay) sleep 60 & wait $!;; esac
done
"""


@pytest.fixture
def command(tmp_path, monkeypatch):
    """Return a call of run_up with an ssh that stays here, and a Python that says what it was given."""
    monkeypatch.chdir(tmp_path)
    for name, text in (("ssh", SSH), ("python", NODE)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o700)

    def call(hosts, *args, options=None, **more):
        lines = (host.partition("#")[0] + f" python={tmp_path / 'python'}\n" for host in hosts)
        (tmp_path / "hosts.txt").write_text("# hosts\n\n" + "".join(lines))
        rest = {"ssh": str(tmp_path / "ssh"), "module": False, "secret_file": None, "log_dir": tmp_path / "logs"} | more
        return run_up(Path("hosts.txt"), Path("train.py"), args, options or {}, **rest)

    return call


def test_each_host_runs_a_node_whose_seeds_are_all_others(command, tmp_path, capsys):
    (tmp_path / "secret").touch(mode=0o600)
    (tmp_path / "secret").write_text(secret := new_secret())
    assert command(["one", "me@two", "one"], "--rate", "0.1", secret_file=tmp_path / "secret") == 0
    assert sorted((tmp_path / "ssh.hosts").read_text().split()) == ["me@two", "one", "one"]
    lines = set(capsys.readouterr().out.splitlines())
    one, two, again = "one.example:7700", "two.example:7700", "one.example:7701"
    for name, port, seeds in (("one", 7700, (two, again)), ("me@two", 7700, (one, again)), ("one-2", 7701, (one, two))):
        flags = f"--seed {seeds[0]} --seed {seeds[1]} --listen 0.0.0.0:{port} --wait-for 3"
        said = [f"-m gossip run {flags} train.py --rate 0.1", "-rw-------", secret]
        assert lines >= {f"{name}: {line}" for line in said}
        assert (tmp_path / "logs" / f"{name}.log").read_text().splitlines() == said
    assert not any(Path(file).exists() for file in (tmp_path / "files").read_text().split())


def test_the_highest_exit_code_is_returned_and_told(command, capsys):
    assert command(["one", "two"], "code=3", module=True, options={"wait_for": 1}) == 3
    said = capsys.readouterr()
    assert "--wait-for 1 -m train.py code=3" in said.out
    assert said.err.splitlines() == ["gossip: one ended with code 3.", "gossip: two ended with code 3."]


def test_a_folder_that_a_host_lacks_ends_its_node(command, capsys):
    assert command(["one folder=/nowhere"]) == 1
    assert "/nowhere" in capsys.readouterr().out


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nodes_end_in_order_when_the_command_does(command, tmp_path, number):
    (tmp_path / "hosts.txt").write_text("one python=./python\ntwo python=./python\n")
    words = (sys.executable, "-m", "gossip", "up", "--ssh", tmp_path / "ssh")
    with subprocess.Popen([*words, "--log-dir", "logs", "hosts.txt", "train.py", "stay"], cwd=tmp_path) as process:
        files = tmp_path / "files"
        until(lambda: files.exists() and len(files.read_text().split()) == 2)
        process.send_signal(number)
        process.wait(30)
    until(lambda: not any(Path(file).exists() for file in files.read_text().split()))
    if number != signal.SIGKILL:
        assert [log.read_text().splitlines()[-1] for log in (tmp_path / "logs").iterdir()] == ["told", "told"]


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (None, "cannot be read"),
        ("# nobody\n", "names no host"),
        ("one two\n", "'one two' is no "),
        ("one slots=2\n", "'one slots=2' is no "),
        ("one port=x\n", "'one port=x' is no "),
        ("one 'two\n", "is no "),
        ('one python="a\'b"\n', "is no "),
        ("/\n", "is no "),
        ("-oProxyCommand=x\n", "is no "),
        ("localhost\none\n", "localhost is another machine on each host"),
    ],
)
def test_a_file_of_hosts_that_cannot_work_is_refused(tmp_path, text, wanted):
    if text is not None:
        (tmp_path / "hosts.txt").write_text(text)
    with pytest.raises(ConfigError, match=wanted):
        read_places(tmp_path / "hosts.txt", ["false"])


def test_numeric_addresses_of_ipv6_are_dialled_in_brackets(tmp_path):
    (tmp_path / "hosts.txt").write_text("me@2001:db8::1 port=7800 python='uv run python' # a home\n")
    (place,) = read_places(tmp_path / "hosts.txt", ["false"])
    assert place.address == "[2001:db8::1]:7800"
    assert place.python == "uv run python"


def test_nodes_of_one_host_have_names_of_their_own(tmp_path):
    (tmp_path / "hosts.txt").write_text("a\na\na-2\nssh://q/\n")
    assert [place.name for place in read_places(tmp_path / "hosts.txt", ["false"])] == ["a", "a-2", "a-2-2", "q"]


def test_an_ssh_that_dies_of_a_signal_is_a_failure(command, tmp_path, capsys):
    (tmp_path / "dies").write_text('#!/bin/sh\n[ "$1" = -G ] || kill -KILL $$\n')
    (tmp_path / "dies").chmod(0o700)
    assert command(["one"], ssh=str(tmp_path / "dies")) == 128 + signal.SIGKILL
    assert "gossip: one ended with code 137." in capsys.readouterr().err


def test_what_cannot_be_run_or_written_is_named(command, tmp_path):
    with pytest.raises(LocalError, match="name another --ssh"):
        command(["one"], ssh="/nowhere/ssh")
    with pytest.raises(ConfigError, match="is no command"):
        command(["one"], ssh="ssh -o 'x")
    (tmp_path / "logs" / "two.log").mkdir()
    with pytest.raises(LocalError, match=r"two\.log cannot be written"):
        command(["two"])
