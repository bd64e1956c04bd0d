"""The callback for transformers' Trainer: the count of steps, its hooks, and the end of a run."""

import gc
import itertools
import json
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from gossip.config import Config
from gossip.errors import ConfigError, LocalError

transformers = pytest.importorskip("transformers", reason="make test-frameworks")
from transformers import Trainer, TrainerCallback, TrainingArguments  # noqa: E402

from node import running  # noqa: E402
from node.adapters.transformers import TransformersGossip  # noqa: E402
from tests.frameworks.plays import counts, record_settling  # noqa: E402

pytestmark = [pytest.mark.frameworks, pytest.mark.filterwarnings("default")]
QUICK = Config(mix_every_steps=2, join_timeout_s=3.0)


class Points(Dataset):
    """64 points of three classes; ``used`` lists the indices that were read."""

    def __init__(self):
        self.x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
        self.used = []

    def __len__(self):
        return 64

    def __getitem__(self, index):
        self.used.append(index)
        return {"x": self.x[index], "labels": torch.tensor(index % 3)}


class Classifier(nn.Module):
    def __init__(self, hook=lambda: None, factor=1):
        super().__init__()
        self.layer, self.hook, self.factor = nn.Linear(4, 3), hook, factor

    def forward(self, x, labels):
        self.hook()
        logits = self.layer(x)
        return {"loss": self.factor * F.cross_entropy(logits, labels), "logits": logits}


class Recorder(TrainerCallback):
    """A callback that keeps the logs, as the callbacks of report_to do."""

    def __init__(self):
        self.logs = {}

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.logs |= logs


def trainer(folder, model=None, callbacks=(), **options):
    quiet = {
        "per_device_train_batch_size": 8, "num_train_epochs": 1, "use_cpu": True, "report_to": "none",
        "disable_tqdm": True, "log_level": "error", "save_strategy": "no", "dataloader_pin_memory": False,
        "logging_steps": 2,
    }  # fmt: skip
    points = Points()
    return Trainer(
        model or Classifier(), TrainingArguments(str(folder), **quiet | options),
        train_dataset=points, eval_dataset=points, callbacks=list(callbacks),
    )  # fmt: skip


def gossip(training, **options):
    return TransformersGossip(training, **{"config": QUICK, "settle_s": 0.5} | options)


def trained(training, **options):
    """Train to the end with a node, and return its callback."""
    with gossip(training, **options) as callback:
        training.train()
    return callback


def test_a_step_of_the_optimizer_is_a_step_however_many_batches_it_takes(tmp_path):
    callback = trained(trainer(tmp_path, gradient_accumulation_steps=2))
    assert counts(callback) == (4, 64)


def joined(features):
    """Return a batch of one row, as collators without padding make it."""
    one = {name: torch.stack([feature[name] for feature in features]) for name in features[0]}
    return {"x": one["x"][None], "labels": one["labels"][None]}


class Joined(Classifier):
    def forward(self, x, labels):
        return super().forward(x[0], labels[0])


@pytest.mark.parametrize("accumulated", [1, 2])
@pytest.mark.parametrize(("size", "divide"), [(24, True), (24, False), (100, True)])
def test_a_short_last_batch_counts_its_rows(tmp_path, accumulated, size, divide):
    training = trainer(
        tmp_path, gradient_accumulation_steps=accumulated, per_device_train_batch_size=size, num_train_epochs=2
    )
    assert counts(trained(training, divide=divide))[1] == 2 * 64
    assert "get_batch_samples" not in vars(training)


def test_a_batch_that_does_not_show_its_samples_counts_as_full(tmp_path):
    training = trainer(tmp_path, Joined(), per_device_train_batch_size=24)
    training.data_collator = joined
    assert counts(trained(training)) == (3, 72)


@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_torch_fused"])  # The fused one skips steps by itself.
def test_a_step_that_half_precision_left_out_is_none(optim, tmp_path):
    training = trainer(tmp_path, Classifier(factor=8), num_train_epochs=4, optim=optim)
    scaler = training.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
    callback = trained(training)
    left_out = 127 - round(math.log2(scaler.get_scale()))
    assert 0 < left_out < 32
    assert counts(callback)[0] == 32 - left_out


def test_every_logger_gets_the_nodes_figures(tmp_path):
    recorder = Recorder()
    training = trainer(tmp_path)
    training.callback_handler.callbacks.insert(1, recorder)  # The place of report_to's callbacks, before a user's.
    trained(training)
    assert recorder.logs["gossip/samples"] == 64
    assert "gossip/steps" in recorder.logs


def test_a_training_that_raises_takes_its_node_away(tmp_path, train, until):
    calls = []

    def fail():
        calls.append(1)
        if len(calls) == 4:
            assert [member.state for member in other.node.members[1:]] == ["alive"]
            raise ZeroDivisionError

    model = Classifier()
    other = train(model, torch.optim.SGD(model.parameters(), lr=0.1))
    training = trainer(tmp_path, Classifier(fail))
    with pytest.raises(ZeroDivisionError), gossip(training, seeds=[other.node.address]) as callback:
        training.train()
    until(lambda: [member.state for member in other.node.members[1:]] == ["left"])
    assert counts(callback)[0] == 3


def test_the_run_ends_with_the_swarms_samples_evaluated_and_saved(tmp_path):
    recorder = Recorder()
    training = trainer(
        tmp_path, callbacks=[recorder], max_steps=1000, eval_strategy="steps", eval_steps=500, save_strategy="steps"
    )
    with gossip(training, samples=100) as callback:
        training.train()
        assert counts(callback) == (13, 104)
    assert training.state.global_step == 13
    assert "eval_loss" in recorder.logs
    assert (tmp_path / "checkpoint-13" / "trainer_state.json").exists()


def test_a_late_comer_trains_nothing(tmp_path):
    ended = []
    for expected in ((13, 104), (0, 0)):
        gc.collect()  # The first trainer and its callback hold each other.
        running.trained_runs().clear()  # As in another process: in this one a later Node begins a run of its own.
        training = trainer(tmp_path, max_steps=1000)
        assert counts(trained(training, samples=100, state_dir=tmp_path / "state")) == expected
        ended = [*ended, training.model.layer.weight.detach().clone()]
    assert torch.equal(*ended), "it has what the run ended with"
    assert training.train_dataset.used == []


def test_an_epoch_is_as_long_as_without_a_swarm(tmp_path):
    training = trainer(tmp_path, num_train_epochs=2)
    trained(training)
    assert sorted(training.train_dataset.used) == sorted(list(range(64)) * 2), "alone a node has all of the data"
    assert training.state.global_step == 16


def test_a_checkpoint_holds_the_run(tmp_path):
    trained(trainer(tmp_path, save_strategy="steps", save_steps=8))
    said = json.loads((tmp_path / "checkpoint-8" / "trainer_state.json").read_text())
    assert said["stateful_callbacks"]["TransformersGossip"]["attributes"]["saved"]["swarm_samples"] == 64
    again = trainer(tmp_path, num_train_epochs=2, save_strategy="steps", save_steps=8)
    with gossip(again) as callback:
        again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-8"))
    assert counts(callback) == (8, 64)
    assert callback.node.swarm_samples == 128


def test_a_checkpoint_of_a_training_without_a_node_can_be_gone_on_with(tmp_path):
    trainer(tmp_path, save_strategy="steps", save_steps=8).train()
    again = trainer(tmp_path, num_train_epochs=2, save_strategy="steps", save_steps=8)
    with gossip(again) as callback:
        again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-8"))
    assert callback.node.swarm_samples == 64


def test_nodes_agree_before_they_evaluate_and_save(tmp_path, train):
    model = Classifier()
    other = train(model, torch.optim.SGD(model.parameters(), lr=0.1))
    training = trainer(tmp_path, eval_strategy="steps", eval_steps=4, save_strategy="steps", save_steps=6)
    with gossip(training, seeds=[other.node.address], settle_s=20.0) as callback:
        settled = record_settling(callback, lambda: training.state.global_step)
        training.train()
    assert settled == [4, 6, 8, 8]  # The last entry is the end of training.


def test_a_trainer_is_as_it_was_after_the_block(tmp_path):
    training = trainer(tmp_path)
    before = list(training.callback_handler.callbacks)
    with gossip(training):
        pass
    assert training.callback_handler.callbacks == before
    training.train()
    assert training.state.global_step == 8


def test_a_block_is_entered_once_and_trains_one_model(tmp_path):
    training = trainer(tmp_path)
    training.model_init = lambda: Classifier()  # The class itself will not do, since transformers counts arguments.
    with gossip(training) as callback:
        training.train()
        with pytest.raises(LocalError, match="another model"):
            training.train()
    with pytest.raises(LocalError, match="used already"), callback:
        pass


def test_training_outside_the_block_is_refused(tmp_path):
    training = trainer(tmp_path)
    gossip(training)
    with pytest.raises(LocalError, match="inside the block"):
        training.train()


def test_options_that_cannot_work_are_refused_at_once(tmp_path):
    training = trainer(tmp_path, restore_callback_states_from_checkpoint=True)
    with pytest.raises(ConfigError, match="restore_callback_states_from_checkpoint"):
        gossip(training)
    with pytest.raises(TypeError, match="seed"):
        gossip(trainer(tmp_path), seed=["127.0.0.1:1"])


@pytest.mark.parametrize("nodes", [1, 2, 4])
@pytest.mark.parametrize("kind", ["linear", "cosine"])
def test_the_schedule_ends_with_the_run_however_many_nodes_train_it(tmp_path, train, until, nodes, kind):
    """``max_steps`` is the steps that one process would need. Without the others' steps the rate ends at 1 - 1/N."""
    rates = []

    class Rates(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            rates.append((callback.progress, training.lr_scheduler.get_last_lr()[0]))

    training = trainer(
        tmp_path, max_steps=400, learning_rate=0.003, lr_scheduler_type=kind, warmup_steps=40, callbacks=[Rates()]
    )
    others = [train(Classifier())]
    others += [train(Classifier(), seeds=[others[0].node.address]) for _ in range(nodes - 2)] if nodes > 1 else []
    with gossip(training, samples=3200, seeds=[others[0].node.address] if nodes > 1 else []) as callback:
        training.train()
    assert len(rates) <= 400 if nodes == 1 else len(rates) < 400
    assert rates[-1][1] <= 0.003 * 0.02, "at the end of its way"
    # The rate lies between the progress at the ends of two steps, which the other nodes may raise by any amount. The
    # trainer's own steps count too: while progress stands, after a mix with a node that was behind, they lead.
    position = 0.0
    for (earlier, _), (progress, rate) in itertools.pairwise(rates[:-1]):
        position = min(max(position + 1 / 400, progress), 1.0)
        if earlier > 0.15:
            assert expected(kind, position) - 0.02 <= rate / 0.003 <= expected(kind, earlier) + 0.02


def expected(kind, progress):
    """Return the factor of transformers' schedules after a warm-up of a tenth."""
    trained = (progress - 0.1) / 0.9
    return 1 - trained if kind == "linear" else 0.5 * (1 + math.cos(math.pi * trained))
