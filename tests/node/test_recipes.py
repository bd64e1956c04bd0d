"""docs/recipes.md: every block runs, each after the lines that all of them begin with."""

import re
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "recipes.md").read_text(encoding="utf-8")
SECTIONS = PAGE.split("\n## ")
(BEGIN,) = re.findall(r"```python\n(.*?)```", SECTIONS[0], re.DOTALL)
RECIPES = [
    (section.partition("\n")[0], *re.findall(r"```python\n(.*?)```", section, re.DOTALL)) for section in SECTIONS[1:]
]
HEAVY = {
    "torch.compile": (pytest.mark.slow, pytest.mark.filterwarnings("default")),  # a C++ compiler's time; torch's own
    "Checkpoints of torch and transformers": (pytest.mark.filterwarnings("default"),),  # torch's own
    "Ignite": (pytest.mark.frameworks, pytest.mark.filterwarnings("default")),
}
TRACES = "Traces of exchanges (OpenTelemetry)"  # Its own test has a partner and a collector for it.


@pytest.mark.parametrize(
    ("title", "block"),
    [pytest.param(*row, id=row[0], marks=HEAVY.get(row[0], ())) for row in RECIPES if row[0] != TRACES],
)
def test_a_recipe_runs(title, block, monkeypatch, tmp_path):
    if title == "Ignite":
        pytest.importorskip("ignite", reason="make test-frameworks")
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {}
    for code in (BEGIN, block):
        exec(compile(code, f"docs/recipes.md, {title}", "exec"), namespace)
    node = namespace["node"]
    assert node.metrics().steps > 0


@pytest.mark.frameworks
@pytest.mark.filterwarnings("default")  # OpenTelemetry's own
def test_the_spans_of_exchanges_reach_a_collector(monkeypatch):
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="make test-frameworks")
    sent = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
    bodies, over = [], threading.Event()

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self):
            bodies.append((self.path, self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

    def train(other):
        while not over.wait(0.01):
            other.step()

    block = dict(RECIPES)[TRACES].replace("Node(model, optimizer)", "Node(model, optimizer, seeds=[other.address])")
    here = {}
    exec(BEGIN, here)
    with HTTPServer(("127.0.0.1", 0), Collector) as server, here["Node"](here["model"], here["optimizer"]) as other:
        recipe = {"other": other}
        threads = [threading.Thread(target=server.serve_forever), threading.Thread(target=train, args=(other,))]
        for thread in threads:
            thread.start()
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        try:
            exec(BEGIN + block, recipe)
        finally:
            over.set()
            server.shutdown()
            for thread in threads:
                thread.join()
    done = [event for event in recipe["node"].history() if event.kind == "exchange.done"]
    assert done
    assert {path for path, _ in bodies} == {"/v1/traces"}
    traces = [row for _, body in bodies for row in sent.ExportTraceServiceRequest.FromString(body).resource_spans]
    spans = [span for row in traces for scope in row.scope_spans for span in scope.spans if not span.status.code]
    assert [(span.name, span.end_time_unix_nano) for span in spans] == [("exchange", int(e.at_s * 1e9)) for e in done]
    lasted = [(span.end_time_unix_nano - span.start_time_unix_nano) / 1e9 for span in spans]
    assert lasted == pytest.approx([event.seconds for event in done], abs=1e-5)
    told = {row.key: row.value for row in spans[0].attributes}
    assert (told["gossip.partner"].string_value, told["gossip.bytes"].int_value) == (other.id, done[0].bytes_sent)
