"""Checkpoints go to stores and come back, and a store that fails, hangs or refuses costs the loop nothing."""

import errno
import re
import threading
import time
from pathlib import Path

import pytest
from torch import nn

from node import Node
from node.model import checkpoint
from node.storage import copies, uploads
from tests.harness import warm
from tests.node.storage.stores import drained, fill, linear, notices, save_each, weight_at, weight_of
from tests.node.trainees import heard_of

# Saving and loading ---------------------------------------------------------------------------------------------------


def test_a_run_goes_on_from_a_url_of_files(quick, tmp_path):
    url = f"file://{tmp_path}/new folder/run.bin"
    with Node(linear(2.0), config=quick) as node:
        node.step(samples=32)
        node.save(url)
        run = node.state_dict()["run_id"]
    assert sorted(file.name for file in (tmp_path / "new folder").iterdir()) == ["run.bin", "run.bin.json"]
    with Node(linear(), config=quick) as node:
        assert node.load(url)["run_id"] == run == node.state_dict()["run_id"]
        assert node.swarm_samples == 32
        assert weight_of(node) == 2.0


def test_a_swarm_that_is_ahead_is_told_by_the_url(store, node):
    node.save("faulty://b/run")
    node.step(samples=32)
    node.load("faulty://b/run")
    (told,) = notices(node, "load")
    assert told.startswith("faulty://b/run is not loaded: the run that this node holds has 32 samples")


def test_a_loaded_node_reads_what_it_has_just_saved(store, node):
    store.goes_on.clear()
    node.save("faulty://b/run")
    threading.Timer(0.1, store.goes_on.set).start()
    assert node.load("faulty://b/run")["steps"] == 0


def test_a_file_of_another_origin_without_an_ending_is_read(store, node, tmp_path):
    checkpoint.save(tmp_path / "run", linear(5.0).state_dict(), None, {})
    store().put_file(str(tmp_path / "run.safetensors"), "/b/weights")
    node.load("faulty://b/weights")
    assert weight_of(node) == 5.0


def test_older_checkpoints_are_kept(store, node, tmp_path):
    save_each(node, 0.0, 1.0, 2.0, 3.0, 4.0, keep=3)
    names = {"run": 4.0, "run.1": 3.0, "run.2": 2.0}
    assert {name: weight_at(f"/b/{name}.safetensors", tmp_path) for name in names} == names
    assert sorted(store.store) == sorted(f"/b/{name}.{ending}" for name in names for ending in ("json", "safetensors"))


def test_a_failing_store_does_not_push_older_checkpoints_out(store, node, tmp_path):
    save_each(node, 1.0, 2.0, keep=2)
    store.errors[:] = [ConnectionError("cut")] * (3 * copies.ATTEMPTS)
    save_each(node, 3.0, 4.0, 5.0, 6.0, keep=2)
    assert weight_at("/b/run.safetensors", tmp_path) == 6.0
    assert weight_at("/b/run.1.safetensors", tmp_path) == 2.0


def test_what_a_merge_replaces_goes_where_the_checkpoints_go(quick, store, tmp_path):
    with Node(linear(1.0), config=quick, state_dir=tmp_path / "state") as node:
        node.save("faulty://b/run")
        node._training.run.save_before_merge()
        drained(node)
        (told,) = notices(node, "kept")
    kept = tmp_path / "state" / "before-merge.safetensors"
    assert told == (
        f"The weights of this node's run are kept in {kept}, and go to faulty://b/run.before-merge.safetensors; "
        "node.load takes them back."
    )
    assert store().cat_file("/b/run.before-merge.safetensors") == kept.read_bytes()


# Effects of a store on the loop ---------------------------------------------------------------------------------------


def test_a_store_that_hangs_does_not_stop_the_loop_and_the_newest_checkpoint_follows(quick, store, tmp_path):
    with Node(linear(), config=quick) as node:
        store.goes_on.clear()
        began = time.monotonic()
        for value in range(20):
            fill(node, value)
            node.save("faulty://b/run")
            node.step(samples=4)
        assert time.monotonic() - began < 10, "saving waits for no store"
        run = node._training.run
        assert len(run.uploads.waiting) == 1, "a newer checkpoint takes the place of one that waits"
        assert not run.uploads.sending.has_told, "the time for a store depends on the size"
        home = run.own_folder
        assert len(list(home.iterdir())) == 2
        threading.Timer(0.1, store.goes_on.set).start()
    assert weight_at("/b/run.safetensors", tmp_path) == 19.0, "leaving waits for the last one"
    assert not home.exists(), "nothing stays here"


def test_checkpoints_of_many_names_do_not_fill_the_disk(quick, store):
    with Node(linear(), config=quick) as node:
        store.goes_on.clear()
        for step in range(uploads.MAX_WAITING + 4):
            node.save(f"faulty://b/run-{step}")
        assert len(list(node._training.run.own_folder.iterdir())) == uploads.MAX_WAITING + 1
        (told,) = notices(node, "storage")
        assert told == (
            "faulty://b is slower than the checkpoints come, and the oldest that waits is given up: save less often."
        )
        store.goes_on.set()
    newest = {f"/b/run-{step}.safetensors" for step in range(4, uploads.MAX_WAITING + 4)}
    assert newest < set(store.store)


def test_a_store_that_fails_for_a_while_is_asked_again_and_nothing_is_said(store, node, tmp_path):
    store.errors[:] = [ConnectionError("cut"), None, TimeoutError("late"), RuntimeError("of its package")]
    save_each(node, 7.0)
    assert not notices(node, "storage", "stored")
    assert weight_at("/b/run.safetensors", tmp_path) == 7.0
    assert not store.errors
    assert not [path for path in store.store if path.endswith(".tmp")]


def test_a_failing_store_is_told_once_and_the_checkpoint_stays_here(quick, store, tmp_path):
    state = tmp_path / "state"
    with Node(linear(), config=quick, state_dir=state) as node:
        store.errors[:] = [OSError(errno.EIO, "the store is down")] * (3 * copies.ATTEMPTS)
        save_each(node, 1.0, 2.0, 3.0)
        assert len(store.calls) == 3 * copies.ATTEMPTS, "a bounded number of attempts"
        kept = state / "unsent.safetensors"
        assert notices(node, "storage", "stored") == [
            "The checkpoint cannot be stored at faulty://b/run.safetensors (the store is down): look at the store and "
            f"the network; training goes on, the next save tries again, and this one is kept in {kept}."
        ]
        assert float(checkpoint.load(kept).tensors["weight"][0, 0]) == 3.0, "the newest"
        assert not list(state.glob("upload-*"))
        save_each(node, 4.0)
        assert notices(node, "stored") == [
            "Checkpoints are stored at faulty://b again, the last as faulty://b/run.safetensors."
        ]
        assert not kept.exists()
        store.errors[:] = [PermissionError(errno.EACCES, "Access denied")]
        save_each(node, 5.0)
        assert notices(node, "storage")[1:] == [
            "The store refuses faulty://b/run.safetensors (access denied): look at its name, credentials and "
            f"permissions; training goes on, the next save tries again, and this one is kept in {kept}."
        ]
        kept.unlink()
        kept.mkdir()  # Nothing can take its place.
        store.errors[:] = [PermissionError(errno.EACCES, "Access denied")]
        save_each(node, 6.0)
        assert list(state.glob("upload-*/run.safetensors")), "it stays where it was"


def test_a_failure_at_the_end_is_logged_and_the_checkpoint_stays(quick, store, caplog):
    with Node(linear(6.0), config=quick) as node:
        store.goes_on.clear()
        node.save("faulty://b/run")
        store.errors[:] = [PermissionError(errno.EACCES, "Access denied")]
        threading.Timer(0.5, store.goes_on.set).start()
        kept = node._training.run.own_folder / "unsent.safetensors"
    (told,) = heard_of(caplog, "storage")
    assert "The store refuses faulty://b/run" in told
    assert str(kept) in told
    assert float(checkpoint.load(kept).tensors["weight"][0, 0]) == 6.0


def test_leaving_says_what_it_waits_for_and_not_for_ever(quick, store, caplog, monkeypatch):
    monkeypatch.setattr(uploads, "QUIET_S", 0.05)
    monkeypatch.setattr(copies.LocalCopy, "stall_s", 0.4)
    with Node(linear(), config=quick) as node:
        store.goes_on.clear()
        node.save("faulty://b/run")
    first, last = heard_of(caplog, "storage")
    assert first.endswith(
        "This node has left, and its checkpoint is still on its way to faulty://b: the program ends when it is there."
    )
    assert "The store takes nothing of faulty://b/run.safetensors for 0.4 s" in last
    assert next(node._training.run.own_folder.glob("upload-*/run.safetensors")).exists()


def test_a_put_that_ends_in_the_middle_leaves_the_checkpoint_before_it(store, node, tmp_path):
    save_each(node, 1.0)
    store.errors[:], store.half = [None, *[ConnectionError("cut")] * copies.ATTEMPTS], True
    save_each(node, 2.0)
    assert weight_at("/b/run.safetensors", tmp_path) == 1.0
    assert not [path for path in store.store if path.endswith(".tmp")]


def test_an_object_store_gets_each_object_by_one_put(store, node, monkeypatch, tmp_path):
    monkeypatch.setattr(uploads, "ATOMIC", frozenset(("faulty",)))
    monkeypatch.setattr(store, "makedirs", lambda *_, **__: pytest.fail("no bucket is made"))
    monkeypatch.setattr(store, "mv", lambda *_, **__: pytest.fail("a rename there is a copy"))
    monkeypatch.setattr(store, "mkdirs", lambda *_, **__: None)
    save_each(node, 8.0)
    assert [path for _, path in store.calls] == ["/b/run.json", "/b/run.safetensors"]
    assert weight_at("/b/run.safetensors", tmp_path) == 8.0


def test_a_save_takes_no_memory_for_the_model(quick, tmp_path):
    model = nn.Linear(4096, 4096)  # 64 MiB
    status = Path("/proc/self/status")
    if "VmHWM" not in status.read_text():
        pytest.skip("this kernel counts no peak")

    def figure(name):
        return int(re.search(rf"{name}:\s+(\d+)", status.read_text())[1]) / 1024

    with Node(model, config=quick) as node:
        node.step()
        Path("/proc/self/clear_refs").write_text("5")  # The peak begins anew.
        before = figure("VmRSS")
        node.save(f"file://{tmp_path}/run")
        drained(node)
        node.step()
        assert figure("VmHWM") - before < 32
    assert (tmp_path / "run.safetensors").stat().st_size > 64 << 20


def test_a_killed_process_leaves_nothing_for_long(quick, tmp_path, store):
    left = tmp_path / "upload-abc"
    left.mkdir()
    (left / "run.safetensors").write_bytes(b"of a process that was killed")
    with Node(linear(), config=quick, state_dir=tmp_path) as node:
        node.save("faulty://b/run")
    assert not left.exists()


def test_a_save_after_the_block_is_sent_before_the_program_ends(tmp_path):
    program = (
        "import sys, torch; from torch import nn; from node import Node\n"
        "with Node(nn.Linear(4, 2)) as node: node.step()\n"
        "for name in 'ab': node.save(sys.argv[1] + name); node.close()\n"
        "node.save(sys.argv[1])"
    )
    url = f"file://{tmp_path}/run"
    done = warm.run("-c", program, url, timeout=120)
    assert done.returncode == 0, done.stderr
    assert sorted(file.stem for file in tmp_path.glob("*.safetensors")) == ["run", "runa", "runb"]


def test_several_nodes_may_store_at_one_url(quick, store, tmp_path):
    with Node(linear(1.0), config=quick) as first, Node(linear(2.0), config=quick) as second:
        for node in (first, second, first):
            node.save("faulty://b/run", keep=2)
    for name in ("run", "run.1"):
        assert weight_at(f"/b/{name}.safetensors", tmp_path) in (1.0, 2.0)
