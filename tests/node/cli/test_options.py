"""`gossip run`: what it passes on to the script and the node."""

import dataclasses
import json
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from gossip.errors import ConfigError, IdentityError
from gossip.ids import Address
from node.cli import main as cli
from node.identity.keys import InviteToken, new_secret, parse_secret, read_secret
from node.local import REMOVED_VARIABLES
from node.options import OPTIONS
from node.settings import Settings
from tests.node.commands import SEED_ID, gossip, secret_of
from tests.node.pretended import script_of


def test_settings_become_the_variables_that_node_reads(tmp_path):
    secret_file = secret_of(tmp_path)
    config = script_of(tmp_path, 'preset = "wan"', "config.toml")
    settings = dict(
        seeds=("10.0.0.5:7700", "[::1]:7701"), listen="0.0.0.0:7700", advertise="1.2.3.4:80", secret=secret_file,
        state_dir=tmp_path / "state", config=config, log=tmp_path / "log", quiet=True, join_or_fail_s=2.5, wait_for=4,
        wait_s=2.5,
    )  # fmt: skip
    assert cli.environment_of(settings, {"GOSSIP_INSECURE": "1"}) == {
        "GOSSIP_SEEDS": "10.0.0.5:7700,[::1]:7701",
        "GOSSIP_LISTEN": "0.0.0.0:7700",
        "GOSSIP_ADVERTISE": "1.2.3.4:80",
        "GOSSIP_SECRET_FILE": str(secret_file),
        "GOSSIP_INSECURE": None,  # The option wins over the inherited variable.
        "GOSSIP_STATE_DIR": str(tmp_path / "state"),
        "GOSSIP_CONFIG": str(config),
        "GOSSIP_LOG": str(tmp_path / "log"),
        "GOSSIP_PROGRESS": "off",
        "GOSSIP_MUST_JOIN": "2.5",
        "GOSSIP_WAIT_FOR": "4",
        "GOSSIP_WAIT_S": "2.5",
    }


def test_what_is_not_given_is_left_to_the_environment_which_is_checked():
    assert cli.environment_of({}, {"GOSSIP_SEEDS": "a:1"}) == {"GOSSIP_PROGRESS": "line"}
    assert cli.environment_of({}, {"GOSSIP_PROGRESS": "off"}) == {"GOSSIP_PROGRESS": "off"}
    with pytest.raises(ConfigError, match="wait_for"):
        cli.environment_of({}, {"GOSSIP_WAIT_FOR": "all"})


def test_a_file_of_seeds_is_passed_on_as_one_and_from_where_the_command_was_given(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    one = f"h:1#{SEED_ID.hex()}"
    assert cli.environment_of(dict(seeds=("@seeds", one)), {})["GOSSIP_SEEDS"] == f"@{tmp_path}/seeds,{one}"
    for text, words in (("@a,b", "comma"), ("@", "names no file"), ("h:0", "name the port"), ("h:1#ab", "32 hexa")):
        with pytest.raises(ConfigError, match=words):
            cli.environment_of(dict(seeds=(text,)), {})


@pytest.mark.parametrize("with_state_dir", [False, True])
def test_an_invite_becomes_seeds_with_their_id_and_a_private_secret_file(tmp_path, with_state_dir):
    secret = parse_secret(new_secret())
    invite = InviteToken(secret, (Address("10.0.0.5", 7700), Address("::1", 7700)), SEED_ID).text
    settings = dict(seeds=(invite, "h:1"), state_dir=tmp_path / "state" if with_state_dir else None)
    variables = cli.environment_of(settings, {})
    assert variables["GOSSIP_SEEDS"] == f"10.0.0.5:7700#{SEED_ID.hex()},[::1]:7700#{SEED_ID.hex()},h:1"
    path = Path(variables["GOSSIP_SECRET_FILE"] or "")
    assert read_secret(path) == secret
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert (path.parent == tmp_path / "state") == with_state_dir
    assert cli.environment_of(settings, {})["GOSSIP_SEEDS"] == variables["GOSSIP_SEEDS"]  # A restart still works.


def test_invites_that_contradict_each_other_or_the_options_are_refused(tmp_path):
    mine, other = (InviteToken(parse_secret(new_secret()), (Address("h", 1),), SEED_ID).text for _ in range(2))
    with pytest.raises(ConfigError, match="different swarms"):
        cli.environment_of(dict(seeds=(mine, other)), {})
    for options in ({"insecure": True}, {"secret": tmp_path / "secret"}):
        with pytest.raises(ConfigError, match="An invite carries the swarm's secret"):
            cli.environment_of(dict(seeds=(mine,), **options), {})
    with pytest.raises(IdentityError):
        cli.environment_of(dict(seeds=(mine[:-3],)), {})


def test_every_option_reaches_the_settings_of_a_node():
    fields = {field.name for field in dataclasses.fields(Settings)}
    of_the_command, of_the_configuration = {"insecure", "log", "quiet"}, {"map_port", "tunnels"}
    assert {name for name in OPTIONS if name not in fields} == of_the_command | of_the_configuration
    for rows in ([option.flag for option in OPTIONS.values()], [option.variable for option in OPTIONS.values()]):
        assert len(set(rows)) == len(OPTIONS)
    assert OPTIONS.keys() - {"on_fault", "grace_s"} == {
        name for name, option in OPTIONS.items() if option.variable in REMOVED_VARIABLES
    }, "a node of gossip local inherits no place of another one"


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
@pytest.mark.parametrize("words", [["run"], pytest.param(["local", "-n", "1"], marks=pytest.mark.slow)])
def test_a_file_of_our_name_beside_the_script_hides_nothing_of_ours_and_is_named(tmp_path, hidden, words):
    (tmp_path / "node").mkdir()
    script_of(tmp_path, "raise RuntimeError('the wrong one')", hidden)
    script_of(tmp_path, "NAME = 'beside'", "helper.py")
    script = script_of(
        tmp_path, "import helper, gossip.config, node.running\nprint(helper.NAME)\nimport sys; sys.exit(7)"
    )
    here = Path(sys.executable)
    starts = [[here.with_name("gossip")], [here, "-m", "gossip"]]
    # Python itself takes gossip.py for -m gossip; a folder is found like a file.
    for start in starts if hidden == "node.py" else starts[:1]:
        done = subprocess.run(
            [*map(str, start), *words, str(script)],
            cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert done.returncode == 7, done.stderr
        assert done.stdout.endswith("beside\n")
        assert f"{tmp_path / hidden} is hidden by the package '{hidden[:-3].partition('/')[0]}'" in done.stderr
