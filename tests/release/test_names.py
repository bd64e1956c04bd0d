"""gossip_trainer gives the packages below its name, and names a file that is in their way."""

import subprocess
import sys

import pytest

from tests.release.environments import ROOT

SAME = """
import sys
import gossip_trainer
assert not {"torch", "numpy", "sim"} & {*sys.modules}, "a name costs nothing"
from gossip_trainer import Config
from gossip_trainer.gossip.codecs import get_codec
from gossip_trainer.sim.scenario import scenario as below
from gossip.codecs import get_codec as plain
from sim.scenario import scenario
assert get_codec is plain and below is scenario
assert (scenario.__name__, scenario.__spec__.name) == ("sim.scenario.scenario", "sim.scenario.scenario")
assert gossip_trainer.sim is sys.modules["sim"] and Config.__module__.startswith("gossip.")
"""


def run(folder, code):
    words = [sys.executable, "-c", f"import sys; sys.path.append({str(ROOT)!r})\n{code}"]
    return subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False)


def test_the_modules_are_those_of_the_short_names(tmp_path):
    done = run(tmp_path, SAME)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("hidden", ["gossip.py", "node.py", "sim/__init__.py"])
def test_a_file_that_hides_a_package_is_named(tmp_path, hidden):
    (tmp_path / hidden).parent.mkdir(exist_ok=True)
    (tmp_path / hidden).write_text("")
    (*_, said) = run(tmp_path, "import gossip_trainer").stderr.splitlines()
    name = hidden.partition("/")[0].removesuffix(".py")
    assert said == (
        f"ImportError: {tmp_path / hidden} hides the package {name!r} of gossip-trainer: rename that file or folder."
    )
