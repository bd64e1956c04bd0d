"""``import gossip`` gives a program all that it starts from, and imports each part only on its first use."""

import subprocess
import sys

import pytest

import gossip

PLAIN = "import sys, gossip; gossip.Error; print(sorted({'torch', 'numpy', 'trio', 'node', 'sim'} & set(sys.modules)))"


def test_every_name_is_there_and_is_the_one_of_its_package():
    import node
    import sim
    from gossip.errors import LocalError

    assert gossip.Node is node.Node
    assert gossip.Scenario is sim.Scenario
    assert gossip.simulate is sim.simulate
    assert gossip.Config is node.Config
    assert issubclass(LocalError, gossip.Error)
    for name in gossip.__all__:
        assert getattr(gossip, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'Nodes'"):
        _ = gossip.Nodes


def test_the_door_itself_imports_nothing_heavy():
    done = subprocess.run([sys.executable, "-c", PLAIN], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(("hidden", "name"), [("node.py", "Node"), ("node/__init__.py", "Node"), ("node.py", "Reader")])
def test_a_file_or_folder_beside_a_script_that_hides_a_package_is_named(tmp_path, hidden, name):
    path = tmp_path / hidden
    path.parent.mkdir(exist_ok=True)
    path.touch()
    script = tmp_path / "train.py"
    script.write_text(f"from gossip import {name}")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60, check=False)
    assert "hides the package 'node' of gossip-trainer: rename that file or folder." in done.stderr
    assert str(path) in done.stderr
