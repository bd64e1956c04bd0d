"""The recipe for early stopping, on two nodes: they stop together, and end with the same weights, the best ones."""

import threading
from functools import partial

import torch
from safetensors.torch import load_file

from gossip.config import Config
from node import Node
from node.cli.local import free_port
from tests.node.test_recipes import BEGIN, RECIPES

(BLOCK,) = [block for title, block in RECIPES if title == "Early stopping and the best checkpoint"]


def test_all_stop_together_and_end_with_the_best_weights(tmp_path, monkeypatch):
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
    files = [load_file(file) for file in tmp_path.glob("best-*.safetensors")]
    best = first["best_weights"]
    states = [each["model"].state_dict() for each in programs]
    assert len(files) == 2
    assert all(torch.equal(state[name], value) for state in (*states, *files) for name, value in best.items())
