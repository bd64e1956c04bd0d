"""Progress: what people see of a node, driven by hand."""

import io
import itertools
import json
import math
import os
from pathlib import Path
from typing import Any

import pytest

from gossip.errors import ConfigError
from node.observe.console import Console
from node.observe.figures import Reading

ID = "3f2a91bc" + 24 * "0"
START_S = 1_000_000.0


def figures(**changes: Any) -> Reading:
    row = Reading(
        steps=1204, samples=19264, swarm_samples=77056, loss=0.31234, members_alive=4, exchanges_done=150,
        exchanges_failed=1, exchange_seconds=0.0241, bytes_sent=30_000_000, bytes_received=20_000_000,
        partner="9d01aa20", alone=False,
    )  # fmt: skip
    row.update(changes)
    return row


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Gone(io.StringIO):
    def write(self, text: str) -> int:
        raise BrokenPipeError(32, "Broken pipe")


def start(**options: Any) -> tuple[Console, io.StringIO]:
    stream = options.pop("stream", None) or io.StringIO()
    return Console(START_S, ID, "127.0.0.1:7700", stream=stream, **options), stream


def rows_of(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.read_text().splitlines()]


def test_a_plain_stream_gets_a_line_every_ten_seconds():
    progress, stream = start()
    for tenth in range(1, 202):
        progress.tick(START_S + tenth / 10, figures)
    start_of, end_of = (
        "3f2a91bc  step 1,204  samples 19,264 of 77,056  loss 0.3123  4 members  150 exchanges (1 failed)  ",
        " MB/s, last with 9d01aa20",
    )
    assert stream.getvalue().splitlines() == [
        "Node 3f2a91bc listens on 127.0.0.1:7700.",
        start_of + "3.0/2.0" + end_of,  # 30 MB over the first 10 s.
        start_of + "0.0/0.0" + end_of,  # No traffic since then.
    ]


def test_eighty_columns_hold_the_way_to_the_goal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    progress, stream = start(stream=Terminal())
    progress.tick(START_S + 1, lambda: figures(steps=1_204_000, samples=19_264_000, swarm_samples=77_056_000))
    line = stream.getvalue().replace("\x1b[K", "").split("\r")[-1]
    assert len(line) <= 79
    assert "samples 19,264,000 of 77,056,000  loss 0.3123" in line


def test_a_terminal_has_one_line_rewritten_four_times_a_second(monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    progress, stream = start(stream=Terminal())
    stream.seek(0)
    stream.truncate()
    for hundredth in range(1, 101):
        progress.tick(START_S + hundredth / 100, figures)
    written = stream.getvalue()
    assert written.count("\r") == 4
    assert "\n" not in written
    assert all(len(line) <= 59 for line in written.replace("\x1b[K", "").split("\r"))


@pytest.mark.parametrize(("state", "said"), [({"ready": False}, "joining"), ({"alone": True}, "alone")])
def test_a_node_that_joins_or_is_alone_says_so_instead_of_counting_members(state, said):
    progress, stream = start()
    progress.tick(START_S + 10, lambda: figures(**state, members_alive=1, partner=None, loss=None))
    assert f"loss -  {said}  150 exchanges (1 failed)  3.0/2.0 MB/s\n" in stream.getvalue()


def test_the_log_holds_one_row_a_second_and_each_event_and_the_end(tmp_path):
    log = tmp_path / "node.jsonl"
    progress, _ = start(log=log, line=False)
    for tenth in range(1, 21):
        row = figures(bytes_sent=tenth * 100_000, bytes_received=0)
        progress.tick(START_S + tenth / 10, lambda row=row: row)
    progress.write_event(START_S + 2.5, "alone", "This node is alone.", members=1)
    progress.close(START_S + 3, figures(steps=1300))
    rows = rows_of(log)
    sentence = "Node 3f2a91bc listens on 127.0.0.1:7700."
    assert rows[0] == {
        "t": START_S, "id": ID, "event": "listening", "sentence": sentence, "address": "127.0.0.1:7700",
    }  # fmt: skip
    assert [(row["t"] - START_S, row["event"]) for row in rows[1:]] == [
        (1.0, "progress"), (2.0, "progress"), (2.5, "alone"), (3.0, "final"),
    ]  # fmt: skip
    assert rows[1] == {
        "t": START_S + 1, "id": ID, "event": "progress", **figures(bytes_sent=1_000_000, bytes_received=0),
        "mb_s_sent": 1.0, "mb_s_received": 0.0,
    }  # fmt: skip
    assert rows[3] == {
        "t": START_S + 2.5, "id": ID, "event": "alone", "sentence": "This node is alone.", "members": 1,
    }  # fmt: skip
    assert rows[4]["steps"] == 1300


def test_a_day_of_the_log_is_a_few_megabytes_and_dense_at_its_beginning(tmp_path):
    log = tmp_path / "node.jsonl"
    progress, _ = start(log=log, line=False)
    for second in range(1, 86_401):
        progress.tick(START_S + second, figures)
    at = [row["t"] - START_S for row in rows_of(log) if row["event"] == "progress"]
    gaps = [after - before for before, after in itertools.pairwise(at)]
    assert at[:60] == list(range(1, 61))
    assert len([when for when in at if when <= 600]) > 150
    assert max(gaps) == 10
    assert at[-1] > 86_390
    assert log.stat().st_size < 4e6


def test_a_clock_that_is_set_back_or_forward_holds_up_no_row(tmp_path):
    log = tmp_path / "node.jsonl"
    progress, _ = start(log=log, line=False)
    for now_s in (START_S + 1, START_S - 1e6, START_S - 1e6 + 1, START_S + 1e6, START_S + 1e6 + 10):
        progress.tick(now_s, figures)
    rows = rows_of(log)
    assert [row["event"] for row in rows] == ["listening"] + 5 * ["progress"]
    assert all(row["mb_s_sent"] >= 0 for row in rows[1:])


def test_figures_are_looked_up_only_when_something_is_due(tmp_path):
    looks = []
    progress, _ = start(log=tmp_path / "log")
    for hundredth in range(1, 301):
        progress.tick(START_S + hundredth / 100, lambda: looks.append(1) or figures())
    assert len(looks) == 3


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_diverged_loss_is_null_in_the_log_because_json_has_no_nan(tmp_path, loss):
    progress, _ = start(log=tmp_path / "log", line=False)
    progress.tick(START_S + 1, lambda: figures(loss=loss))
    assert rows_of(tmp_path / "log")[1]["loss"] is None


def test_the_log_is_appended_to_and_a_torn_row_spoils_no_other(tmp_path):
    log = tmp_path / "log"
    log.write_text('{"t":1,"event":"progress"}\n{"t":2,"ev')  # killed while writing
    start(log=log, line=False)
    first, torn, ours = log.read_text().splitlines()
    assert json.loads(first)["t"] == 1
    assert torn == '{"t":2,"ev'
    assert json.loads(ours)["event"] == "listening"


@pytest.mark.parametrize("by", ["renaming", "renaming and creating", "removing", "copying and truncating"])
def test_a_log_that_is_rotated_loses_no_row_and_goes_on_under_its_name(by, tmp_path):
    log, old = tmp_path / "log", tmp_path / "log.1"
    progress, stream = start(log=log)
    progress.tick(START_S + 1, figures)
    if by == "copying and truncating":
        old.write_bytes(log.read_bytes())
        os.truncate(log, 0)
    else:
        log.rename(old)
        if by == "renaming and creating":
            log.touch(mode=0o640)
        elif by == "removing":
            old = old.rename(tmp_path / "elsewhere")
    progress.tick(START_S + 2, figures)
    progress.tick(START_S + 3, figures)
    assert [row["t"] - START_S for row in rows_of(old)] == [0, 1]
    assert [row["t"] - START_S for row in rows_of(log)] == [2, 3]
    assert "cannot be written" not in stream.getvalue()


def test_a_log_whose_folder_is_gone_costs_nothing(tmp_path):
    (tmp_path / "logs").mkdir()
    progress, stream = start(log=tmp_path / "logs" / "log")
    (tmp_path / "logs").rename(tmp_path / "moved")
    progress.tick(START_S + 1, figures)
    assert [row["event"] for row in rows_of(tmp_path / "moved" / "log")] == ["listening", "progress"]
    assert "cannot be written" not in stream.getvalue()


def test_a_full_disk_turns_the_log_off_with_one_notice_and_training_goes_on():
    progress, stream = start(log=Path("/dev/full"))
    for second in range(1, 10):
        progress.tick(START_S + second, figures)
    progress.write_event(START_S + 9, "alone", "This node is alone.")
    notice = "The log /dev/full cannot be written (No space left on device) and is off from here; training goes on."
    assert stream.getvalue().splitlines() == [
        notice, "Node 3f2a91bc listens on 127.0.0.1:7700.", "3f2a91bc  This node is alone.",
    ]  # fmt: skip


def test_a_log_that_cannot_be_opened_is_refused_at_once(tmp_path):
    with pytest.raises(ConfigError, match=r"The log .*nowhere.* cannot be opened \(No such file or directory\)"):
        start(log=tmp_path / "nowhere" / "log")


def test_a_terminal_that_went_away_stops_nothing(tmp_path):
    progress, _ = start(log=tmp_path / "log", stream=Gone())
    progress.tick(START_S + 10, figures)
    progress.close(START_S + 11, figures())
    assert [row["event"] for row in rows_of(tmp_path / "log")] == ["listening", "progress", "final"]


def test_the_closing_table_shows_the_whole_run():
    progress, stream = start()
    progress.close(START_S + 60, figures())
    table = stream.getvalue()
    for shown in (
        "node 3f2a91bc", "1,204", "19,264 of the swarm's 77,056", "0.3123", "150 done, 1 failed", "0.024 s (median)",
        "30.0 MB, 20.0 MB",
    ):  # fmt: skip
        assert shown in table


def test_a_node_that_never_trained_prints_no_table_of_zeros():
    progress, stream = start()
    progress.close(START_S + 60, figures(steps=0))
    assert stream.getvalue() == "Node 3f2a91bc listens on 127.0.0.1:7700.\n"


def test_nothing_is_written_after_the_close(tmp_path):
    progress, stream = start(log=tmp_path / "log")
    progress.close(START_S + 1, figures())
    written = stream.getvalue(), (tmp_path / "log").read_bytes()
    progress.tick(START_S + 60, figures)
    progress.write_event(START_S + 61, "left", "Late.")
    assert (stream.getvalue(), (tmp_path / "log").read_bytes()) == written
