"""``import gossip`` is the front door: what a program starts from, and nothing is imported before it is asked for."""

from __future__ import annotations

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
    assert gossip.QuasiGlobal is node.QuasiGlobal
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
