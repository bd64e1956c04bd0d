"""The dashboard and the alerts use only metrics and labels that exist, and the dashboard uses all of them."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("h11", reason="the page needs gossip-trainer[page]")
parser = pytest.importorskip("prometheus_client.parser", reason="the page needs gossip-trainer[page]")

from node.observe.events import ExchangeEvent  # noqa: E402
from node.observe.figures import Source  # noqa: E402
from node.observe.page.exposition import Exposition  # noqa: E402
from tests.harness.world import World  # noqa: E402

ROOT = Path(__file__).parents[3]
DASHBOARD = json.loads((ROOT / "deploy" / "grafana" / "gossip.json").read_text(encoding="utf-8"))
ALERTS = ROOT / "deploy" / "prometheus" / "alerts.yaml"
OURS = {"job", "instance", "le"}  # Labels that Prometheus adds.


@pytest.fixture(scope="module")
def text():
    """Return the metrics of a node as Prometheus reads them."""
    [node] = World(9).swarm(1)
    peer = node.peer
    peer.membership.update_me(1e9, loss=0.25)
    peer.exchanges.last_squares.append((0.5, 1.0))
    links = SimpleNamespace(bytes_sent=1234, bytes_received=56, ignored_messages=3, all=lambda: [])
    return Exposition().render(Source(peer, links, 7, 28, 30, (0.5,), (1e-6,)))


@pytest.fixture(scope="module")
def exposed(text):
    """Return the name of every sample, with its labels."""
    samples = [one for family in parser.text_string_to_metric_families(text.decode()) for one in family.samples]
    return {sample.name: set(sample.labels) for sample in samples}


def test_every_metric_of_dashboard_and_alerts_exists_with_its_labels(exposed):
    expressions = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
    alerts = re.findall(r"expr: (?:>-)?(.*?)\n +(?:for|labels):", ALERTS.read_text(encoding="utf-8"), re.DOTALL)
    assert len(expressions) > 15
    assert len(alerts) == 6
    for expression in (*expressions, *alerts):
        names = re.findall(r"gossip_\w+", expression)
        assert names, expression
        assert set(names) <= exposed.keys(), expression
        labels = set(re.findall(r"(\w+) *(?:=~|!=|=) *\"", expression))
        labels.update(name for found in re.findall(r"by \(([^)]*)\)", expression) for name in re.split(r", *", found))
        assert labels - OURS <= set().union(*(exposed[name] for name in names)), expression


def test_every_metric_is_on_the_dashboard_and_in_its_table(exposed):
    drawn = json.dumps(DASHBOARD)
    table = (ROOT / "docs" / "page.md").read_text(encoding="utf-8")
    for name in exposed:
        base = re.sub(r"_(bucket|count|sum|created)$", "", name)
        assert base in table, name
        assert base in drawn or base in ("gossip_messages_ignored_total", "gossip_events_dropped_total"), name


def test_the_histogram_counts_what_was_done():
    exposition = Exposition()
    done, failed = (ExchangeEvent(f"exchange.{end}", 0.0, 7, ("ab" * 16,), "fp32", 0.3) for end in ("done", "failed"))
    exposition.on_exchange(done), exposition.on_exchange(failed)
    assert exposition.registry.get_sample_value("gossip_exchange_seconds_count") == 1
    assert exposition.registry.get_sample_value("gossip_exchange_seconds_bucket", {"le": "0.5"}) == 1
    assert exposition.registry.get_sample_value("gossip_exchange_seconds_bucket", {"le": "0.25"}) == 0


@pytest.mark.skipif(not shutil.which("promtool"), reason="needs promtool: on Debian, apt-get install prometheus")
def test_promtool_accepts_the_alerts_and_the_metrics(text):
    for command, given in (("rules", b""), ("metrics", text)):
        words = ["promtool", "check", command, *([ALERTS] if command == "rules" else [])]
        done = subprocess.run(words, input=given, capture_output=True, check=False)
        assert done.returncode == 0, (done.stdout + done.stderr).decode()
