"""CONTRIBUTING.md: its examples are two files each, and do what it says when they are put into the packages."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SECTIONS = dict(re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", (ROOT / "CONTRIBUTING.md").read_text("utf-8"), re.M | re.S))

Files = dict[str, str]


def files_of(section: str) -> Files:
    """The files that the examples of a section make or change, by their paths, as they are then. What is added to one
    stands below a line that is there already, and there alone."""
    files: Files = {}
    for kind, path, body in re.findall(r"```(python|diff)\n# (\S+)\n(.*?)```", SECTIONS[section], re.S):
        if kind == "python":
            assert not (ROOT / path).exists(), path
            files[path] = body
            continue
        lines = files.get(path, (ROOT / path).read_text("utf-8")).split("\n")
        at = -1
        for line in body.splitlines():
            if line.startswith("+"):
                at += 1
                lines.insert(at, line[1:])
            else:
                assert lines.count(line[1:]) >= 1, f"{path} has no such line any more: {line[1:]}"
                follows = at >= 0 and lines[at + 1] == line[1:]  # a second line of what is there
                assert follows or lines.count(line[1:]) == 1, f"{path} has several such lines: {line[1:]}"
                at = at + 1 if follows else lines.index(line[1:])
        files[path] = "\n".join(lines)
    return files


@pytest.fixture
def python(tmp_path):
    """Runs a script with the packages of a copy that has these files; gives what it wrote on stdout, as JSON."""

    def run(files: Files, script: str) -> object:
        for package in ("gossip", "node", "sim"):
            shutil.copytree(ROOT / package, tmp_path / package)  # Bytecode too: what is unchanged is not compiled.
        for path, text in files.items():
            (tmp_path / path).write_text(text, encoding="utf-8")
        environment = {name: value for name, value in os.environ.items() if not name.startswith("GOSSIP_")}
        environment["PYTHONPATH"] = os.pathsep.join((str(tmp_path), str(ROOT)))  # the tests' helpers are in ROOT
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(script)], cwd=tmp_path, env=environment, timeout=120, check=False,
            capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run


# Plays a configuration in both drivers, which must end bit for bit the same, and simulates it among liars.
PLAY = """
    import json
    import gossip
    from gossip.config import Config
    from gossip.config.reference import described, page
    from gossip.errors import ConfigError
    from pathlib import Path
    from sim.scenario.scenario import Scenario
    from sim.simulation import simulate
    from gossip.codecs import self_test
    from tests.agreement.test_agreement import both, trio_of_peers
    from tests.agreement.scenario import Scenario as Agreed
    from tests.harness.configs import tuned

    assert Path(gossip.__file__).parent == Path("gossip").resolve(), "the copy is what runs"
    self_test()
    ends = both(Agreed(trio_of_peers(), 15.0, tuned(chunk_elements=1024, **{changes})))
    small = dict(peers=6, duration_s=8.0, task=dict(dataset="averaging", elements=400), gossip={changes})
    result = simulate(Scenario.from_mapping({{**small, "attackers": {{"share": 0.2}}}}), progress=False)
    try:
        Config(**{{"mixing": "group", **{changes}}})
        refusal = ""
    except ConfigError as error:
        refusal = str(error)
    print(json.dumps({{
        "choices": described("{key}")["range"], "meaning": described("{key}")["meaning"], "refusal": refusal,
        "mixed": [end.exchanges[0] for end in ends.values()], "refused": result.summary["refused"],
        "documented": {what!r} in page(),
    }}))
"""


def test_a_rule_for_whom_to_mix_with_is_two_files(python):
    files = files_of("A new rule for whom to mix with")
    assert list(files) == ["gossip/config/selections.py", "gossip/selection/backwards.py"]
    changes = {"selection": "backwards"}
    seen = python(files, PLAY.format(changes=changes, key="selection", what="backwards"))
    assert seen["choices"].endswith(", backwards")
    assert "'backwards' cannot work" in seen["refusal"]
    assert min(seen["mixed"]) > 5
    assert seen["documented"]


def test_a_way_of_mixing_is_two_files(python):
    files = files_of("A new way of mixing")
    assert list(files) == ["gossip/config/mixings.py", "gossip/exchange/gentle.py"]
    said = "`gentle` a quarter of the way to each other"
    seen = python(files, PLAY.format(changes={"mixing": "gentle"}, key="mixing", what=said))
    assert seen["choices"].endswith(", gentle")
    assert seen["meaning"].endswith(said)
    assert min(seen["mixed"]) > 5
    assert seen["documented"]


def test_a_filter_is_two_files(python):
    files = files_of("A new filter")
    assert list(files) == ["gossip/config/filters.py", "gossip/filters/within.py"]
    said = "`within` refuses who is further away than we are long"
    seen = python(files, PLAY.format(changes={"filter": "within"}, key="filter", what=said))
    assert seen["choices"].endswith(", within")
    assert seen["meaning"].endswith(said)
    assert "filter = 'within' judges a pair" in seen["refusal"]
    assert min(seen["mixed"]) > 5
    assert seen["refused"]["within"] > 5, "of liars, who are twice as far away as one is long"
    assert seen["documented"]


def test_a_filter_of_groups_is_two_files_as_well(python, tmp_path):
    rows, head = "gossip/config/filters.py", "FILTERS: dict[str, FilterRule] = {\n"
    text = (ROOT / rows).read_text("utf-8")
    assert head in text
    row = '    "median": FilterRule("median:Median", "takes the middle of a group\'s values", groups=True),\n'
    files = {rows: text.replace(head, head + row), "gossip/filters/median.py": MEDIAN}
    changes = {"mixing": "group", "filter": "median"}
    seen = python(files, PLAY.format(changes=changes, key="filter", what="`median` takes the middle"))
    assert min(seen["mixed"]) > 5
    assert (tmp_path / "asked").exists()
    assert seen["documented"]


def test_an_effect_of_vectors_is_two_files(python):
    files = files_of("A new effect")
    assert list(files) == ["gossip/effects.py", "gossip/averaging/averager.py"]
    script = """
        import json
        import numpy as np
        import trio
        from gossip.config import Config
        from gossip.effects import Outdate
        from sim.engine.swarm import Swarm
        from sim.world.network import NetworkModel
        from tests.node.offline import runtime

        swarm = Swarm(0, NetworkModel(), Config())
        host = swarm.hosts[swarm.add_peer(np.zeros(8, np.float32))]
        forgotten = []
        type(host.averager.vectors).forget = lambda self: forgotten.append("sim")
        swarm.perform(host, [Outdate()])

        async def main():
            node = runtime()
            vector = node.streams.pool.take()
            node.streams.pool.keep(vector)
            before = node.streams.pool.recall() is vector
            node.perform([Outdate()])
            forgotten.append(("node", before, node.streams.pool.recall() is None))

        trio.run(main)
        print(json.dumps(forgotten))
    """
    assert python(files, script) == ["sim", ["node", True, True]]


def test_a_codec_is_two_files(python):
    files = files_of("A new codec")
    assert list(files) == ["gossip/codecs/cut.py", "gossip/codecs/__init__.py"]
    seen = python(files, PLAY.format(changes={"codec": "fp24"}, key="codec", what="moniqua4, fp24, auto"))
    assert seen["choices"].endswith(", fp24, auto")
    assert min(seen["mixed"]) > 5
    assert seen["documented"]


def test_a_figure_of_a_node_and_one_of_a_simulation_are_two_files_each(python):
    files = files_of("A new figure")
    assert list(files) == [
        "gossip/view.py", "node/observe/figures.py", "sim/report/measures.py", "sim/report/figures.py",
    ]  # fmt: skip
    seen = python({**files, "train.py": TRAIN}, FIGURES)
    assert seen["row"]["exchanging"] == 0
    assert seen["line"].endswith("  0 under way")
    assert "| `exchanging` | now | exchanges | log, line, `node.metrics()` |" in seen["page"]
    assert seen["head"].endswith(",events,furthest")
    assert min(seen["furthest"][1:]) > 0
    assert ">furthest</th>" in seen["report"]
    assert "| `furthest` | the longest distance from the average |" in seen["sim_page"]


MEDIAN = """
from pathlib import Path
import numpy as np
from gossip.filters.rule import Filter

class Median(Filter):
    def mean(self, vectors):
        Path("asked").touch()
        return np.median(vectors, axis=0).astype(np.float32)
"""

# Two real nodes with a log each, and a simulation.
TRAIN = """
import time
import torch
from node import Config, Node

until = time.monotonic() + 30
with Node({"w": torch.zeros(8)}, config=Config(mix_every_steps=2)) as node:
    while node.metrics().exchanges_done < 3 and time.monotonic() < until:
        node.step(samples=1)
        time.sleep(0.01)
"""
FIGURES = """
    import json
    import sys
    import gossip
    from gossip.__main__ import main
    from node.observe.figures import line_of, page
    from pathlib import Path
    from sim.report import figures, pages
    from sim.scenario.scenario import Scenario
    from sim.simulation import simulate

    assert Path(gossip.__file__).parent == Path("gossip").resolve(), "the copy is what runs"
    sys.argv = ["gossip", "local", "-n", "2", "--log-dir", "logs", "train.py"]
    try:
        main()
    except SystemExit as ended:
        assert not ended.code, Path("logs/node-0.err").read_text()
    row = json.loads(Path("logs/node-0.jsonl").read_text().splitlines()[-1])
    small = dict(peers=6, duration_s=8.0, task=dict(dataset="averaging", elements=8))
    result = simulate(Scenario.from_mapping(small), progress=False)
    print(json.dumps({
        "row": row, "line": line_of(row), "page": page(), "head": result.csv_text().splitlines()[0],
        "furthest": list(result.column("furthest")), "report": pages.rows_table(result), "sim_page": figures.page(),
    }))
"""
