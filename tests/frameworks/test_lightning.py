"""The callback for Lightning: the count of steps, its hooks, and the end of a run."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from gossip.config import Config
from gossip.errors import ConfigError

lightning = pytest.importorskip("lightning.pytorch", reason="make test-frameworks")
from lightning.pytorch.callbacks import ModelCheckpoint  # noqa: E402
from lightning.pytorch.loggers.logger import Logger  # noqa: E402
from lightning.pytorch.plugins.precision import MixedPrecision  # noqa: E402
from lightning.pytorch.strategies import FSDPStrategy  # noqa: E402

from node import running  # noqa: E402
from node.adapters.lightning import LightningGossip  # noqa: E402
from tests.frameworks.plays import counts, record_settling  # noqa: E402

pytestmark = [pytest.mark.frameworks, pytest.mark.filterwarnings("default")]
QUICK = Config(mix_every_steps=2, join_timeout_s=3.0)
DATA = TensorDataset(torch.randn(64, 4, generator=torch.Generator().manual_seed(0)), torch.arange(64) % 3)


class Classifier(lightning.LightningModule):
    """One layer; ``hook`` is called before each training step."""

    def __init__(self, hook=lambda number: None):
        super().__init__()
        self.layer, self.hook, self.used = nn.Linear(4, 3), hook, []

    def training_step(self, batch, number):
        self.hook(number)
        self.used += batch[1].tolist()
        return F.cross_entropy(self.layer(batch[0]), batch[1])

    def validation_step(self, batch, number):
        self.log("loss", F.cross_entropy(self.layer(batch[0]), batch[1]))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Both(Classifier):
    """A classifier with manual optimization, which steps two optimizers after every second batch."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, number):
        loss = super().training_step(batch, number)
        self.manual_backward(loss)
        if number % 2:
            for optimizer in self.optimizers():
                optimizer.step()
                optimizer.zero_grad()

    def configure_optimizers(self):
        return [torch.optim.SGD([one], lr=0.1) for one in (self.layer.weight, self.layer.bias)]


class Recorder(Logger):
    name = version = "recorder"

    def __init__(self):
        super().__init__()
        self.logged = {}

    def log_metrics(self, metrics, step=None):
        self.logged |= metrics

    def log_hyperparams(self, *args, **kwargs):
        pass


def gossip(**options):
    return LightningGossip(**{"config": QUICK, "settle_s": 0.5} | options)


def trainer(*callbacks, **options):
    quiet = {
        "accelerator": "cpu", "devices": 1, "logger": False, "enable_checkpointing": False, "max_epochs": 1,
        "enable_progress_bar": False, "enable_model_summary": False, "num_sanity_val_steps": 0,
    }  # fmt: skip
    return lightning.Trainer(callbacks=list(callbacks), **quiet | options)


def loader(callback=None, batch_size=8, workers=0):
    if callback is None:
        return DataLoader(DATA, batch_size)
    return DataLoader(DATA, batch_size, sampler=callback.sampler(DATA), num_workers=workers)


def test_a_step_of_the_optimizer_is_a_step_however_many_batches_it_takes():
    callback = gossip()
    trainer(callback, accumulate_grad_batches=2).fit(Classifier(), loader(callback))
    assert counts(callback) == (4, 64)


def test_two_optimizers_by_hand_count_once_for_their_batches():
    callback = gossip()
    trainer(callback).fit(Both(), loader())
    assert counts(callback) == (4, 64)


def test_a_step_that_half_precision_left_out_is_none():
    callback, scaler = gossip(), torch.amp.GradScaler("cpu", init_scale=2.0**24)
    plugin = MixedPrecision("16-mixed", "cpu", scaler)
    trainer(callback, plugins=[plugin]).fit(Classifier(), loader())
    left_out = 24 - round(math.log2(scaler.get_scale()))
    assert 0 < left_out < 8
    assert counts(callback)[0] == 8 - left_out


def test_the_loss_is_the_batchs_own_and_not_the_part_that_accumulating_leaves_of_it():
    callback, seen = gossip(), []
    begin = callback.step
    callback.step = lambda loss, samples: seen.append(float(loss)) or begin(loss, samples)
    torch.manual_seed(0)
    model = Classifier()
    with torch.no_grad():
        model.layer.weight.zero_()
        model.layer.bias.zero_()
    trainer(callback, accumulate_grad_batches=4, max_steps=1).fit(model, loader())
    assert seen == pytest.approx([1.0986], abs=1e-3)  # ln 3, the loss of an untrained model.


def test_every_logger_gets_the_nodes_figures():
    callback, loggers = gossip(), [Recorder(), Recorder()]
    trainer(callback, logger=loggers, log_every_n_steps=2).fit(Classifier(), loader())
    for one in loggers:
        assert one.logged["gossip/samples"] == 64
        assert "gossip/steps" in one.logged


def test_a_training_that_raises_takes_its_node_away(train, until):
    def fail(number):
        if number == 3:
            assert [member.state for member in other.node.members[1:]] == ["alive"]
            raise ZeroDivisionError

    model = Classifier()
    other = train(model, torch.optim.SGD(model.parameters(), lr=0.1))
    callback = gossip(seeds=[other.node.address])
    with pytest.raises(ZeroDivisionError):
        trainer(callback).fit(Classifier(fail), loader())
    until(lambda: [member.state for member in other.node.members[1:]] == ["left"])
    assert callback.node.metrics().steps == 3  # The metrics stay readable after the end.


def test_the_run_ends_with_the_swarms_samples_and_a_late_comer_trains_nothing(tmp_path):
    callback = gossip(samples=100, state_dir=tmp_path)
    training = trainer(callback, max_epochs=-1)
    training.fit(Classifier(), loader(callback))
    assert counts(callback) == (13, 104)
    assert callback.progress == 1.0
    assert training.global_step == 13
    running.trained_runs().clear()  # As in another process: in this one a later Node begins a run of its own.
    late = gossip(samples=100, state_dir=tmp_path)
    model = Classifier()
    trainer(late, max_epochs=-1).fit(model, loader(late))
    assert (counts(late), model.used) == ((0, 0), [])


@pytest.mark.parametrize("workers", [0, 1])
def test_an_epoch_is_as_long_as_without_a_swarm(workers):
    callback, model = gossip(), Classifier()
    trainer(callback, max_epochs=2).fit(model, loader(callback, workers=workers))
    assert len(model.used) == 128
    assert sorted(model.used[:64]) == sorted(DATA.tensors[1].tolist()), "alone a node has all of the data"


def test_a_checkpoint_holds_the_run(tmp_path):
    callback = gossip()
    training = trainer(callback)
    training.fit(Classifier(), loader())
    training.save_checkpoint(tmp_path / "one.ckpt")
    again = gossip()
    trainer(again, max_epochs=2).fit(Classifier(), loader(), ckpt_path=tmp_path / "one.ckpt")
    assert counts(again) == (8, 64)
    assert again.node.swarm_samples == 128


def test_a_checkpoint_holds_what_two_nodes_agreed_on_and_that_of_a_validation_what_it_saw(train, tmp_path):
    model = Classifier()
    other = train(model, torch.optim.SGD(model.parameters(), lr=0.1))
    callback, validated = gossip(seeds=[other.node.address], settle_s=20.0), []
    settled = record_settling(callback, lambda: training.global_step)

    class Watch(lightning.Callback):
        def on_validation_end(self, trainer, module):
            validated.append(module.layer.weight.detach().clone())

    every = ModelCheckpoint(tmp_path / "every", every_n_train_steps=3, save_top_k=-1)
    best = ModelCheckpoint(tmp_path / "best", monitor="loss", every_n_epochs=1)
    training = trainer(callback, Watch(), every, best, enable_checkpointing=True)
    training.fit(Classifier(), loader(), loader())
    assert settled == [3, 6, 8, 8]  # Two checkpoints, the validation, and the end of training.
    saved = torch.load(best.best_model_path, weights_only=False)
    assert torch.equal(saved["state_dict"]["layer.weight"], validated[0])
    assert saved["callbacks"]["LightningGossip"]["node"]["samples"] == 64
    assert "save_checkpoint" not in vars(training), "the trainer is as it was"


def test_a_sharded_model_and_an_unknown_option_are_refused():
    callback = gossip()
    sharded = type("Two", (), {"world_size": 2, "strategy": FSDPStrategy()})
    with pytest.raises(
        ConfigError, match=r"FSDPStrategy does not hold the whole model in each of its 2 processes.*ddp"
    ):
        callback.setup(sharded, Classifier(), "fit")
    with pytest.raises(TypeError, match="seed"):
        LightningGossip(seed=["127.0.0.1:1"])
