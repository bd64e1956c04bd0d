"""The recipe for early stopping, on two nodes: they stop together, and the file that is kept is the best of all."""

from __future__ import annotations

import threading
from functools import partial

import torch
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from gossip.config import Config
from node import Node
from node.cli.local import free_port
from node.data.splitting import split
from tests.node.test_recipes import BEGIN, RECIPES

(BLOCK,) = [block for title, block in RECIPES if title == "Early stopping and the best checkpoint"]


def test_all_stop_together_and_the_best_file_is_the_best(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    seed, programs = f"127.0.0.1:{free_port()}", []
    for options in ({"listen": seed}, {"seeds": [seed]}):
        program: dict[str, object] = {}
        exec(compile(BEGIN, "docs/recipes.md", "exec"), program)
        program["Node"] = partial(Node, config=Config(mix_every_steps=2), wait_for=2, **options)
        programs.append(program)
    threads = [threading.Thread(target=exec, args=(compile(BLOCK, "recipe", "exec"), each)) for each in programs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
        assert not thread.is_alive()
    first, second = programs
    assert first["epoch"] < 99, "labels that are random are never learned"
    assert abs(first["epoch"] - second["epoch"]) <= 1
    assert abs(first["node"].swarm_samples - second["node"].swarm_samples) <= 384, "within an epoch"
    assert (tmp_path / "best.safetensors").exists()
    model, best = first["model"], min(each["best"] for each in programs)
    with Node(model, config=Config(mix_every_steps=2)) as node, torch.no_grad():
        node.load(tmp_path / "best.safetensors")
        inputs, targets = zip(*split(TensorDataset(first["x"], first["y"]), [0.75, 0.25], 0)[1], strict=True)
        assert abs(F.cross_entropy(model(torch.stack(inputs)), torch.stack(targets)).item() - best) < 1e-6
