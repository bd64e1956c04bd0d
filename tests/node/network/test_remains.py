"""Parts of a node that survive a fault of its network side, and the report of that fault."""

import json
import re
from types import SimpleNamespace

import numpy as np
import pytest
import trio

from gossip.averaging.vectors import Vector
from gossip.averaging.visit import Adoption, Update
from gossip.errors import LocalError, RemoteError
from node.faults import first_cause, trace_of
from node.ranks.boundary import RanksBoundary
from tests.harness import warm
from tests.node.model.test_boundary import boundary as boundary_of


def test_updates_of_finished_exchanges_outlive_a_fault_and_requests_do_not():
    boundary, _, live = boundary_of(size=8)
    boundary.begin_update()
    boundary.begin_update()
    boundary.deliver_update(Update(Vector(np.ones(8, np.float32))))
    boundary.request_snapshot(7)
    boundary.request_adoption(Adoption(np.full(8, 5.0, np.float32), trial=True))
    boundary.restart()
    visit = boundary.visit(lambda vector: None)
    assert live.tolist() == [1.0] * 8
    assert not visit.snapshots
    assert not visit.has_replaced
    assert boundary.pending_updates == 0, "an update that never comes would hold up every snapshot"


def test_weights_on_trial_at_a_fault_give_way_to_those_that_were_kept():
    boundary, _, live = boundary_of(size=8)
    boundary.request_adoption(Adoption(np.ones(8, np.float32), trial=True))
    boundary.visit(lambda vector: None)
    assert live.tolist() == [1.0] * 8
    boundary.restart()
    assert boundary.visit(lambda vector: None).restored
    assert live.tolist() == [0.0] * 8


def test_updates_that_wait_for_all_ranks_outlive_a_fault_too():
    plain, _, live = boundary_of(size=8)
    ranks = SimpleNamespace(send_command=lambda *_: None, broadcast_array=lambda _: None, relays=lambda _: False)
    boundary = RanksBoundary(ranks, plain.model, plain.vectors, plain.backup)
    boundary.begin_update()
    boundary.deliver_update(Update(Vector(np.ones(8, np.float32))))
    boundary.request_adoption(Adoption(np.full(8, 5.0, np.float32)))
    boundary.restart()
    assert boundary.pending_updates == 1
    boundary.open()
    assert not boundary.visit(lambda vector: None).has_replaced
    assert boundary.pending_updates == 0
    assert live.tolist() == [1.0] * 8


def test_of_several_errors_the_one_for_the_user_is_told_and_never_a_cancellation():
    cancelled = trio.Cancelled.__new__(trio.Cancelled)
    group = BaseExceptionGroup("", [cancelled, ExceptionGroup("", [KeyError("x"), LocalError("Mend it.")])])
    assert str(first_cause(group)) == "Mend it."
    assert isinstance(first_cause(BaseExceptionGroup("", [cancelled, KeyError("x")])), KeyError)


def test_a_traceback_obeys_no_terminal():
    try:
        raise RemoteError("x", "\x1b[2J\n of a stranger")
    except RemoteError as error:
        told = trace_of(error)
    assert "\x1b" not in told
    assert told.splitlines()[-1] == r"RemoteError: '\x1b[2J\n of a stranger'"


# -- the command ----------------------------------------------------------------------------------------------------
SCRIPT = """
import time
import numpy as np
from node import Node

with Node({"x": np.zeros(8, np.float32)}) as node:
    node.step()
    node._training.network.call(lambda: [].pop())
    for _ in range(100):
        node.step()
        time.sleep(0.01)
"""


@pytest.mark.parametrize(("how", "code"), [("restart", 0), ("raise", 4)])
def test_a_command_says_what_to_report_and_ends_as_was_asked(tmp_path, how, code):
    script, log = tmp_path / "train.py", tmp_path / "log.jsonl"
    script.write_text(SCRIPT)
    done = warm.run("-m", "gossip", "run", "--on-fault", how, "--log", log, "--quiet", script)
    assert done.returncode == code, done.stderr
    [row] = [row for row in map(json.loads, log.read_text().splitlines()) if row["event"] == "restarted"]
    assert re.search(r"\(IndexError in train.py:\d+\) ended the network side, .* Report the traceback", row["sentence"])
    assert "IndexError: 'pop from empty list'" in row["traceback"]
    assert row["traceback"] in done.stderr
    assert ("gossip: The network side of this node ended" in done.stderr) is (code == 4)
