"""Node: what a training loop holds."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from gossip.codecs import self_test
from gossip.config import Config
from gossip.errors import ConfigError
from node import running
from node.data.sampler import ShareBatchSampler, ShareSampler
from node.data.sharding import Shard, samples_in
from node.model.optimizers import Optimizers
from node.model.state import State
from node.observe.events import NodeEvent
from node.observe.members import Member
from node.observe.metrics import Metrics
from node.observe.notices import LOGGER
from node.observe.reduced import Reduced
from node.ranks.channel import GroupChannel
from node.ranks.follower import Follower
from node.ranks.leader import Leader
from node.ranks.ranks import Ranks
from node.settings import Settings
from node.training import TrainingSide

if TYPE_CHECKING:  # a torch without it has nodes of one process
    from torch.distributed import ProcessGroup

__all__ = ["Member", "Metrics", "Node", "Reduced"]


class Node:
    """One node of a swarm beside an ordinary training loop; used as ``with Node(model, optimizer, ...) as node``.

    ``model``: a torch module, a mapping of names to tensors or writable arrays, or an object that brings its own
    :class:`~node.model.state.State`. ``optimizer``: one or a list, whose state newcomers take over. ``seeds``:
    "host:port" of any nodes, or invites, or "@path" of a file of such lines, or a function that gives such texts;
    names with all their addresses, files and functions are asked anew while nobody is there. Empty starts a swarm.
    ``listen``: "host:port", port 0 for a free one, "none" to only dial out; if not given 127.0.0.1, or where a launcher
    started members on other hosts the address on the way to them. ``advertise``: the address others
    should dial, when it differs. ``secret``: the file that holds the swarm's secret. ``state_dir``: where the
    node's key and address book are kept; None: a new identity at every start. ``join_or_fail_s``: raise LocalError,
    naming what became of each seed, unless the weights of a swarm are here within so many seconds; without it a
    node that reaches nobody starts alone in the end. ``wait_for``: return when so many members are here, this one
    included (1 if not given), or go on after ``wait_s`` seconds (60); raise LocalError then if a launcher started
    members on other hosts and none of them came. ``frozen``: exchange parameters that require
    no gradient as well, of a module where others do. ``page``: "host:port" of a page for browsers and monitors,
    docs/page.md. ``on_fault``: what a fault of this library in the network side comes to, "restart" (the default: the
    network side begins anew beside the loop) or "raise" (:meth:`step` raises FaultError). ``keep_average``: keep the
    average over the last mixes that :meth:`averaged` shows, one more vector of the model's size. What is not given
    comes from GOSSIP_SEEDS, GOSSIP_LISTEN, GOSSIP_ADVERTISE, GOSSIP_SECRET_FILE, GOSSIP_STATE_DIR, GOSSIP_CONFIG,
    GOSSIP_MUST_JOIN, GOSSIP_WAIT_FOR, GOSSIP_WAIT_S, GOSSIP_PAGE and GOSSIP_ON_FAULT.
    ``group``: a process group of torch.distributed that trains one model: all its ranks are this one node, and each
    makes a Node; of the settings above those of its rank 0 count.

    Raises LocalError and its kinds (ConfigError, IdentityError, LayoutError) with one sentence saying what to do.
    """

    def __init__(
        self,
        model: nn.Module | Mapping[str, Any] | State,
        optimizer: Optimizer | Sequence[Optimizer] | None = None,
        *,
        seeds: Iterable[str] | Callable[[], Iterable[str]] = (),
        listen: str | None = None,
        advertise: str | None = None,
        secret: str | os.PathLike[str] | None = None,
        state_dir: str | os.PathLike[str] | None = None,
        config: Config | None = None,
        join_or_fail_s: float | None = None,
        wait_for: int | None = None,
        wait_s: float | None = None,
        group: ProcessGroup | None = None,
        frozen: bool = False,
        page: str | None = None,
        on_fault: str | None = None,
        keep_average: bool = False,
    ) -> None:
        self_test()
        if group is None:
            warn_of_ranks(model)
        model, optimizers = unwrapped(model), Optimizers(optimizer)
        if isinstance(model, State) and optimizers.all:
            raise ConfigError(f"A {type(model).__name__} brings its own state: leave optimizer out.")
        ranks = None if group is None else Ranks(GroupChannel(group))
        self._training: TrainingSide | Follower
        if ranks is not None and not ranks.leads:
            self._training = Follower(model, optimizers, ranks, frozen, keep_average)
            running.closes_with(self, self._training)
            return
        settings = Settings.gather(
            seeds, listen, advertise, secret, state_dir, config, join_or_fail_s=join_or_fail_s, wait_for=wait_for,
            wait_s=wait_s, page=page, launched=group is None, on_fault=on_fault,
        )  # fmt: skip
        decided = settings.config.for_training(bool(optimizers.quasi_global))
        settings = dataclasses.replace(settings, config=decided)
        self._training = (
            TrainingSide(model, optimizers, settings, frozen, keep_average)
            if ranks is None
            else Leader(model, optimizers, settings, ranks, frozen, keep_average)
        )
        running.closes_with(self, self._training)

    # -- life ----------------------------------------------------------------------------------------------------
    def start(self) -> Self:
        """What entering the block does, for programs without one: run the network, join, and return when this node
        holds the weights that it is to train. :meth:`close` ends it."""
        self._training.average.check("start")
        self._training.start()
        return self

    def close(self) -> None:
        """Say LEFT and stop, in about a second at most; leaving the block does it. A second call does nothing."""
        self._training.close(sys.exception())

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._training.close(error)

    # -- the loop ------------------------------------------------------------------------------------------------
    def step(self, loss: Any = None, samples: int = 1, lr: float | None = None) -> None:
        """Call after ``optimizer.step()``: counts the step, and lets finished exchanges land between two steps.

        ``loss``: a scalar tensor or number, for people; ``samples``: the batch's size; ``lr``: the learning rate, where
        the node was given no torch optimizer that has it. Never waits for the network, nor for a GPU. Raises LocalError
        for what is the user's to mend, and with ``on_fault="raise"`` FaultError after a fault of this library in the
        network side.
        """
        self._training.average.check("step")
        if lr is not None:
            self._training.rate = lr
        self._training.step(loss, samples)

    def shard(self, dataset: Any, batch_size: int, shuffle: bool = True, epochs: int = 1) -> Iterator[Any]:
        """One pass (or ``epochs``) over this node's share of ``dataset``, in batches: divided by rendezvous hashing
        over the members alive, and looked up anew as they come and go: a dead member's part is covered again."""
        training, length = self._training, samples_in(dataset)
        # The swarm's count of passes, so that members agree on how this one is divided; our own where we are ahead.
        first = training.passes = max(training.passes, training.swarm_samples // length)
        shard = Shard(
            dataset, batch_size, shuffle, epochs, training.me, lambda: training.view.owners,
            lambda: training.view.changes, first, training.rank, training.size,
        )  # fmt: skip
        training.passes += epochs
        return iter(shard)

    def sampler(
        self,
        dataset_or_length: Any,
        batch_size: int | None = None,
        shuffle: bool = True,
        drop_last: bool = False,
        seed: int = 0,
    ) -> ShareSampler | ShareBatchSampler:
        """The same share as indices for a ``torch.utils.data.DataLoader`` of your own, with its workers, collating and
        pinning: with ``batch_size`` one to give as ``batch_sampler``, else as ``sampler``. Each ``iter`` is one pass;
        its ``state_dict`` is part of the node's. Raises DataError or ConfigError."""
        return self._training.samplers.make(dataset_or_length, batch_size, shuffle, drop_last, seed)

    def settle(self, seconds: float = 5.0, wait_s: float = 0.0) -> float | None:
        """Mix without training until the nodes agree, or for ``seconds``; returns the consensus distance (None when
        there was nobody). Call it before evaluating or saving, on every node about the same time; or with ``wait_s``,
        which at the end of a run makes it a meeting point: it mixes until all other members have called it too, have
        finished or are gone, for so many seconds at most, and then settles."""
        self._training.average.check("settle")
        return self._training.settle(seconds, wait_s)

    def finish(self, seconds: float = 5.0) -> None:
        """The run is complete: call it at the end, with the weights as they are to be. Newcomers get them and learn
        that nothing is left to train; others end when most members say so. A state directory remembers it. Waits while
        newcomers fetch the weights, for up to ``seconds``."""
        self._training.average.check("finish")
        self._training.finish(seconds)

    def merge(self, run: str) -> None:
        """Take the weights of another run, of which a notice told: ``run`` is its name, 32 hexadecimal digits. They are
        tried first, and the weights that are here are kept. Returns at once. Raises LocalError for what is no name."""
        self._training.merge(run)

    # -- what it says --------------------------------------------------------------------------------------------
    @property
    def id(self) -> str:
        """32 hexadecimal digits: the hash of this node's public key."""
        return self._training.me.hex()

    @property
    def address(self) -> str:
        """What others dial, "host:port"; "none" for a node that nobody can dial."""
        return self._training.address

    @property
    def members(self) -> tuple[Member, ...]:
        """Everybody this node knows of, itself included, at most a quarter of a second old, or a second where no steps
        are taken."""
        return self._training.members()

    @property
    def swarm_samples(self) -> int:
        """Samples behind the weights of this node's run: the whole swarm's, the departed and what a checkpoint says
        included. Nodes average the number at their exchanges. Nodes of one pace agree within 1 % after a minute. While
        this node holds the run, the number falls only at the end of :meth:`settle`, which brings the nodes' numbers
        together: until then a node shows the largest number that it had."""
        return self._training.swarm_samples

    @property
    def finished(self) -> bool:
        """Whether this node's run has reached its end: somebody called :meth:`finish`, here or on most members, or the
        members that gave this node its weights said so. A loop that asks ends with its swarm, and a late-comer's does
        not begin: ``while not node.finished and node.swarm_samples < samples``."""
        return self._training.finished

    def reduce(self, figures: Mapping[str, Any] | None = None) -> dict[str, Reduced]:
        """Tell the swarm figures of this loop's own, as a validation accuracy, and get back every name that anybody
        told, reduced over the members alive that hold this run's weights. Waits for nobody: of others it is what they
        told last, by now some seconds old. Raises ConfigError for what is no number, and beyond some eight names."""
        return self._training.reduce(figures or {})

    def metrics(self) -> Metrics:
        """A reading of now: figures by name, as a mapping and as attributes; None for what is not known yet."""
        return self._training.metrics()

    def on(self, kind: str, callback: Callable[[Any], object]) -> Callable[[], None]:
        """Call ``callback(event)`` with every event of this kind, of those below it ("exchange"), or of all ("*"):
        frozen dataclasses of :mod:`node.observe.events`. It runs in a thread of its own, beside loop and network; what
        it raises is logged, and what happens faster than it returns is dropped and counted. Returns what takes it
        back. May be called at any time. Raises ConfigError for a kind that there is not."""
        return self._training.listeners.on(kind, callback)

    def history(self) -> tuple[NodeEvent, ...]:
        """The last 1,024 events, newest last."""
        return self._training.listeners.history()

    # -- the model to evaluate -----------------------------------------------------------------------------------
    def averaged(self) -> AbstractContextManager[None]:
        """Have the model hold the average of its weights just after its last mixes: ``with node.averaged():`` around an
        evaluation. The block's end brings the training weights back, bit for bit. What exchanges bring meanwhile lands
        at the next step. Before the first mix, and after :meth:`settle`, the average is the training weights.

        Raises LocalError for a node that was made without ``keep_average``; so do calls within the block that go on
        training (:meth:`step`, :meth:`settle`, :meth:`finish`, :meth:`load`).
        """
        self._training.average.require()
        return self._training.average.shown()

    # -- checkpoints ---------------------------------------------------------------------------------------------
    def save(self, path: str | os.PathLike[str]) -> None:
        """Write model, optimizer and the run's figures to ``path`` (safetensors, a small JSON beside it), atomically.
        With ``keep_average`` the tensors' own names hold the average, and :meth:`load` goes on from the training
        weights, which stand beside it.

        Raises CheckpointError in one sentence; the previous checkpoint is then intact.
        """
        self._training.save(path)

    def load(self, path: str | os.PathLike[str]) -> dict[str, Any]:
        """Continue the run of a checkpoint, with a swarm of any size; returns its figures.

        A living swarm of the same run is ahead of any file, so then its weights stay, and that is said. Others with
        another run behind them merge by the rule for two runs: the one with fewer samples takes the other's weights.
        Weights of no run, as any safetensors file of these names, are taken where nothing is trained yet.
        """
        self._training.average.check("load")
        return self._training.load(path)

    def state_dict(self) -> dict[str, Any]:
        """For checkpoints that others write, which hold weights and optimizer already: which run this is, how far, and
        in which pass over the data. Numbers, texts and booleans alone, as JSON has them."""
        return self._training.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with the run of such a state. Call it once the weights are back in the model and before the node
        starts: a living swarm of that run is ahead, and its weights are taken then; where nobody is, the run goes on
        under its old name with the weights that are here. Raises CheckpointError for what is no such state."""
        self._training.average.check("load_state_dict")
        self._training.load_state_dict(state)


def unwrapped(model: nn.Module | Mapping[str, Any] | State) -> nn.Module | Mapping[str, Any] | State:
    """The module inside DistributedDataParallel, whose tensors are the same under their own names: with "module."
    before each it would be another model to nodes that run without it."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def warn_of_ranks(model: object) -> None:
    """A node of its own in each process of a DistributedDataParallel would mix with others at other times, and common
    gradients bring no two of them together again."""
    size = model.process_group.size() if isinstance(model, DistributedDataParallel) else 1
    if size > 1:
        LOGGER.warning(
            "This model is a DistributedDataParallel of %d processes, whose weights drift apart if each is a node: "
            "give Node their process group on all of them, as group=torch.distributed.group.WORLD.", size,
        )  # fmt: skip
