"""A model as Node sees it: one flat float32 vector that is read, added to and written. Other models bring their own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gossip.arithmetic.layout import Layout, Segment
from gossip.arithmetic.mixing import finite
from gossip.averaging.boundary import Pending
from gossip.errors import CheckpointError, LayoutError

__all__ = ["State"]

Floats = NDArray[np.float32]
Positions = NDArray[np.int64]


class VectorState(ABC):
    """What a model that is neither a torch module nor a mapping of arrays brings along: :attr:`layout`, :meth:`read`,
    :meth:`add` and :meth:`write`. The rest has a default, there to be replaced by what is faster or knows more.

    **Vectors** are flat float32 arrays of ``layout.size`` elements: every tensor of the layout's ``segments``, in their
    order, each flattened with its last axis fastest. Where some segments are ``"frozen"``, which exchanges leave out,
    they come last; vectors to read and to add are then of ``layout.exchanged`` elements too, and :meth:`read_frozen` is
    to be given.

    **Threads.** All is called by the thread that trains, inside ``node.step()`` and the other calls that belong to it,
    so that nothing needs a lock; but for :meth:`buffer`, and a :class:`~gossip.averaging.boundary.Pending`'s ``done``,
    which any thread may ask. Once, before the first step, :meth:`begin_read_at` comes from the network's thread, while
    the training thread waits. A vector that is given belongs to the state until the call returns, or until what it
    returned is done; it may be used again afterwards.
    """

    layout: Layout
    """Names, shapes and types, the same on every node of a swarm. It never changes."""
    finite: bool | None = None
    """Whether all was that :meth:`begin_read` or :meth:`add_read` read last, where that was seen on the way; None where
    somebody else is to look."""
    weighs: bool = False
    """Whether :meth:`add_weighted` and :meth:`add_read` multiply in the pass that adds: they are then given what would
    else be multiplied in a pass of its own."""
    copy_s: float = 0.0
    """What the last read of all took of the training loop, of which copies that nobody asked for take a hundredth."""

    @abstractmethod
    def read(self, out: Floats) -> None:
        """``out[:] = weights[:out.size]``, as they are now: it is there when this returns."""

    @abstractmethod
    def add(self, shift: Floats) -> Pending | None:
        """``weights += shift``, each in its own type. None where it has happened; or a copy of ``shift`` under way,
        after which the sum is what every later step and :meth:`read` sees."""

    @abstractmethod
    def write(self, vector: Floats) -> None:
        """``weights[:] = vector``, as :meth:`add`, and done: others' weights take the place of these."""

    # -- faster ------------------------------------------------------------------------------------------------------
    def begin_read(self, out: Floats) -> Pending | None:
        """As :meth:`read`, of the weights as they are now; what is returned says when ``out`` holds them, and later
        steps change nothing of it."""
        self.read(out)
        return None

    def begin_read_piece(self, out: Floats, start: int) -> Pending | None:
        """``out[:]`` = the weights from ``start`` on, as :meth:`begin_read`: a piece for a newcomer, of a model of more
        than six million elements. A sixteenth or so is better read alone than, as here, with all others."""
        out[:] = self._read(self.layout.exchanged)[start : start + out.size]
        return None

    def begin_read_at(self, out: Floats, positions: Positions) -> Pending | None:
        """``out[:] = weights[positions]``, as :meth:`begin_read`; the positions are ascending."""
        out[:] = self._read(self.layout.exchanged)[positions]
        return None

    def read_frozen(self, out: Floats, start: int) -> None:
        """``out[:]`` = the elements from ``start`` on of what the layout calls ``"frozen"``, which follows all that
        exchanges carry and never changes: in any thread."""
        raise NotImplementedError

    def check(self) -> None:
        """Raise LayoutError where it cannot do what its layout asks for."""
        if self.layout.exchanged < self.layout.size and type(self).read_frozen is VectorState.read_frozen:
            raise LayoutError(
                f"The layout of {type(self).__name__} has frozen tensors and it has no read_frozen: define it, or name "
                "them buffers, which are exchanged."
            )

    def add_weighted(self, shift: Floats, weight: float) -> Pending | None:
        """``weights += weight shift``, as :meth:`add`; ``shift`` may be overwritten."""
        shift *= np.float32(weight)
        return self.add(shift)

    def add_scaled(self, values: Floats, factor: float, version: int) -> None:
        """``weights += factor values``, which are not changed. They are added again and again: ``version`` is another
        number once they are others, so that a copy on a device may be kept until then."""
        self.add(np.float32(factor) * values)

    def add_read(self, shift: Floats, weight: float) -> bool:
        """``weights += weight shift``, then ``shift[:] = weights``, where both together take less than :meth:`add` and
        :meth:`read`. False where they do not: nothing has changed."""
        return False

    def add_at(self, shift: Floats, positions: Positions) -> Pending | None:
        """``weights[positions] += shift``, as :meth:`add`."""
        spread = np.zeros(self.layout.exchanged, np.float32)
        spread[positions] = shift
        return self.add(spread)

    def merge(self, vector: Floats, ratio: float) -> Pending | None:
        """``weights += ratio (vector - weights)``, as :meth:`add`; ``vector`` may be overwritten."""
        vector -= self._read(vector.size)
        vector *= np.float32(ratio)
        return self.add(vector)

    def sound(self) -> bool:
        """Whether every weight is finite."""
        return finite(self._read(self.layout.size))

    def buffer(self, elements: int) -> Floats:
        """A vector to read into and add from: page-locked, say, where copies go to a device."""
        return np.zeros(elements, np.float32)

    def takes(self, vector: Floats) -> bool:
        """Whether a vector in other memory, which processes of this host share, does in the place of :meth:`buffer`'s.
        It does where nobody wrote a :meth:`buffer`."""
        return type(self).buffer is VectorState.buffer

    # -- an optimizer's state, behind the weights: for each key as many elements as are trained -----------------------
    @property
    def optimizer_keys(self) -> tuple[str, ...]:
        """Names of what newcomers get of the optimizer's state, sorted."""
        return ()

    @property
    def trained_elements(self) -> int:
        """Elements of one key."""
        return 0

    def optimizer_scalars(self) -> dict[str, float]:
        """The numbers that go with it (``step``)."""
        return {}

    def optimizer_range(self) -> range:
        """Where it lies in the vector that newcomers take."""
        return range(self.layout.size, self.layout.size + len(self.optimizer_keys) * self.trained_elements)

    def begin_read_optimizer(self, out: Floats, start: int) -> Pending | None:
        """``out[:]`` = the state for each key, one after another, from ``start`` of what newcomers take on, as
        :meth:`begin_read`."""
        assert not out.size, "a state with keys has to give them"
        return None

    def size(self) -> int:
        """Elements of the weights that exchanges carry."""
        return self.layout.exchanged

    def adopt(self, vector: Floats, optimizer_keys: tuple[str, ...], scalars: dict[str, float]) -> None:
        """As :meth:`write`, of the first ``layout.size`` elements, and of the optimizer's state where it is one that
        this state keeps too."""
        self.write(vector[: self.layout.size])

    def holds(self, vector: Floats) -> bool:
        """Whether ``vector`` was of the weights and this optimizer's state, and is what both are now."""
        return False

    # -- checkpoints -------------------------------------------------------------------------------------------------
    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint holds, by name."""
        whole = torch.from_numpy(self._read(self.layout.size))
        return {
            segment.name: whole[start:stop].reshape(segment.shape).to(getattr(torch, segment.dtype))
            for segment, start, stop in self._places()
        }

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """The reverse. Raises :class:`~gossip.errors.CheckpointError` before anything changes."""
        vector = np.empty(self.layout.size, np.float32)
        for segment, start, stop in self._places():
            given = tensors.get(segment.name)
            if given is None or tuple(given.shape) != segment.shape:
                found = "not there" if given is None else f"of shape {tuple(given.shape)}"
                raise CheckpointError(
                    f"it holds another model than this node's (tensor {segment.name!r} is {found} in the file and of "
                    f"shape {segment.shape} here)."
                )
            vector[start:stop] = given.to(torch.float32).reshape(-1).numpy()
        self.write(vector)

    def _places(self) -> Iterator[tuple[Segment, int, int]]:
        start = 0
        for segment in self.layout.segments:
            yield segment, start, start + segment.size
            start += segment.size

    def _read(self, elements: int) -> Floats:
        out = np.empty(elements, np.float32)
        self.read(out)
        return out


State = VectorState  # the word that users know; an exchange's session has states as well, of another kind
