"""Notices that a program with a Node receives without asking, each of them once."""

import ast
import logging
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from node import Node
from node.cli.local import free_port
from node.observe.notices import LEVELS, LOGGER
from tests.harness import warm
from tests.node.conftest import QUICK
from tests.node.trainees import linear, towards

ROOT = Path(__file__).parents[3]

# A notice in two forms; setting up logging is left to the test.
PROGRAM = """
import sys, logging
{setup}
from node.observe.console import Console
progress = Console.from_environment(0.0, "3f2a91bc" + 24 * "0", "127.0.0.1:7700", {variables})
progress.write_event(0.0, "alone", "This node is alone.")
progress.write_event(0.0, "joined", "Took the weights.")
"""


def heard(setup: str, **variables: str) -> list[str]:
    """Return the lines on stderr."""
    done = warm.run("-c", PROGRAM.format(setup=setup, variables=variables))
    assert done.returncode == 0, done.stderr
    return done.stderr.splitlines()


SET_UP = "logging.basicConfig(level=logging.INFO, format='%(levelname)s %(name)s %(message)s')"
LOGGED = [
    "INFO gossip Node 3f2a91bc: Node 3f2a91bc listens on 127.0.0.1:7700.",
    "WARNING gossip Node 3f2a91bc: This node is alone.",
    "INFO gossip Node 3f2a91bc: Took the weights.",
]
PRINTED = ["Node 3f2a91bc listens on 127.0.0.1:7700.", "3f2a91bc  This node is alone.", "3f2a91bc  Took the weights."]


@pytest.mark.parametrize(
    ("setup", "variables", "lines"),
    [
        ("", {}, ["Node 3f2a91bc: This node is alone."]),
        (SET_UP, {}, LOGGED),
        ("", {"GOSSIP_PROGRESS": "line"}, PRINTED),
        (SET_UP, {"GOSSIP_PROGRESS": "line"}, PRINTED),
        ("", {"GOSSIP_PROGRESS": "off"}, []),
        (SET_UP, {"GOSSIP_PROGRESS": "off"}, LOGGED),
    ],
    ids=["only warnings", "logging", "the line", "the line and logging", "quiet", "quiet but for logging"],
)
def test_a_notice_is_told_once_where_the_program_or_the_command_shows_it(setup, variables, lines):
    assert heard(setup, **variables) == lines


def test_a_log_that_cannot_be_written_is_told_once_however_one_listens():
    full = {"GOSSIP_LOG": "/dev/full"}
    if not Path("/dev/full").exists():
        pytest.skip("/dev/full is of Linux")
    for setup, variables in [("", {}), ("", {"GOSSIP_PROGRESS": "off"}), ("logging.basicConfig()", {})]:
        told = [line for line in heard(setup, **full, **variables) if "is off from here" in line]
        assert len(told) == 1, (setup, variables)


def test_a_handler_that_raises_does_not_end_the_node(caplog):
    class Broken(logging.Handler):
        def handle(self, record: logging.LogRecord) -> bool:
            raise RuntimeError("the program's own")

    broken = Broken()
    LOGGER.addHandler(broken)
    try:
        with Node(torch.nn.Linear(2, 1)) as node:
            node.step()
            assert node.metrics().steps == 1
    finally:
        LOGGER.removeHandler(broken)


def test_an_embedded_node_tells_who_it_is_and_of_what_kind_it_speaks(caplog):
    caplog.set_level(logging.INFO, "gossip")
    with Node(torch.nn.Linear(2, 1)) as node:
        ours = [record for record in caplog.records if getattr(record, "node", None) == node.id]
    assert [record.kind for record in ours][:2] == ["listening", "started"]
    assert all(record.name == "gossip" and record.levelno == LEVELS[record.kind] for record in ours)


def kinds(call: ast.Call) -> list[str]:
    """Return the kinds of the notice that a call makes: one, or two to choose from."""
    name = getattr(call.func, "id", getattr(call.func, "attr", ""))
    if name == "call" and "notify" in ast.dump(call.args[0]):  # thread.call(runtime.notify, kind, sentence)
        said = call.args[1]
    elif name in ("Notice", "on_event", "notify", "notice") or (name.endswith("Event") and call.args):
        said = call.args[0]
    elif (
        name in ("event", "notify_once") and len(call.args) > 1
    ):  # console.write_event(now, kind), notify_once(sentence, kind)
        said = call.args[1]
    else:
        return []
    return [one.value for one in ast.walk(said) if isinstance(one, ast.Constant) and isinstance(one.value, str)]


def test_every_kind_of_notice_has_its_level():
    sources = [*ROOT.glob("gossip/**/*.py"), *ROOT.glob("node/**/*.py")]
    texts = (text for text in map(Path.read_text, sources) if re.search("notice|notify|event", text, re.IGNORECASE))
    calls = (one for text in texts for one in ast.walk(ast.parse(text)) if isinstance(one, ast.Call))
    told = {kind for call in calls for kind in kinds(call)}
    assert {"alone", "spoiled", "member", "loss", "seed", "merged", "joined", "put back", "state"} <= told
    assert told <= set(LEVELS), "a kind without a level"
    otherwise = {"log", "refused", "exchange.done", "callback", "timeline"}
    assert set(LEVELS) - told == otherwise, "these are given otherwise"


def test_a_healthy_start_warns_of_nothing(caplog, train, launch, until):
    """The newcomer starts first and its seed a moment later, as happens with processes that are started together."""
    config = replace(QUICK, join_timeout_s=20.0)
    port = free_port()
    late = launch(model := linear(), None, towards(model, 1.0), seeds=[f"127.0.0.1:{port}"], config=config)
    until(lambda: late.side.network.runtime.connector.seeds.failures)
    first = train(model := linear(), None, towards(model, 1.0), listen=f"127.0.0.1:{port}", config=config)
    until(lambda: late.node is not None and first.node.metrics().exchanges_done > 0)
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []
