"""Two processes with one key, as a copied state directory makes them: one member to the others, and no more."""

import shutil

from tests.node.loop.test_settling import settling
from tests.node.trainees import linear


def test_a_copied_state_directory_counts_as_one_member(launch, until, tmp_path):
    first = launch(linear(0), state_dir=tmp_path / "0")
    assert first.running.wait(30)
    others = [launch(linear(n), seeds=[first.made.address], state_dir=tmp_path / f"{n}") for n in (1, 2)]
    assert all(node.running.wait(30) for node in others)
    until(lambda: first.side.network.peer.membership.run_size == 3)
    shutil.copytree(tmp_path / "2", tmp_path / "copy")
    copy = launch(linear(3), seeds=[first.made.address], state_dir=tmp_path / "copy")
    nodes = [first, *others, copy]
    assert copy.running.wait(30)
    assert copy.made.id == others[1].made.id
    until(lambda: copy.side.run.samples > 1_200, 60.0)
    answers = [settling(node, 1.0, 2.0) for node in nodes]
    for answer in answers:
        answer.get(timeout=60)
    trained = sum(node.side.run.samples for node in nodes)
    for node in nodes:
        assert node.error is None
        assert 1 - 1 / len(nodes) - 0.1 < node.side.swarm_samples / trained < 1.03
        node.leave.set()
