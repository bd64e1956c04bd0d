"""MLflow and Trackio log a node's figures as docs/page.md says."""

import re
import sqlite3
from pathlib import Path

import pytest
import torch

from gossip import Node
from node.adapters.loggers import Exporter

pytestmark = [pytest.mark.frameworks, pytest.mark.filterwarnings("ignore")]  # Ignore the libraries' own warnings.

PAGE = (Path(__file__).parents[2] / "docs" / "page.md").read_text(encoding="utf-8")


def train_with(library):
    """Train a few steps with the line of the page that logs to this library."""
    (line,) = re.findall(rf"export = (Exporter\(node, lambda .*{library.__name__}.*\))", PAGE)
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Node(model, optimizer) as node:
        export = eval(line, {"Exporter": Exporter, "node": node, library.__name__: library})
        for _ in range(3):
            optimizer.step()
            node.step(loss=0.25, samples=8)
        export.close()


def test_mlflow(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # Its other stores need more than mlflow-skinny.
    mlflow = pytest.importorskip("mlflow")
    mlflow.set_tracking_uri(f"file:{tmp_path}/runs")
    with mlflow.start_run() as run:
        train_with(mlflow)
    figures = mlflow.get_run(run.info.run_id).data.metrics
    assert (figures["gossip/steps"], figures["gossip/samples"]) == (3.0, 24.0)


def test_trackio(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path))
    trackio = pytest.importorskip("trackio")
    trackio.init(project="swarm", name="node-0")
    train_with(trackio)
    trackio.finish()
    with sqlite3.connect(tmp_path / "swarm.db") as database:
        ((step, figures),) = database.execute("select step, metrics from metrics").fetchall()
    assert step == 3
    assert b'"gossip/samples":24.0' in figures
