"""What the callbacks of all frameworks do alike: own the node, divide its data, and end it."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Sized
from itertools import islice
from types import TracebackType
from typing import Any, Self

import torch.distributed as dist
from torch.utils.data import Sampler

from gossip.errors import LocalError
from node.node import Node

__all__ = ["Adapter", "Block", "EpochSampler", "ScaleWatch"]


class Adapter:
    """A node that begins and ends with a framework's training.

    ``samples``: the whole swarm's: with so many behind the weights the run is over, and every node stops about the same
    time; None: the framework's own limits end the training. ``settle_s``: how long to mix without training, at the end
    and before evaluations and checkpoints. Everything else goes to :class:`node.node.Node`. Where the framework trains
    one model in several processes they are one node (``group``).

    ``node`` is the node: None before training begins, and a closed one, whose figures can still be read, afterwards.
    Raises TypeError for an argument that Node has not.
    """

    def __init__(self, *, samples: int | None = None, settle_s: float = 5.0, **options: Any) -> None:
        inspect.signature(Node).bind(None, None, **options)  # what is spelled wrong is told before training begins
        self.samples, self.settle_s, self.options = samples, settle_s, options
        self.node: Node | None = None
        self.running = False
        self.concluded = False
        self.saved: dict[str, Any] | None = None  # what a checkpoint says of the node
        self.ranks = 1  # processes that are this node

    # -- for programs --------------------------------------------------------------------------------------------
    def sampler(self, dataset: Sized) -> EpochSampler:
        """For a ``DataLoader(dataset, batch_size, sampler=...)``: this node's share, in an order of its own."""
        return EpochSampler(self, len(dataset))

    @property
    def progress(self) -> float:
        """How much of the run is done, 0 to 1, alike on all nodes: what a learning rate's schedule follows."""
        if not self.samples or self.node is None:
            return 0.0
        return 1.0 if self.over else min(1.0, self.node.swarm_samples / self.samples)

    @property
    def over(self) -> bool:
        """Whether there is nothing left to train."""
        node = self.node
        if node is None:
            return False
        return node.finished or (self.samples is not None and node.swarm_samples >= self.samples)

    def figures(self) -> dict[str, float]:
        """For loggers: what is known of the node, "gossip/..." each."""
        if self.node is None:
            return {}
        return {
            f"gossip/{name}": value for name, value in self.node.metrics().items() if isinstance(value, int | float)
        }

    # -- for the frameworks' callbacks -----------------------------------------------------------------------------
    def ready(self) -> None:
        """Start the node, unless it runs: a sampler may be asked before the framework says that training begins."""
        raise NotImplementedError

    @property
    def feeds(self) -> bool:
        """Whether data are given: a loop over none ends at once."""
        return not self.over

    def share_model(self, ranks: int) -> None:
        """So many processes train one model, each with a callback of its own: they are one node."""
        self.ranks = ranks
        if ranks > 1:
            self.options.setdefault("group", dist.group.WORLD)

    def begin(self, model: Any, optimizer: Any = None) -> None:
        node = Node(model, optimizer, **self.options)
        if self.saved is not None:
            node.load_state_dict(self.saved)
        self.node = node.start()
        self.running, self.concluded = True, node.finished  # a late-comer has the final weights
        self.conclude()

    def step(self, loss: Any, samples: int) -> bool:
        """One step of the framework's optimizer; whether the run is over, and the weights are what all agreed on."""
        if self.concluded:
            return True
        assert self.node is not None
        self.node.step(loss, samples)
        return self.conclude()

    def conclude(self) -> bool:
        """Where the run is over, agree with the others on its weights, which are given to whoever comes later."""
        if self.over and not self.concluded:
            assert self.node is not None
            self.settle()
            self.node.finish()
            self.concluded = True
        return self.concluded

    def settle(self) -> None:
        """Mix without training, where anybody is there to mix with."""
        if not self.running or self.concluded:
            return
        assert self.node is not None
        if any(member.state == "alive" for member in self.node.members[1:]):
            self.node.settle(self.settle_s)

    def kept(self) -> dict[str, Any] | None:
        """What a checkpoint says of the node; None before there was one."""
        if self.node is not None:
            self.saved = self.node.state_dict()
        return self.saved

    def close(self) -> None:
        """Leave the swarm; a second call does nothing."""
        if self.running:
            assert self.node is not None
            self.running = False
            try:
                self.kept()
            finally:
                self.node.close()


class Block(Adapter):
    """An adapter for frameworks that do not tell their callbacks when training fails: a ``with`` block around the
    training closes the node whatever ends it. A silent member would keep others waiting."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.entered = self.left = False

    def __enter__(self) -> Self:
        if self.left:
            raise LocalError(f"This {type(self).__name__} was used already: make a new one for each block.")
        self.entered = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.entered, self.left = False, True
        self.close()

    def check_entered(self) -> None:
        if not self.entered:
            name = type(self).__name__
            raise LocalError(f"Train inside the block: with {name}(...) as gossip. Leaving it takes the node away.")


class ScaleWatch:
    """Of half precision's gradient scaler, None where there is none: steps whose gradients were no numbers it leaves
    out, or has a fused optimizer leave out, and tells nobody. Its scale falls with each of them, and never otherwise.
    """

    def __init__(self, scaler: Any) -> None:
        self.scaler = scaler
        self.scale = self.read()

    def read(self) -> float:
        return 0.0 if self.scaler is None else float(self.scaler.get_scale())

    def left_out(self) -> bool:
        """Whether the last step was; ask once after each."""
        before, self.scale = self.scale, self.read()
        return self.scale < before


class EpochSampler(Sampler[int]):
    """Indices of this node's share, for any DataLoader.

    An epoch gives as many as the whole dataset holds, in as many passes of the swarm as that takes: what a framework
    derives from the length (steps, schedules, when to evaluate) is as it was without a swarm. Of several processes that
    are one node each gets its part. Where the run is over it gives nothing, and a late-comer trains nothing.
    """

    def __init__(self, adapter: Adapter, length: int) -> None:
        self.adapter, self.length = adapter, length
        self.node: Node | None = None
        self.passes: Iterator[int] = iter(())

    def __len__(self) -> int:
        return -(-self.length // self.adapter.ranks)

    def __iter__(self) -> Iterator[int]:
        self.adapter.ready()
        node = self.adapter.node
        assert node is not None
        if node is not self.node:
            self.node, self.passes = node, self.again_and_again(self.share(node))
        return islice(self.passes, len(self))

    def share(self, node: Node) -> Iterable[Any]:
        """A pass, at each turn through it."""
        return node.sampler(self.length)

    def again_and_again(self, share: Iterable[Any]) -> Iterator[int]:
        """Pass after pass; of one that an epoch leaves the next one gives the rest. A share may be empty in one."""
        while self.adapter.feeds:
            yield from share
