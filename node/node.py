"""Node, the public API for a training loop."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, Unpack

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from gossip.codecs import self_test
from gossip.errors import ConfigError
from node import running
from node.loop.arguments import checked_loss, checked_rate, checked_samples
from node.loop.data_calls import LEFT, DataCalls
from node.loop.live import LiveModel, Trained
from node.loop.training import TrainingSide
from node.model.inventory.items import Choices, Chosen, Inventory
from node.model.optimizers import Optimizers
from node.model.state import State
from node.observe.events import NodeEvent
from node.observe.members import Member
from node.observe.metrics import Metrics
from node.observe.notices import LOGGER
from node.observe.reduced import Reduced
from node.options import NodeOptions, takes_options
from node.ranks.channel import Channel
from node.ranks.leader import Leader
from node.ranks.ranks import Ranks
from node.ranks.side import RankSide
from node.settings import Settings, checked_seconds

if TYPE_CHECKING:  # A torch built without it has nodes of one process.
    from torch.distributed import ProcessGroup

__all__ = ["Member", "Metrics", "Node", "Reduced"]


@takes_options
class Node(DataCalls):
    """One node of a swarm in the background of a training loop, used as ``with Node(model, optimizer, ...) as node``.

    Args:
        model: A torch module, a mapping of names to tensors or writable arrays, or a :class:`~node.model.state.State`.
        optimizer: One or a list. Newcomers take over its state.
        group: A process group of torch.distributed that trains one model. All its ranks form this one node, and each
            makes a Node. The settings of rank 0 count. A model that is sharded over processes needs it.
        local: Tensors that are neither mixed nor given to newcomers: patterns of names ("head.*"), tensors or modules.
        copy: Tensors that are not mixed, and that newcomers take. Integers and frozen weights are such anyway.
        average: Tensors that are mixed although they require no gradient, as those of a teacher.
        **options: The rows of :mod:`node.options`, each None by default.

    Raises:
        LocalError: Or one of its kinds (ConfigError, IdentityError, LayoutError). One sentence says what to do.
    """

    def __init__(
        self, model: nn.Module | Mapping[str, Any] | State, optimizer: Optimizer | Sequence[Optimizer] | None = None, *,
        group: ProcessGroup | None = None, local: Chosen = (), copy: Chosen = (), average: Chosen = (),
        **options: Unpack[NodeOptions], ) -> None:  # fmt: skip
        self_test()  # fmt: skip
        if group is None:
            warn_of_ranks(model)
        model, optimizers = unwrapped(model), Optimizers(optimizer)
        if isinstance(model, State) and optimizers.all:
            raise ConfigError(f"A {type(model).__name__} brings its own state: leave optimizer out.")
        ranks = None if group is None else Ranks(Channel(group))
        choices = Choices(local, copy, average)
        if isinstance(model, State) and (local or copy or average):
            raise ConfigError(f"A {type(model).__name__} decides by its layout: leave local, copy and average out.")
        trained = Trained(model, optimizers, choices)
        # The side of the training loop: of a node of one process, of rank 0 of a group, or of another of its ranks.
        self._training: TrainingSide | RankSide
        if ranks is not None and not ranks.leads:
            self._training = RankSide(trained, ranks)
            self._prepare_data(model, self._training.samplers, optimizers)
            running.closes_with(self, self._training)
            return
        # With a group, a launcher's processes on other hosts are this node's own ranks, and no other members.
        place = running.free_place(model)
        settings = Settings.gather(options, launched=group is None, place=place)
        training_config = settings.config.for_training()
        settings = dataclasses.replace(settings, config=training_config)
        if ranks is None:
            self._training = TrainingSide(LiveModel(trained, training_config), settings)
        else:
            self._training = Leader(trained, settings, ranks)
        self._prepare_data(model, self._training.samplers, optimizers)
        running.closes_with(self, self._training, place)

    # -- life ----------------------------------------------------------------------------------------------------
    def start(self) -> Self:
        """Run the network, join, and return when this node holds weights to train.

        Entering the ``with`` block does the same; a program without one ends it with :meth:`close`.
        """
        if os.environ.get(running.INSPECTS):
            print(self.inventory())
            raise SystemExit(0)
        self._training.start()
        self._schedules.advance(must_know=False)
        return self

    def close(self) -> None:
        """Say LEFT and stop. Leaving the block does the same; a second call does nothing.

        If this node has taken steps since its last mix, it first mixes with up to three members that stay, within
        GOSSIP_GRACE seconds (5), mostly in milliseconds. It does not after an error of the loop.
        If a checkpoint is on its way to a store, the call then waits for it.
        """
        self.__exit__(None, sys.exception(), None)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        is_apart = self._is_unsettled and error is None and self._agreed_at != self._share.draws.steps
        if is_apart and not self.finished and self.metrics().exchanges_done:
            self._share.samplers.notify("apart", LEFT)
        self._is_unsettled = False
        self._share.draws.tell_of_part()
        self._training.leave(error)

    # -- the loop ------------------------------------------------------------------------------------------------
    def step(self, loss: Any = None, samples: int | None = None, lr: float | None = None) -> None:
        """Count a step and let finished exchanges land; call it after ``optimizer.step()``.

        It never waits for the network or a GPU.

        Args:
            loss: A scalar tensor or number, for display.
            samples: The step's samples, by default 1. Rows from :meth:`loader` or :meth:`shard` are counted as they
                are drawn, whatever this says. A tensor of one whole number will do; one on a GPU is waited for.
            lr: The learning rate, if the node was given no torch optimizer that has it.

        Raises:
            LocalError: The user has to fix something, as a ConfigError if samples are needed and unknown.
            FaultError: With ``on_fault="raise"``, after a fault of this library in the network side.
        """
        if lr is not None:
            self._training.learning_rate = checked_rate(lr)
        checked = checked_loss(loss)  # Before the rows that are drawn count.
        count = self._share.draws.take(None if samples is None else checked_samples(samples))
        self._training.step(checked, count)
        if self._schedules.all:
            self._schedules.advance()
        elif self._share.draws.epochs is not None:
            self._schedules.look_at_own_steps(self._share.samplers)

    def settle(self, seconds: float = 5.0, wait_s: float = 0.0) -> float | None:
        """Mix without training until the nodes agree.

        Call it before evaluating or saving, on every node at about the same time; :meth:`epochs` does at its end. The
        nodes settle on the weights that the model holds now, for instance the best ones, just loaded.

        Args:
            seconds: The most that this takes.
            wait_s: At the end of a run, a barrier before it: mix for at most this many seconds until all other members
                have also called this or are gone.

        Returns:
            The consensus distance, or None without other members.

        Raises:
            ConfigError: A time is negative or not finite.
        """
        times = checked_seconds("seconds", seconds, True), checked_seconds("wait_s", wait_s, True)
        distance = self._training.settle(*times)
        self._agreed_at = self._share.draws.steps if distance == 0.0 else -1
        return distance

    def finish(self, seconds: float = 5.0) -> None:
        """Mark the run as complete; call it at the end, with the final weights.

        Newcomers get these weights, other nodes end when most members say so, and a state directory remembers it. The
        call waits up to ``seconds`` while newcomers fetch the weights.
        """
        self._training.finish(checked_seconds("seconds", seconds, True))

    def merge(self, run: str) -> None:
        """Take the weights of another run that a notice named, after a trial and a backup; returns at once.

        Args:
            run: The run's name, 32 hexadecimal digits.

        Raises:
            LocalError: ``run`` is no such name.
        """
        self._training.merge(run)

    # -- readings ------------------------------------------------------------------------------------------------
    def inventory(self) -> Inventory:
        """Return every tensor of the model and its optimizers: name, shape, type, treatment and reason.

        ``print(node.inventory())`` shows a table. :mod:`node.model.inventory.items` says what the treatments mean.
        """
        return self._training.inventory()

    @property
    def id(self) -> str:
        """Return this node's id, 32 hexadecimal digits: the hash of its public key."""
        return self._training.me.hex()

    @property
    def address(self) -> str:
        """Return the "host:port" that others dial; "none" for a node that cannot be dialled."""
        return self._training.address

    @property
    def members(self) -> tuple[Member, ...]:
        """Return all members that this node knows, itself included.

        They are at most a quarter of a second old, or a second while no steps are taken.
        """
        return self._training.members()

    @property
    def swarm_samples(self) -> int:
        """Return the samples behind this run's weights, of the whole swarm, departed members and checkpoints included.

        Nodes average it at their exchanges; nodes of one pace agree within 1 % after a minute. It falls only at the end
        of :meth:`settle`.
        """
        return self._training.swarm_samples

    @property
    def finished(self) -> bool:
        """Return True if this node's run has finished.

        :meth:`finish` was called here or on most members, or the donors of this node's weights said so. A loop that
        checks it ends with its swarm, and that of a late node does not begin: ``while not node.finished and
        node.swarm_samples < samples``.
        """
        return self._training.finished

    def reduce(self, figures: Mapping[str, Any] | None = None) -> dict[str, Reduced]:
        """Share figures of this loop, like a validation accuracy, and return all members' figures, reduced by name.

        Living members with this run's weights count, by figures that may be some seconds old. It waits for no peer.

        Args:
            figures: Numbers by name, some eight at most.

        Raises:
            ConfigError: A value is no number, or there are too many names.
        """
        if not isinstance(figures, Mapping | None):
            raise ConfigError(f"reduce takes a mapping of names to numbers, and not {figures!r}.")
        self._share.draws.part = None
        return self._training.reduce(figures or {})

    def metrics(self) -> Metrics:
        """Return the current figures, as a mapping and as attributes; unknown ones are None."""
        return self._training.metrics()

    def on(self, kind: str, callback: Callable[[Any], object]) -> Callable[[], None]:
        """Call ``callback(event)`` with every event of a kind. May be called at any time.

        Events are frozen dataclasses of :mod:`node.observe.events`. The callback runs in a thread of its own. Its
        errors are logged. Events that come faster than it returns are dropped and counted.

        Args:
            kind: A kind, a prefix for all kinds below it ("exchange"), or "*" for all.
            callback: Takes the event.

        Returns:
            A function that removes the callback.

        Raises:
            ConfigError: There is no such kind.
        """
        return self._training.listeners.on(kind, callback)

    def history(self) -> tuple[NodeEvent, ...]:
        """Return the last 1,024 events, newest last."""
        return self._training.listeners.history()

    # -- checkpoints ---------------------------------------------------------------------------------------------
    def save(self, path: str | os.PathLike[str], keep: int = 1) -> None:
        """Write the model and the run's figures to ``path`` (safetensors), and the optimizer's state next to it.

        ``model.load_state_dict(safetensors.torch.load_file(path))`` reads the model. ``run.optimizer`` has the
        optimizer's state, and ``run.json`` describes both. For a URL the call returns once the checkpoint is in a local
        file, from which a thread sends it. :meth:`close` waits for what is on its way.

        Args:
            path: A path, or a URL that fsspec opens, as "s3://bucket/run".
            keep: The number of checkpoints to keep under this name; older ones become run.1.safetensors and so on.

        Raises:
            CheckpointError: In one sentence; the previous checkpoint is then intact.
        """
        self._training.save(path, keep)

    def export(self, path: str | os.PathLike[str]) -> None:
        """Write the model's tensors alone to ``path``, for programs that know nothing of this library.

        The names are those of the plain model, without a compiler's or a wrapper's prefixes. Tied tensors are written
        under each of their names, and every tensor keeps its type.

        Args:
            path: A path; without a suffix it gets ``.safetensors``.

        Raises:
            CheckpointError: In one sentence; the previous file is then intact.
        """
        self._training.export(path)

    def load(self, path: str | os.PathLike[str]) -> dict[str, Any]:
        """Continue the run of a checkpoint at a path or a URL, with a swarm of any size.

        A living swarm of the same run is ahead of any file, so its weights stay, and a notice says so. Weights of no
        run, as in any safetensors file of these names, are taken if nothing is trained yet.

        Returns:
            The checkpoint's figures.

        Raises:
            CheckpointError: The file cannot be loaded.
        """
        return self._training.load(path)

    def state_dict(self) -> dict[str, Any]:
        """Return the run's id, its progress, and the pass over the data, for checkpoints of other tools.

        Such checkpoints hold weights and optimizer themselves. The values are numbers, texts and booleans, as in JSON.
        """
        return self._training.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue the run of such a state. Call it once the model holds the weights again, before the node starts.

        A living swarm of that run is ahead, and its weights are taken. Without one, the run continues under its old
        name with the model's weights.

        Raises:
            CheckpointError: ``state`` is no such state.
        """
        self._training.load_state_dict(state)


def unwrapped(model: nn.Module | Mapping[str, Any] | State) -> nn.Module | Mapping[str, Any] | State:
    """Return the module inside torch's wrappers for data parallelism, which has the same tensors by their own names.

    With "module." before each name it would be another model to nodes that run without the wrapper.
    """
    inner = getattr(model, "_orig_mod", model)  # Of torch.compile around the wrapper.
    return inner.module if isinstance(inner, DistributedDataParallel | nn.DataParallel) else model


def warn_of_ranks(model: object) -> None:
    """Warn if each process of a DistributedDataParallel makes a node of its own.

    Such nodes would mix with others at other times, and their common gradients never bring them together again.
    """
    model = getattr(model, "_orig_mod", model)
    size = model.process_group.size() if isinstance(model, DistributedDataParallel) else 1
    if size > 1:
        LOGGER.warning(
            "This model is a DistributedDataParallel of %d processes, whose weights drift apart if each is a node: "
            "give Node their process group on all of them, as group=torch.distributed.group.WORLD.", size,
        )  # fmt: skip
