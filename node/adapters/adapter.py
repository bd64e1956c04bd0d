"""The common part of the callbacks for frameworks: make the node, divide its data, and close it."""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Iterable, Iterator, Sized
from itertools import islice
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch.utils.data import Sampler

from gossip.errors import LocalError
from node.adapters.loggers import PREFIX, numbers
from node.model.scalars import HostCopy
from node.node import Node

__all__ = ["Adapter", "ContextAdapter", "EpochSampler", "ScaleWatch"]


class Adapter:
    """A node that begins and ends with a framework's training.

    The run is *over* when nothing is left to train. The nodes then settle: they mix without training until they agree.
    With these final weights each node finishes the run, which gives them to newcomers. The node leaves the swarm when
    the framework's training ends.

    Args:
        samples: The samples after which the run ends, counted over the whole swarm, so that all nodes stop at about
            the same time. None: the framework's own limits end the training.
        settle_s: Seconds to mix without training, at the end and before evaluations and checkpoints.
        **options: Passed to :class:`node.node.Node`. If the framework trains one model in several processes, these are
            one node, and ``group`` is set.

    Raises:
        TypeError: Node has no such option.

    Attributes:
        node: The node. None before training begins; afterwards a closed one, whose figures can still be read.
    """

    def __init__(self, *, samples: int | None = None, settle_s: float = 5.0, **options: Any) -> None:
        inspect.signature(Node).bind(None, None, **options)  # Report a misspelled option before training begins.
        # Iterators as `head.parameters()` would be used up by the first of several nodes.
        lists = {name: tuple(one) for name, one in options.items() if isinstance(one, Iterator)}
        self.samples, self.settle_s, self.options = samples, settle_s, options | lists
        self.node: Node | None = None
        self.is_in_swarm = False  # From `begin` to `close`.
        self.has_final_weights = False  # The run has ended, and the nodes have settled.
        self.saved: dict[str, Any] | None = None  # The node's state, for a checkpoint or from one; None until then.
        self.ranks = 1  # The number of processes that form this node.

    # -- for programs --------------------------------------------------------------------------------------------
    def sampler(self, dataset: Sized) -> EpochSampler:
        """Return a sampler of this node's share, shuffled, for ``DataLoader(dataset, batch_size, sampler=...)``.

        Args:
            dataset: The dataset, of which only the length is used.
        """
        return EpochSampler(self, len(dataset))

    @property
    def progress(self) -> float:
        """Return the finished share of the run, 0 to 1 and the same on all nodes, for learning rate schedules."""
        if not self.samples or self.node is None:
            return 0.0
        return 1.0 if self.over else min(1.0, self.node.swarm_samples / self.samples)

    @property
    def over(self) -> bool:
        """Return True if nothing is left to train: a node has finished the run, or the swarm has its samples."""
        node = self.node
        if node is None:
            return False
        return node.finished or (self.samples is not None and node.swarm_samples >= self.samples)

    def figures(self) -> dict[str, float]:
        """Return the node's known figures as "gossip/..." for loggers."""
        figures = {} if self.node is None else numbers(self.node.metrics())
        return {PREFIX + name: value for name, value in figures.items()}

    # -- for the frameworks' callbacks -----------------------------------------------------------------------------
    def ready(self) -> None:
        """Begin unless the node is in the swarm: a sampler may be used before the framework begins to train."""
        raise NotImplementedError

    @property
    def has_data(self) -> bool:
        """Return True if samplers still give indices. After the run they give none, which ends the framework's loop."""
        return not self.over

    def form_node(self, ranks: int) -> None:
        """Form one node from ``ranks`` processes that train one model, each with its own callback."""
        self.ranks = ranks
        if ranks > 1:
            self.options.setdefault("group", dist.group.WORLD)

    def begin(self, model: Any, optimizer: Any = None) -> None:
        """Make the node of this model, from the saved state if there is one, and join the swarm."""
        node = Node(model, optimizer, **self.options)
        if self.saved is not None:
            node.load_state_dict(self.saved)
        self.node = node.start()
        self.is_in_swarm = True
        self.has_final_weights = node.finished  # A node that joins a finished run has got the final weights.
        self.finish_if_over()  # A run may have all its samples when it is resumed, although no node has finished it.

    def step(self, loss: Any, samples: int) -> bool:
        """Report a step of the framework's optimizer.

        Returns:
            True if the run has ended and the weights are the final ones, on which all nodes agree.
        """
        if self.has_final_weights:
            return True
        assert self.node is not None
        self.node.step(loss, samples)
        return self.finish_if_over()

    def finish_if_over(self) -> bool:
        """Once the run has ended, settle on the final weights and finish the run.

        Returns:
            True if the weights are the final ones.
        """
        if self.over and not self.has_final_weights:
            assert self.node is not None
            self.settle()
            self.node.finish()
            self.has_final_weights = True
        return self.has_final_weights

    def settle(self) -> None:
        """Mix without training, if there is a live member to mix with; final weights stay as they are."""
        if not self.is_in_swarm or self.has_final_weights:
            return
        assert self.node is not None
        others = self.node.members[1:]  # The first is this node.
        if any(member.state == "alive" for member in others):
            self.node.settle(self.settle_s)

    def node_state(self) -> dict[str, Any] | None:
        """Return the node's state for a checkpoint; None if there has been no node."""
        if self.node is not None:
            self.saved = self.node.state_dict()
        return self.saved

    def close(self) -> None:
        """Keep the node's state and leave the swarm; a second call does nothing."""
        if self.is_in_swarm:
            assert self.node is not None
            self.is_in_swarm = False
            try:
                self.node_state()
            finally:
                self.node.close()


class ContextAdapter(Adapter):
    """An adapter for frameworks that do not tell their callbacks when training fails.

    Train inside its ``with`` block, which closes the node even then. A member that vanished would delay others.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.entered = self.exited = False  # An adapter serves one block.

    def __enter__(self) -> Self:
        if self.exited:
            raise LocalError(f"This {type(self).__name__} was used already: make a new one for each block.")
        self.entered = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.entered, self.exited = False, True
        self.close()

    def check_entered(self) -> None:
        """Raise LocalError outside the block."""
        if not self.entered:
            name = type(self).__name__
            raise LocalError(f"Train inside the block: with {name}(...) as gossip. Leaving it takes the node away.")


class ScaleWatch:
    """A detector of optimizer steps that mixed precision's gradient scaler skips.

    The scaler skips a step with non-finite gradients, or makes a fused optimizer skip it, and reports it nowhere. But
    its scale falls with each skipped step, and only then. ``scaler`` is None where there is none.

    On CUDA the scale is copied to the host in the background, so that training does not wait for the device. A skipped
    step is then known a few steps later, and the call for a later step reports it.
    """

    MAX_COPIES = 64  # Pending copies of scales: a host is hardly more steps ahead of its device.

    def __init__(self, scaler: Any) -> None:
        self.scaler = scaler
        self.copies: deque[HostCopy] = deque()
        self.unreported_count = 0  # Skipped steps that no call has reported yet.
        self.scale = 0.0 if scaler is None else float(scaler.get_scale())  # The last one seen; 0 without a scaler.

    def take_skipped_step(self) -> bool:
        """Return True if a step was skipped that no call has reported yet; call it once after each step."""
        scale = getattr(self.scaler, "_scale", None)
        if not isinstance(scale, torch.Tensor) or not scale.is_cuda:
            before, self.scale = self.scale, 0.0 if self.scaler is None else float(self.scaler.get_scale())
            return self.scale < before
        if len(self.copies) < self.MAX_COPIES:
            self.copies.append(HostCopy(scale))
        while self.copies and self.copies[0].done():
            before, self.scale = self.scale, float(self.copies.popleft().values)
            self.unreported_count += self.scale < before
        if self.unreported_count:
            self.unreported_count -= 1
            return True
        return False


class EpochSampler(Sampler[int]):
    """A sampler of this node's share, for any DataLoader.

    An epoch has as many indices as the whole dataset, in as many passes of the swarm as that takes. So everything that
    a framework derives from the length (steps, schedules, evaluations) is the same as without a swarm. Each of several
    processes that form one node gets its part. Once the run has ended the sampler is empty, so a late-comer trains
    nothing.
    """

    def __init__(self, adapter: Adapter, length: int) -> None:
        self.adapter, self.length = adapter, length
        self.node: Node | None = None  # The node whose indices are given.
        self.indices: Iterator[int] = iter(())  # Those of all further passes.

    def __len__(self) -> int:
        return -(-self.length // self.adapter.ranks)

    def __iter__(self) -> Iterator[int]:
        self.adapter.ready()
        node = self.adapter.node
        assert node is not None
        if node is not self.node:
            self.node, self.indices = node, self.endless_passes(self.share(node))
        return islice(self.indices, len(self))

    def share(self, node: Node) -> Iterable[Any]:
        """Return the node's share of the data; each iteration over it is a pass of the swarm."""
        return node.sampler(self.length)

    def endless_passes(self, share: Iterable[Any]) -> Iterator[int]:
        """Yield pass after pass; the next epoch continues an unfinished pass. The share of a pass may be empty."""
        while self.adapter.has_data:
            yield from share
