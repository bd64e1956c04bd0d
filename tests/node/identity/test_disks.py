"""A full disk: training goes on, a sentence says what is not written, and no half file replaces a whole one."""

import errno
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest
from torch import nn

from node.identity.statedir import StateDir
from tests.harness import warm

FIRST, SECOND = b"a" * 16, b"b" * 16


def no_space(*_, **__):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_the_end_of_a_run_that_cannot_be_written_is_told_and_leaves_the_earlier_one(tmp_path, monkeypatch):
    def write_bytes(path, data):
        with path.open("wb") as file:
            file.write(data[:4])
        no_space()

    state = StateDir(tmp_path)
    assert state.store_finished(FIRST) == ""
    monkeypatch.setattr(Path, "write_bytes", write_bytes)
    assert state.store_finished(SECOND) == (
        f"The end of this run cannot be written to {tmp_path} (No space left on device): a node that starts "
        "there alone trains again."
    )
    assert state.finished_run() == FIRST
    assert os.listdir(tmp_path) == ["finished"]


def test_weights_for_which_there_is_no_folder_are_not_given_up(train, monkeypatch):
    kept = train(nn.Linear(4, 2)).side.live.boundary.backup
    monkeypatch.setattr(tempfile, "mkdtemp", no_space)
    assert kept.keep() is False
    assert kept.why_not == "No temporary folder can be made for this node's checkpoints: No space left on device."


# What `unshare -rm` and `mount` do: this process alone sees a file system of 4 MB in the folder, and fills it.
FILLED = """
import ctypes, os, sys
from pathlib import Path
library, user, group = ctypes.CDLL(None, use_errno=True), os.getuid(), os.getgid()
def done(result):
    assert result == 0, os.strerror(ctypes.get_errno())
done(library.unshare(0x10000000 | 0x00020000))  # CLONE_NEWUSER | CLONE_NEWNS
for name, text in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1")):
    Path("/proc/self", name).write_text(text)
done(library.mount(b"none", b"/", None, 0x4000 | 0x40000, None))  # MS_REC | MS_PRIVATE
done(library.mount(b"none", sys.argv[1].encode(), b"tmpfs", 0, b"size=4m"))
from torch import nn
from gossip.config import Config
from gossip.errors import CheckpointError
from node import Node
folder = Path(sys.argv[1])
with Node(nn.Linear(400, 400), config=Config(mix_every_steps=2), state_dir=folder / "state") as node:
    book = folder / "state" / "members.bin"
    node.save(folder / "run")
    before = book.read_bytes(), (folder / "run.safetensors").read_bytes()
    (folder / "state" / "finished").write_text("0" * 32 + "\\n")
    try:
        with (folder / "filler").open("wb", buffering=0) as filler:
            while filler.write(b"0" * 4096) == 4096:
                pass
    except OSError:
        pass
    try:
        node.save(folder / "run")
    except CheckpointError as error:
        print(error)
    remember = node._training.service.book.save
    for _ in range(3):
        node.step(samples=4)
        node._training.network.call(remember, node._training.network.peer)
    node._training.network.sync()
    node.finish(0.0)
    print(before == (book.read_bytes(), (folder / "run.safetensors").read_bytes()))
    print((folder / "state" / "finished").read_text().strip())
    print(sorted(path.name for path in folder.rglob("*") if ".tmp" in path.name))
    print(node.metrics().steps)
"""


def test_a_node_on_a_full_disk_trains_on_and_says_once_what_is_not_written(tmp_path):
    mount = ["unshare", "-rm", "sh", "-c", 'mount -t tmpfs -o size=4m none "$0" && exec "$@"', str(tmp_path)]
    if not shutil.which("unshare") or subprocess.run([*mount, "true"], capture_output=True).returncode:
        pytest.skip("may not mount a file system in a namespace here")
    done = warm.run("-c", FILLED, tmp_path, timeout=120, env=os.environ | {"GOSSIP_PROGRESS": "line"})
    assert not list(tmp_path.iterdir()), "only that process sees what it mounted"
    assert done.returncode == 0, done.stderr
    saved, intact, finished, rubbish, steps = done.stdout.splitlines()
    assert "no space left on device; the previous checkpoint is intact" in saved
    assert (intact, finished, rubbish, steps) == ("True", "0" * 32, "[]", "3")
    for sentence in ("The address book in", "The final weights are not kept", "The end of this run cannot be"):
        assert done.stderr.count(sentence) == 1, done.stderr
