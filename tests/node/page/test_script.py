"""The page's script without a browser, and in Chromium where it is installed."""

import contextlib
import json
import re
import shutil
import subprocess
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from node.local import LocalSwarm
from node.observe import figures
from sim.report import pages
from sim.report.charts import COLOURS, DASHES
from tests.node.page.chromium import Browser, found

SCRIPT = Path(figures.__file__).with_name("page") / "static" / "page.js"


@pytest.fixture(scope="module")
def call():
    """``call("edges", members, 4)`` runs one of the script's functions."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("no node to run the page's script with")

    def run(name, *args):
        shown = {True: "[...result]", False: "result"}[name in ("layout", "summed")]
        code = f"const p = require({json.dumps(str(SCRIPT))}); let args = {json.dumps(args)};"
        code += "args[0] = new Map(Object.entries(args[0]));" if name == "aligned" else ""
        code += f"const result = p.{name}(...args); console.log(JSON.stringify({shown}));"
        done = subprocess.run([node, "-e", code], capture_output=True, text=True, timeout=60, check=True)
        return json.loads(done.stdout)

    return run


def member(name, *mixed, **more):
    return {"id": name, "mixed": [[other, "fp32", ago] for other, ago in mixed], "answered_s": 0} | more


def test_a_recent_mix_is_drawn_once_by_the_later_of_both_answers(call):
    members = [member("a", ("b", 3.0), ("c", 9.0), ("gone", 1.0), ("a", 1.0)), member("b", ("a", 1.0)), member("c")]
    assert call("edges", members, 4) == [["a", "b", 1.0]]
    assert call("edges", [member("a", ("b", 1.0), answered_s=5), member("b")], 4) == [], "an old answer"


def test_members_that_say_nothing_or_nonsense_are_drawn(call):
    assert call("edges", [{"id": "a"}, {"id": "b", "mixed": [["a", "", None]], "answered_s": None}], 4) == []
    assert call("summed", [{"id": "a"}, {"failures": [["broken", "", None], ["broken", "", 2]]}]) == [["broken", 2]]
    assert [call("short", value) for value in (None, 0, 0.5, 1e-9, "1", 12345.678)] == [
        "-", "0", "0.5", "1.00e-9", "-", "12,350",
    ]  # fmt: skip


def test_no_member_moves_when_the_state_of_another_changes(call):
    both = [member("b", state="alive"), member("a", state="alive")]
    assert call("layout", both) == call("layout", [both[1], both[0] | {"state": "dead"}])


def test_losses_share_one_axis_and_gaps_are_spanned(call):
    got = call("aligned", {"b": [[2, 0.5], [4, 0.25]], "a": [[1, 9], [4, 8]]})
    assert got == {"ids": ["a", "b"], "data": [[1, 2, 4], [9, None, 8], [None, 0.5, 0.25]]}


def test_a_line_in_the_browser_is_bounded_too(call):
    points = [[number, 0] for number in range(512)]
    assert len(call("appended", points, [512, 0])) == 257
    assert len(call("appended", points, [511, 0])) == 512, "a step that it has already"


def test_a_member_that_was_started_again_has_a_new_line(call):
    assert call("continued", [[10, 1.0], [20, 0.5]], [3, 0.4]) == [[3, 0.4]]
    assert call("continued", [[10, 1.0]], [20, 0.5]) == [[10, 1.0], [20, 0.5]]
    assert call("continued", [], [20, 0.5]) == [[20, 0.5]]


def test_losses_are_drawn_logarithmically_unless_one_has_no_logarithm(call):
    assert call("logarithmic", [[2.3, None, 0.01], [0.5]]) is True
    for losses in ([2.3, 0.0], [2.3, -1.0], []):
        assert call("logarithmic", [losses]) is False


# In a browser --------------------------------------------------------------------------------------------------------
JOB = """
import time, torch
from torch import nn
from node import Node
torch.manual_seed(0)
model = nn.Linear(4, 2)
with Node(model) as node:
    for _ in range(20_000):
        node.step(loss=0.25, samples=4)
        time.sleep(0.01)
"""
HOSTILE = "<img src=x onerror=alert(1)><script>alert(2)</script>"


@pytest.fixture
def browser(tmp_path):
    """``browser(width=1200)`` opens one."""
    with contextlib.ExitStack() as stack:
        yield lambda width=1200, **options: stack.enter_context(
            contextlib.closing(Browser(tmp_path / f"browser-{width}", width, **options))
        )


@pytest.mark.slow
@pytest.mark.skipif(found() is None, reason="no Chromium here")
def test_a_browser_shows_a_member_that_is_killed_and_one_that_joins(train, browser, tmp_path, monkeypatch):
    pytest.importorskip("h11", reason="the page needs gossip-trainer[page]")
    pytest.importorskip("prometheus_client", reason="the page needs gossip-trainer[page]")
    monkeypatch.setattr(figures, "VERSION", HOSTILE[:40])
    torch.manual_seed(0)
    first = train(nn.Linear(4, 2), work=lambda: 0.5, page="127.0.0.1:0")
    page = first.side.service.page
    script = tmp_path / "job.py"
    script.write_text(JOB)
    shown = browser()
    phone = browser(width=400, height=800, dark=True)
    for one in (shown, phone):
        one.open(f"http://127.0.0.1:{page.server.sock.getsockname()[1]}/")

    def states():
        rows = "[...document.querySelectorAll('#members tbody tr')]"
        return shown.evaluate(f"{rows}.map(row => [row.cells[0].textContent, row.cells[1].textContent, row.className])")

    def wait(what):
        end = time.monotonic() + 60
        while not what(states() or []):
            assert time.monotonic() < end, (states(), shown.complaints)
            time.sleep(0.2)

    wait(lambda rows: [row[2] for row in rows] == ["self"])
    with LocalSwarm(script, [], folder=tmp_path) as swarm:
        child = swarm.add(seed=first.node.address)
        wait(lambda rows: [row[1] for row in rows] == ["alive", "alive"])
        wait(lambda rows: shown.evaluate("document.querySelectorAll('#graph line').length") == 1)
        child.process.kill()
        wait(lambda rows: len(rows) == 2 and rows[1][1].startswith(("suspect", "dead")) and "old" in rows[1][2])
        train(nn.Linear(4, 2), work=lambda: 0.75, seeds=[first.node.address])
        wait(lambda rows: len(rows) == 3 and [row[1] for row in rows].count("alive") == 2)
        wait(lambda rows: len(rows) == 3 and rows[-1][1].startswith("dead"))
    page.sentences.append({"number": page.sentence_count + 1, "at": 1.0, "text": HOSTILE})
    page.sentence_count += 1
    wait(lambda rows: HOSTILE in shown.evaluate("document.getElementById('sentences').textContent"))
    assert HOSTILE[:40] in shown.evaluate("document.getElementById('members').textContent")
    assert shown.evaluate("document.querySelectorAll('img, main script, body b b').length") == 0
    assert shown.evaluate("document.querySelectorAll('canvas').length") == 4
    assert phone.evaluate("document.documentElement.scrollWidth") <= 400
    backs = [one.evaluate("getComputedStyle(document.body).backgroundColor") for one in (shown, phone)]
    assert backs == ["rgb(255, 255, 255)", "rgb(21, 24, 28)"]
    for one in (shown, phone):
        one.evaluate("1")
        assert one.complaints == []


def test_the_page_draws_with_the_colours_of_the_simulators_reports(call):
    """The page and the reports share their colours, though neither package imports the other."""
    light, dark = re.findall(r":root \{(.*?)\}", (SCRIPT.parent / "page.css").read_text())
    assert re.findall(r"--s\d: (#\w+);", light) == [pair[0] for pair in COLOURS]
    assert re.findall(r"--s\d: (#\w+);", dark) == [pair[1] for pair in COLOURS]
    reports = re.findall(r":root \{(.*?)\}", pages.page([], ""), re.DOTALL)
    for name in ("page", "ink", "muted", "grid", "shade"):
        for ours, theirs in zip((light, dark), reports, strict=True):
            assert re.findall(rf"--{name}: (#\w+);", ours) == re.findall(rf"--{name}: (#\w+);", theirs)
    looks = call("looks", [f"{number:032x}" for number in range(24)])
    assert [look["colour"] for look in looks] == [f"--s{number % len(COLOURS)}" for number in range(24)]
    dashes = [look["dash"] for look in looks[:: len(COLOURS)]]
    assert dashes == [[] if dash == "-" else [round(2 * length) for length in dash[1]] for dash in DASHES]
