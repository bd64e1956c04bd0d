"""A node of several ranks in real processes over gloo, each with its part of the gradients."""

import json
import os
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from gossip.config import Config
from gossip.errors import ConfigError
from node import Node
from tests.reliability.namespaces import switched

CHILD = Path(__file__).with_name("group_child.py")
STARTS_S = 120.0  # The most time for the processes to start and to mix.
ENDS_S = 20.0  # A killed process is noticed at once, when its sockets close; a busy machine may take longer.


def test_a_group_of_one_is_a_node_over_torchs_own_channel(world, tmp_path):
    model = nn.Linear(4, 2)
    with Node(model, config=Config(), group=world) as node:
        for _ in range(3):
            node.step(samples=5)
        assert node.settle(0.0) is None
        assert node.swarm_samples == 15
        node.save(tmp_path / "run")
        before = model.weight.clone()
        node.load(tmp_path / "run")
        assert (model.weight == before).all()
        channel = node._training.ranks.channel
        assert channel.timeout == timedelta(seconds=30), "as long as its gradients would wait"
    assert channel.control is None
    node.close()  # A second call does no harm.


def test_a_program_may_have_one_node_after_another_over_one_group(world):
    for why in ("first", "second"):
        with Node(nn.Linear(4, 2), config=Config(), group=world) as node:
            channel = node._training.ranks.channel
            assert channel.read_reason() == "", "what the node before this one left in the store is not this one's"
            channel.leave_reason(why)
            assert channel.read_reason() == why
            node.step(samples=5)


def test_a_group_that_is_none_is_refused_in_a_sentence(world):
    with pytest.raises(ConfigError, match="group is a str: give a process group"):
        Node(nn.Linear(4, 2), group="world")
    with pytest.raises(ConfigError, match="group is a int: give a process group that this process is a member of"):
        Node(nn.Linear(4, 2), group=dist.GroupMember.NON_GROUP_MEMBER)


def test_without_torch_distributed_there_is_no_group():
    with pytest.raises(ConfigError, match="call init_process_group before"):
        Node(nn.Linear(4, 2), group="world")


def test_a_node_over_one_rank_of_several_warns(caplog):
    class Group:
        ranks = 1

        def size(self):
            return self.ranks

    model = nn.parallel.DistributedDataParallel.__new__(nn.parallel.DistributedDataParallel)
    nn.Module.__init__(model)  # Set up only what Node reads.
    model.module, model.process_group = nn.Linear(4, 2), Group()
    Node(model)
    assert not caplog.records
    Group.ranks = 2
    Node(model)
    assert "a DistributedDataParallel of 2 processes, whose weights drift apart" in caplog.text


def inside(space):
    """Return the beginning of a command that runs in a network namespace, as in a container of its own."""
    return ["ip", "netns", "exec", space, "unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]


@pytest.fixture
def launch(tmp_path):
    """``launch(name, size, seeds, spaces, **environment)`` starts the ranks of one group or several.

    Each rank takes one of ``spaces``, which are network namespaces, in turn, and sees no processes but its own.
    """
    started = []

    def start(name, size=2, seeds=(), spaces=(), **environment):
        folder = tmp_path / name
        folder.mkdir()
        for rank in range(size):
            command = inside(spaces[rank % len(spaces)]) if spaces else []
            command += [sys.executable, str(CHILD), str(rank), str(size), str(folder), *seeds]
            process = subprocess.Popen(command, env=os.environ | environment, stderr=subprocess.PIPE, text=True)
            started.append(process)
        return folder, started[-size:]

    start.folder = tmp_path
    yield start
    for process in started:
        process.kill()
        process.communicate()


def ended(ranks, seconds=120.0):
    """Wait for the ranks. Return the exit code and the last line of stderr of each."""
    end = time.monotonic() + seconds
    found = []
    for rank in ranks:
        _, said = rank.communicate(timeout=max(0.1, end - time.monotonic()))
        found.append((rank.returncode, said.strip().splitlines()[-1:] or [""]))
    return [(code, lines[0].partition("]: ")[2]) for code, lines in found]  # torch puts "[rank1]: " first.


def results(folder, size):
    return [json.loads((folder / f"result-{rank}").read_text()) for rank in range(size)]


WHOLE: dict[str, str] = {}
SHARDED = {"SHARDED": "yes"}
APART = {"SHARDED": "yes", "APART": "1 3"}
OVER_DEVICE = {"OVER_DEVICE": "yes"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "third"),
    [(WHOLE, OVER_DEVICE), (SHARDED, SHARDED), (SHARDED, WHOLE), (WHOLE, SHARDED), (APART, APART)],
    ids=["whole", "sharded", "a whole one joins sharded ones", "a sharded one joins whole ones", "on several hosts"],
)
def test_two_nodes_of_two_ranks_learn_together_and_a_third_joins_them(launch, until, first, third):
    """The first four processes are one torch.distributed world of two groups.

    If all models are whole, the third node's vectors take the way that they take with NCCL, as far as this is possible
    without it.
    """
    folder, ranks = launch("four", 4, **first, NODES="2")
    until((folder / "mixed-2").exists, STARTS_S)
    late, newcomers = launch("late", 2, [(folder / "address").read_text()], **third)
    until((late / "mixed-0").exists, STARTS_S)
    (folder.parent / "stop").touch()
    assert [code for code, _ in ended([*ranks, *newcomers])] == [0] * 6
    rows = [*results(folder, 4), *results(late, 2)]
    for one, other in zip(rows[::2], rows[1::2], strict=True):
        assert one["same"] == other["same"], "bit for bit, and in what they knew of the swarm"
        assert one["same"]["done"] > 3
        assert one["same"]["finished"]
        assert one["same"]["stopped_at"] >= one["same"]["limit"]
        assert one["accuracy"] > 0.8
    assert rows[4]["same"]["began"] > 0, "the newcomer took the weights of the others, and their count"


@pytest.mark.netns
@pytest.mark.parametrize("lost", [None, 0, 1])
def test_two_nodes_of_a_rank_on_each_of_two_hosts_learn_together_and_end_together(launch, until, lost):
    with switched(2) as spaces:
        environment = {"NODES": "2", "GLOO_SOCKET_IFNAME": "eth0"}
        folder, ranks = launch("four", 4, spaces=spaces, **SHARDED, **environment)
        until((folder / "mixed-2").exists, STARTS_S)
        if lost is not None:
            ranks[lost].kill()
            (code, said) = ended(ranks[:2], ENDS_S)[1 - lost]
            assert code == 1
            assert said.startswith(f"gossip.errors.LocalError: Rank {lost} of this node's group has ended, was killed")
            return
        (folder.parent / "stop").touch()
        found = [(rank.communicate(timeout=120)[1], rank.returncode) for rank in ranks]
    assert [code for _, code in found] == [0] * 4
    warned = ["rank 1 runs on another host, or in a container" in said for said, _ in found]
    assert warned == [True, False, True, False]
    rows = results(folder, 4)
    for one, other in zip(rows[::2], rows[1::2], strict=True):
        assert one["same"] == other["same"]
        assert one["same"]["done"] > 3
        assert one["accuracy"] > 0.8


def held_by(path):
    """Return the weights and momenta of a checkpoint, as a whole model that has loaded it holds them."""
    model = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    with Node(model, optimizer, config=Config()) as node:
        node.load(path)
    momenta = [optimizer.state[value]["momentum_buffer"].tolist() for value in model.parameters()]
    return {"held": [value.tolist() for value in model.parameters()], "momenta": momenta}


@pytest.mark.slow
@pytest.mark.parametrize("kind", [SHARDED, APART], ids=["one host", "several hosts"])
def test_a_checkpoint_of_a_sharded_node_loads_into_a_whole_one_and_back(launch, kind):
    (launch.folder / "stop").touch()
    folder, ranks = launch("sharded", **kind)
    assert [code for code, _ in ended(ranks)] == [0, 0]
    saved = results(folder, 2)[0]["same"]
    assert held_by(folder / "run") == {name: saved[name] for name in ("held", "momenta")}
    back, ranks = launch("whole", LOAD=str(folder / "run"))
    assert [code for code, _ in ended(ranks)] == [0, 0]
    again, ranks = launch("again", LOAD=str(back / "run"), **kind)
    assert [code for code, _ in ended(ranks)] == [0, 0]
    counts = [results(one, 2)[0]["same"]["swarm_samples"] for one in (folder, back, again)]
    begun = [results(one, 2)[0]["same"]["began"] for one in (folder, back, again)]
    assert begun == [0, *counts[:-1]]
    assert results(again, 2)[0]["accuracy"] > 0.8


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ("layout", "Rank 1 holds another model than rank 0 of its group: make the same one on every rank."),
        ("whole", "Rank 1 holds a whole model and rank 0 of its group a sharded one: shard it on all of them"),
        ("group", "The ranks of this node's group hold 320 elements of tensor '0.weight', which has 640: give as"),
    ],
)
def test_a_mistake_with_a_sharded_model_ends_all_ranks_with_a_sentence(launch, wrong, sentence):
    _, ranks = launch("pair", WRONG=wrong, **SHARDED)
    found = ended(ranks)
    assert [code for code, _ in found] == ([1, 0] if wrong == "group" else [1, 1])
    assert all(sentence in said for code, said in found if code)


@pytest.mark.slow
def test_the_example_learns_digits_under_torchrun():
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    example = str(CHILD.parents[3] / "examples" / "ddp_digits.py")
    done = subprocess.run(
        [*torchrun, example, "--samples", "30000", "--settle", "0"],
        env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=180, check=True,
    )  # fmt: skip
    result = json.loads(done.stdout)
    assert result["accuracy"] > 0.9
    assert 30_000 <= result["samples"] < 31_000


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lost", "how", "sentence"),
    [
        (0, signal.SIGKILL, "has ended, was killed, or left"),
        (0, signal.SIGTERM, "has failed (SystemExit: 143)"),
        (1, signal.SIGKILL, "has ended, was killed, or left"),
    ],
)
@pytest.mark.parametrize("kind", [WHOLE, SHARDED, APART], ids=["whole", "sharded", "on several hosts"])
def test_when_a_rank_is_killed_the_other_ends_with_a_sentence(launch, until, lost, how, sentence, kind):
    folder, ranks = launch("pair", **kind)
    until((folder / "training-1").exists, STARTS_S)
    time.sleep(0.5)
    ranks[lost].send_signal(how)
    found = ended(ranks, ENDS_S)
    assert found[lost][0] == (-signal.SIGKILL if how == signal.SIGKILL else 128 + signal.SIGTERM)
    code, said = found[1 - lost]
    assert code == 1
    assert said.startswith(f"gossip.errors.LocalError: Rank {lost} of this node's group {sentence}")


@pytest.mark.slow
def test_tensors_that_are_divided_in_two_dimensions_are_one_vector(tmp_path):
    command = [sys.executable, CHILD.with_name("placements_child.py")]
    ranks = [subprocess.Popen([*command, str(rank), tmp_path], stderr=subprocess.PIPE, text=True) for rank in range(4)]
    said = [rank.communicate(timeout=180)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * 4, "\n".join(said)
    for rank in range(4):
        assert "in a way that a Node does not take" in (tmp_path / f"refused-{rank}").read_text()
