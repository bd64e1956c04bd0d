"""torchtitan: each torchrun shards a model over its ranks, and the nodes mix. On processors, over gloo."""

import json
import os
import sys
from pathlib import Path

import pytest

from tests.engines.launched import ROOT, Log, comes_back, goes_on, needs_package, trains_on

pytestmark = [pytest.mark.engines, needs_package("torchtitan"), needs_package("triton")]


@pytest.fixture
def start(launch, tmp_path):
    """``start("a", steps)`` starts a node of two ranks, with a tokenizer of bytes and modules of Python as its text."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    texts = [path.read_text() for path in sorted(Path(os.__file__).parent.glob("*.py"))[:60]]
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "text.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))

    def start_node(name, steps):
        return launch(
            name, tmp_path / name, sys.executable, "-m", "torch.distributed.run", "--standalone",
            "--nproc-per-node", "2", ROOT / "tests" / "engines" / "titan_on_cpu.py",
            "--module", "tests.engines.titan_on_cpu", "--config", "small", "--training.steps", steps,
            "--hf_assets_path", tmp_path, "--dataloader.dataset_path", tmp_path / "text", "--dump_folder", ".",
            PYTHONPATH=str(ROOT), HF_HOME=str(tmp_path / "cache"), HF_HUB_OFFLINE="1",
            GOSSIP_LOG=str(tmp_path / f"{name}.jsonl"), GOSSIP_SEEDS=f"@{tmp_path}/seeds", GOSSIP_STATE_DIR="state",
        )  # fmt: skip

    return start_node


def start_two(start, folder, steps):
    logs = [Log(folder / f"{name}.jsonl") for name in "ab"]
    jobs = [start(log.path.stem, steps) for log in logs]
    jobs[0].until(lambda: logs[0].addresses)
    (folder / "seeds").write_text(logs[0].addresses[0])
    return jobs, logs


def test_two_nodes_of_two_ranks_learn_and_end_with_the_same_weights(start, tmp_path):
    jobs, logs = start_two(start, tmp_path, 120)
    for job in jobs:
        assert job.process.wait(600) == 0, job.said()
    for log in logs:
        losses = [row["loss"] for row in log.rows("progress") if row["loss"] is not None]
        assert losses[0] > 6 > 4 > losses[-1], "an untrained model has 7.6"
        assert log.mixed(more=5)
    one, other = (log.rows("settled")[-1] for log in logs)
    assert one["distance"] == other["distance"] == 0
    assert one["digest"] == other["digest"]


def test_a_node_that_is_killed_comes_back_with_the_weights_of_the_other(start, tmp_path):
    jobs, logs = start_two(start, tmp_path, 1_000_000)
    for job, log in zip(jobs, logs, strict=True):
        job.until(log.mixed)
    jobs[1].end()
    trains_on(jobs[0], logs[0])
    jobs[1] = start("b", 1_000_000)
    comes_back(jobs[1], logs[1])
    goes_on(logs)
    assert [log.lives for log in logs] == [1, 2]
