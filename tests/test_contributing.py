"""CONTRIBUTING.md: its examples are two files each, and all work in one copy of the packages."""

import json
import os
import re
import shutil
from pathlib import Path

import pytest

from tests.harness import warm

ROOT = Path(__file__).parents[1]
SECTIONS = dict(re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", (ROOT / "CONTRIBUTING.md").read_text("utf-8"), re.M | re.S))

Files = dict[str, str]

SELECTION, MIXING, FILTER, CODEC, EFFECT, FIGURE = (
    "A new rule for whom to mix with", "A new way of mixing", "A new filter", "A new codec", "A new effect",
    "A new figure",
)  # fmt: skip
FILES = {
    SELECTION: ["gossip/config/selections.py", "gossip/selection/backwards.py"],
    MIXING: ["gossip/config/mixings.py", "gossip/exchange/gentle.py"],
    FILTER: ["gossip/config/filters.py", "gossip/filters/within.py"],
    CODEC: ["gossip/codecs/cut.py", "gossip/codecs/__init__.py"],
    EFFECT: ["gossip/effects.py", "gossip/averaging/averager.py"],
    FIGURE: ["gossip/view.py", "node/observe/figures.py", "sim/report/measures.py", "sim/report/figures.py"],
}


def files_of(section: str) -> Files:
    """Return the final texts of the files that a section's examples make or change, by path.

    The lines added to a file stand below a line that occurs exactly once in it.
    """
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
                follows = at >= 0 and lines[at + 1] == line[1:]  # The second line of a context.
                assert follows or lines.count(line[1:]) == 1, f"{path} has several such lines: {line[1:]}"
                at = at + 1 if follows else lines.index(line[1:])
        files[path] = "\n".join(lines)
    return files


@pytest.mark.parametrize("section", FILES)
def test_each_example_is_two_files(section):
    assert list(files_of(section)) == FILES[section]


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    """Return the results of :data:`PLAY` in a copy of the packages with the files of all sections."""
    folder = tmp_path_factory.mktemp("copy")
    files: Files = {}
    for section in FILES:
        made = files_of(section)
        assert not made.keys() & files.keys(), section
        files |= made
    head = "FILTERS: dict[str, FilterRule] = {\n"
    row = '    "median": FilterRule("median:Median", "takes the middle of a group\'s values", groups=True),\n'
    assert head in files["gossip/config/filters.py"]
    files["gossip/config/filters.py"] = files["gossip/config/filters.py"].replace(head, head + row)
    files["gossip/filters/median.py"] = MEDIAN
    for package in ("gossip", "node", "sim"):
        # The bytecode too, so that few modules are compiled, but not what another process is writing.
        shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns("*.pyc.*"))
    for path, text in files.items():
        (folder / path).write_text(text, encoding="utf-8")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GOSSIP_")}
    environment["PYTHONPATH"] = os.pathsep.join((str(folder), str(ROOT)))  # ROOT holds the tests' helpers.
    done = warm.run("-c", PLAY, anew=True, cwd=folder, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("selection", {"choices": ", backwards", "refusal": "'backwards' cannot work"}),
        ("mixing", {"choices": ", gentle", "meaning": "`gentle` a quarter of the way to each other"}),
        ("filter", {"choices": ", within", "meaning": "`within` refuses who is further away than we are long",
                    "refusal": "filter = 'within' judges a pair"}),
        ("groups", {}),
        ("codec", {"choices": ", fp24, auto"}),
    ],
)  # fmt: skip
def test_each_example_mixes_and_is_documented(played, kind, said):
    seen = played[kind]
    assert {name for name, words in said.items() if words not in seen[name]} == set()
    assert min(seen["mixed"]) > 5
    assert seen["documented"]
    assert kind != "filter" or seen["refused"]["within"] > 5, "of liars, who are twice as far away as one is long"
    assert kind != "groups" or seen["asked"]


@pytest.mark.parametrize("kind", ["selection", "mixing", "filter", "codec", "groups"])
def test_the_simulator_plays_each_by_its_own_code_or_refuses_it(played, kind):
    """The fast level implements none of the examples."""
    key = {"groups": "mixing"}.get(kind, kind)
    assert played[kind]["reason"] == f"the fast level cannot represent gossip.{key}"
    assert played[kind]["beyond"].startswith(f"gossip.{key} is beyond fidelity = 'exchange'")


def test_an_effect_of_vectors(played):
    assert played["effect"] == ["sim", ["node", True, True]]


def test_a_figure_of_a_node_and_one_of_a_simulation(played):
    seen = played["figures"]
    assert seen["row"]["exchanging"] == 0
    assert seen["line"].endswith("  0 now")
    assert "| `exchanging` | now | exchanges | log, line, `node.metrics()` |" in seen["page"]
    assert seen["head"].endswith(",events,furthest")
    assert min(seen["furthest"][1:]) > 0
    assert "furthest" in seen["report"]
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

# The program runs each configuration in both drivers, which must end bit for bit the same, and simulates it among
# liars. It performs the effect in both drivers, and reads the figures of two real nodes and of a simulation.
PLAY = """
import json
import os
import sys
import threading
import time
from pathlib import Path

import numpy as np
import trio

import gossip
import node
from gossip.codecs import self_test
from gossip.config import Config
from gossip.config.reference import page, range_text
from gossip.config.setting import settings_of
from gossip.effects import Outdate
from gossip.errors import ConfigError
from node.observe import figures as node_figures
from sim.engine.swarm import Swarm
from sim.report import figures, pages
from sim.scenario.fidelity import fidelity_of
from sim.scenario.scenario import Scenario
from sim.simulation import simulate
from sim.world.network import NetworkModel
from tests.agreement.scenario import Scenario as Agreed
from tests.agreement.test_agreement import both, trio_of_peers
from tests.harness.configs import tuned
from tests.node.offline import runtime

assert Path(gossip.__file__).parent == Path("gossip").resolve(), "the copy is what runs"
self_test()


def play(key, what, **changes):
    ends = both(Agreed(trio_of_peers(), 15.0, tuned(chunk_elements=1024, **changes)))
    small = dict(peers=6, duration_s=8.0, task=dict(dataset="averaging", elements=400), gossip=changes)
    alone = Scenario.from_mapping(small)
    try:
        alone.replace(fidelity="exchange")
        beyond = ""
    except ConfigError as error:
        beyond = str(error)
    result = simulate(Scenario.from_mapping({**small, "attackers": {"share": 0.2}}), progress=False)
    try:
        Config(**{"mixing": "group", **changes})
        refusal = ""
    except ConfigError as error:
        refusal = str(error)
    return {
        "choices": range_text(*settings_of(Config)[key]), "meaning": settings_of(Config)[key][1].meaning,
        "refusal": refusal,
        "mixed": [end.exchanges[0] for end in ends.values()], "refused": result.summary["refused"],
        "documented": what in page(), "reason": fidelity_of(alone).reason, "beyond": beyond,
        "asked": Path("asked").exists(),
    }


def effect():
    swarm = Swarm(0, NetworkModel(), Config())
    host = swarm.hosts[swarm.add_peer(np.zeros(8, np.float32))]
    vectors, forgotten = type(host.averager.vectors), []
    usual, vectors.forget_snapshot = vectors.forget_snapshot, lambda self: forgotten.append("sim")
    swarm.perform(host, [Outdate()])
    vectors.forget_snapshot = usual

    async def node():
        node = runtime()
        vector = node.streams.pool.take()
        node.streams.pool.keep_snapshot(vector)
        before = node.streams.pool.take_last_snapshot() is vector
        node.perform([Outdate()])
        forgotten.append(("node", before, node.streams.pool.take_last_snapshot() is None))

    trio.run(node)
    return forgotten


def train(seeds, ended):
    until = time.monotonic() + 30
    with node.Node({"w": np.zeros(8, np.float32)}, seeds=seeds, config=Config(mix_every_steps=2)) as here:
        os.environ.pop("GOSSIP_LOG", None)
        other = None
        while here.metrics().exchanges_done < 3 and time.monotonic() < until:
            here.step(samples=1)
            time.sleep(0.01)
            if not seeds and other is None:
                other = threading.Thread(target=train, args=([here.address], ended))
                other.start()
        ended.append(here.metrics().exchanges_done)
        while len(ended) < 2 and time.monotonic() < until:
            here.step(samples=1)
            time.sleep(0.01)
    if other is not None:
        other.join()


def read_figures():
    os.environ["GOSSIP_LOG"] = "log.jsonl"
    mixed = []
    train([], mixed)
    assert len(mixed) == 2 and min(mixed) >= 3, mixed
    row = json.loads(Path("log.jsonl").read_text().splitlines()[-1])
    small = dict(peers=6, duration_s=8.0, task=dict(dataset="averaging", elements=8))
    result = simulate(Scenario.from_mapping(small), progress=False)
    return {
        "row": row, "line": node_figures.line_of(row), "page": node_figures.reference_page(),
        "head": result.csv_text().splitlines()[0], "furthest": list(result.column("furthest")),
        "report": [*pages.rows_table(result).heads], "sim_page": figures.page(),
    }


seen = {
    "selection": play("selection", "backwards", selection="backwards"),
    "mixing": play("mixing", "`gentle` a quarter of the way to each other", mixing="gentle"),
    "filter": play("filter", "`within` refuses who is further away than we are long", filter="within"),
    "codec": play("codec", "moniqua4, fp24, auto", codec="fp24"),
    "groups": play("filter", "`median` takes the middle", mixing="group", filter="median"),
    "effect": effect(),
}
sys.stdout, stdout = sys.stderr, sys.stdout
seen["figures"] = read_figures()
print(json.dumps(seen), file=stdout)
"""
