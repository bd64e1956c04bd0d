"""The distributions that make dist built: they contain every file, and work in an otherwise empty environment.

The first two environments are made once each; pip downloads everything but torch into them.
"""

import email
import json
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.release.environments import ROOT, Environment

pytestmark = [pytest.mark.built, pytest.mark.slow]

PACKAGES = "gossip/", "node/", "sim/", "gossip_trainer.py"
NOT_SHIPPED = {".gitignore", ".ci/run"}  # Only the repository needs these.
TINY = """
peers = 6
duration_s = 8.0
[task]
dataset = "averaging"
elements = 400
"""
TRAIN = """
import time
import torch
from gossip import Config, Node

with Node({"w": torch.rand(64)}, config=Config(mix_every_steps=2), wait_s=600) as node:
    while node.swarm_samples < 600:
        node.step(samples=1)
        time.sleep(0.01)
    print(node.metrics().exchanges_done)
"""


def built(pattern: str) -> Path:
    paths = list((ROOT / "dist").glob(pattern))
    assert len(paths) == 1, f"dist/ holds {len(paths)} of {pattern}: make dist builds one"
    return paths[0]


@pytest.fixture(scope="module")
def tracked():
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    return {line for line in listed.stdout.splitlines() if (ROOT / line).exists()}


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return Environment(tmp_path_factory.mktemp("plain"), built("*.whl"))


@pytest.fixture(scope="module")
def full(tmp_path_factory):
    return Environment(tmp_path_factory.mktemp("full"), built("*.whl"), "examples,page,sim")


def test_the_wheel_is_for_every_machine_and_holds_the_packages_and_nothing_else(tracked):
    assert built("*.whl").name.endswith("-py3-none-any.whl")
    names = zipfile.ZipFile(built("*.whl")).namelist()
    (manual,) = (name for name in names if ".data/" in name)
    assert manual.endswith(".data/data/share/man/man1/gossip.1")
    assert {name for name in names if ".dist-info/" not in name} == {
        manual, *(name for name in tracked if name.startswith(PACKAGES))
    }  # fmt: skip
    assert {re.sub(r".*/licenses/", "", name) for name in names if "/licenses/" in name} == {
        "LICENSE", "node/observe/page/static/uPlot.LICENSE",
    }  # fmt: skip


def test_the_sdist_holds_everything_tests_pages_and_examples_too(tracked):
    with tarfile.open(built("*.tar.gz")) as archive:
        names = {member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()}
    made = {"PKG-INFO", "setup.cfg", "man/gossip.1"} | {name for name in names if ".egg-info/" in name}
    assert names - made == tracked - NOT_SHIPPED


def test_the_tests_are_found_in_an_unpacked_sdist_and_run_there(tmp_path):
    with tarfile.open(built("*.tar.gz")) as archive:
        archive.extractall(tmp_path, filter="data")
    (folder,) = tmp_path.iterdir()
    pytest_ = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    for arguments in (["--collect-only", "tests/node", "tests/sim"], ["tests/test_front_door.py"]):
        done = subprocess.run(
            [*pytest_, *arguments], cwd=folder, capture_output=True, text=True, check=False, timeout=600
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


def test_the_description_leads_nowhere_that_is_not_there():
    wheel = zipfile.ZipFile(built("*.whl"))
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    metadata = email.message_from_bytes(wheel.read(name))
    assert metadata["Description-Content-Type"] == "text/markdown"
    text = metadata.get_payload()
    assert text.startswith("# gossip-trainer")
    assert not re.findall(r"\]\((?!https://)", text)


def test_without_extras_the_command_answers_and_says_what_is_missing(plain):
    assert "Train one model on many machines with nobody in charge." in plain.run("gossip", "--help").stdout
    assert plain.run("gossip", "--version").stdout.strip() in built("*.whl").name
    assert "mix_every_steps" in plain.run("gossip", "config").stdout
    manual = (plain.folder / "share" / "man" / "man1" / "gossip.1").read_text()
    assert all(f".SH GOSSIP {name}" in manual for name in ("DOCTOR", "INSPECT", "RUN"))
    for missing in ("sklearn", "matplotlib", "h11"):
        assert "ModuleNotFoundError" in plain.run("python", "-c", f"import {missing}").stderr
    demo = plain.run("gossip", "demo")
    assert (demo.returncode, demo.stdout) == (3, "")
    assert "pip install 'gossip-trainer[examples]'" in demo.stderr


def test_without_extras_a_swarm_trains(plain):
    (plain.work / "three.py").write_text(TRAIN.replace("wait_s", "wait_for=3, wait_s"))
    program = "from node.local import LocalSwarm\nwith LocalSwarm('train.py', nodes=3) as swarm: print(swarm.wait())\n"
    program += "print(*(int(child.printed) > 0 for child in swarm.children))"
    done = plain.run("python", "-c", program.replace("train.py", "three.py"))
    assert (done.stdout, done.stderr) == ("True\nTrue True True\n", "")


def test_without_extras_a_swarm_is_simulated(plain):
    (plain.work / "tiny.toml").write_text(TINY)
    done = plain.run("gossip", "sim", "--json", "tiny.toml")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["exchanges_done"] > 10


def test_with_extras_the_simulator_draws_and_a_node_has_a_page(full):
    (full.work / "tiny.toml").write_text(TINY)
    done = full.run("gossip", "sim", "--out", "out", "tiny.toml")
    assert done.returncode == 0, done.stderr
    assert (full.work / "out" / "report.html").stat().st_size > 10_000
    (full.work / "train.py").write_text(TRAIN)
    done = full.run("gossip", "run", "--page", "127.0.0.1:0", "--log", "log.jsonl", "train.py")
    assert done.returncode == 0, done.stderr
    assert "The page of this node: http://127.0.0.1:" in (full.work / "log.jsonl").read_text()


def test_with_extras_the_demo_plays_to_its_end(full):
    done = full.run("gossip", "demo", "--json", "--seconds-limit", "900")
    outcome = json.loads(done.stdout)
    assert done.returncode == 0, outcome
    assert [node["killed"] for node in outcome["nodes"]] == [True, False, False, False, False]
