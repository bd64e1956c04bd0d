"""The interface to a model: one flat float32 vector that is read, added to and written."""

from abc import ABC, abstractmethod
from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gossip.arithmetic.layout import Layout
from gossip.arithmetic.mixing import is_finite
from gossip.arithmetic.moments import MomentForm
from gossip.averaging.model import Pending, Upload
from gossip.averaging.vectors import Moments, Statistics
from gossip.errors import CheckpointError, LayoutError
from node.model.inventory.items import Inventory, Item
from node.model.inventory.statistics import StatisticsMixer
from node.model.optimizer.moments import LiveMoments
from node.model.optimizer.optimizer_state import OptimizerState

EXCHANGED = ("parameter", "buffer")  # The kinds that exchanges carry.

Floats = NDArray[np.float32]
Positions = NDArray[np.int64]


class VectorState(ABC):
    """The base class for a model that is neither a torch module nor a mapping of arrays.

    A subclass gives :attr:`layout`, :meth:`read`, :meth:`add` and :meth:`write`. All else has defaults, which a
    subclass may replace by faster ones.

    **Vectors** are flat float32 arrays of ``layout.size`` elements. They hold every tensor of the layout's ``segments``
    in order, each flattened with its last axis fastest. ``"frozen"`` segments come last and are not exchanged. If there
    are any, vectors to read and to add may also have ``layout.exchanged`` elements, and :meth:`read_frozen` is
    required.

    **Threads.** The training thread makes nearly all calls, inside ``node.step()`` and related calls, so they need no
    lock. Any thread may call :meth:`buffer`, :meth:`read_frozen`, :meth:`begin_upload`, :meth:`has_positions`,
    :meth:`prepare_positions` and a :class:`~gossip.averaging.model.Pending`'s ``done``. The network's thread calls
    :meth:`enter_thread` when it starts, and :meth:`begin_read_at` once before the first step, while the training thread
    waits. A vector argument belongs to the state until the call returns, or until the returned Pending is done.
    """

    layout: Layout
    """Names, shapes and types, the same on every node of a swarm. It never changes."""
    finite: bool | None = None
    """True if all values that :meth:`begin_read` or :meth:`add_read` read last are finite; None if not checked."""
    adds_weighted: bool = False
    """True if :meth:`add_weighted` and :meth:`add_read` multiply in the same pass as they add.

    Callers then use them instead of multiplying in a pass of their own.
    """
    locks: bool = False
    """True if :meth:`buffer` locks pages, which takes long: a worker thread then allocates the vectors of exchanges."""
    changes: int = 0
    """A number that differs once the program has written into the weights; constant if that is unknown."""
    copy_s: float = 0.0
    """Seconds that the last full read took from the loop, of whose time copies made in advance may take 1 %."""
    is_standing: bool = True
    """True if the training thread may read the weights now: those of several ranks while all stand at a boundary."""

    @abstractmethod
    def read(self, out: Floats) -> None:
        """Set ``out[:] = weights[:out.size]``, complete when this returns."""

    @abstractmethod
    def add(self, shift: Floats) -> Pending | None:
        """Add ``shift`` to the weights, each in its own type.

        Returns:
            None if it has happened; otherwise the pending copy of ``shift``. Later steps and reads see the sum.
        """

    @abstractmethod
    def write(self, vector: Floats) -> None:
        """Set ``weights[:] = vector``, complete when this returns."""

    # -- methods that a subclass may make faster ---------------------------------------------------------------------
    def begin_read(self, out: Floats) -> Pending | None:
        """Begin to read the weights as they are now.

        Returns:
            None if ``out`` holds them now; otherwise the pending copy, of a subclass of Pending. Later steps do not
            change what it brings.
        """
        self.read(out)
        return None

    def begin_read_piece(self, out: Floats, start: int) -> Pending | None:
        """Begin to read the weights from element ``start`` on into ``out``, a piece for a newcomer.

        Used for models of more than six million elements. A piece is a sixteenth or so: override this, since the
        default reads all weights.
        """
        out[:] = self._read(self.layout.exchanged)[start : start + out.size]
        return None

    def begin_read_at(self, out: Floats, positions: Positions) -> Pending | None:
        """Begin to read ``out[:] = weights[positions]``; the positions are ascending."""
        out[:] = self._read(self.layout.exchanged)[positions]
        return None

    def has_positions(self, positions: Positions) -> bool:
        """Return True if :meth:`prepare_positions` has nothing to do for these."""
        return True

    def prepare_positions(self, positions: Positions) -> None:  # noqa: B027 (most models need nothing)
        """Prepare for reading and adding at these positions, in a worker thread: copy them to a device, for example."""

    def read_frozen(self, out: Floats, start: int) -> None:
        """Read the ``"frozen"`` elements from ``start`` on into ``out``.

        They follow all exchanged elements and never change, so any thread may call this.
        """
        raise NotImplementedError

    def check(self) -> None:
        """Raise LayoutError if a method that the layout requires is missing."""
        if self.layout.exchanged < self.layout.size and type(self).read_frozen is VectorState.read_frozen:
            raise LayoutError(
                f"The layout of {type(self).__name__} has frozen tensors and it has no read_frozen: define it, or name "
                "them buffers, which are exchanged."
            )

    def mix_statistics(self, statistics: Statistics) -> Pending | None:
        """Begin to move the live statistics, the "buffer" segments, towards a partner's."""
        shift = np.zeros(self.layout.exchanged, np.float32)
        shift[statistics.start :] = self.statistics_shift(statistics)
        return self.add(shift)

    def statistics_shift(self, statistics: Statistics) -> Floats:
        """Return by how much :meth:`mix_statistics` moves all statistics, and count it as made."""
        mixer: StatisticsMixer = self.__dict__.setdefault("_mixer", StatisticsMixer())
        now = torch.from_numpy(self._read(self.layout.exchanged)[statistics.start :])
        sizes = [segment.size for segment in self.layout.segments if segment.kind == "buffer"]
        return mixer.shift(torch.split(now, sizes), statistics).numpy()

    def add_weighted(self, shift: Floats, weight: float) -> Pending | None:
        """Add ``weight * shift`` to the weights, as :meth:`add`; ``shift`` may be overwritten."""
        shift *= np.float32(weight)
        return self.add(shift)

    def add_scaled(self, values: Floats, factor: float, version: int) -> bool | None:
        """Add ``factor * values`` to the weights; ``values`` stay unchanged, and are added many times.

        ``version`` changes with their contents, so that a copy of them on a device can be seen to be old.

        Returns:
            False if a part is still to be added: then each later boundary calls again, with the values, the factor and
            the version as they are then, until the result is another.
        """
        self.add(np.float32(factor) * values)
        return True

    def add_read(self, shift: Floats, weight: float) -> bool:
        """Add ``weight * shift`` to the weights, then set ``shift[:] = weights``.

        Returns:
            False, with nothing changed, if this is not faster than :meth:`add` and :meth:`read`.
        """
        return False

    def add_at(self, shift: Floats, positions: Positions) -> Pending | None:
        """Set ``weights[positions] += shift``, as :meth:`add`."""
        spread = np.zeros(self.layout.exchanged, np.float32)
        spread[positions] = shift
        return self.add(spread)

    def merge(self, vector: Floats, ratio: float) -> Pending | None:
        """Add ``ratio * (vector - weights)``, as :meth:`add`; ``vector`` may be overwritten."""
        vector -= self._read(vector.size)
        vector *= np.float32(ratio)
        return self.add(vector)

    def begin_upload(self, values: Floats) -> Upload | None:
        """Begin to bring an update of all elements to a device, ahead of the call that adds it. Any thread may call it.

        Returns:
            None if nothing is gained: :meth:`add` or :meth:`merge` is called as usual. Otherwise an upload, whose
            methods are called instead once it is done.
        """
        return None

    def sound(self) -> bool:
        """Return True if every weight is finite."""
        return is_finite(self._read(self.layout.size))

    def spoiled_tensor(self) -> str:
        """Return the name of the first tensor with a value that is not finite; empty if all are finite."""
        finite = np.isfinite(self._read(self.layout.exchanged))
        return "" if finite.all() else self.layout.name_at(int(np.argmin(finite)))

    def enter_thread(self) -> None:  # noqa: B027 (most models need nothing)
        """Prepare the network's thread, which asks whether copies are done: torch.cuda.set_device, for example."""

    def buffer(self, elements: int) -> Floats:
        """Return a vector to read into and add from, for example page-locked memory if copies go to a device."""
        return np.zeros(elements, np.float32)

    def takes(self, vector: Floats) -> bool:
        """Return True if this vector, of any memory of this host, may take the place of one from :meth:`buffer`.

        By default it may if `buffer` is not overridden.
        """
        return type(self).buffer is VectorState.buffer

    # -- the optimizer's state, after the weights: ``trained_elements`` for each key ---------------------------------
    optimizer_state: OptimizerState | None = None
    """The state of torch's optimizers, if the model has any; a model with others overrides what follows."""
    moments: LiveMoments | None = None
    """The moments among that state."""

    @property
    def optimizer_keys(self) -> tuple[str, ...]:
        """Return the sorted names of the optimizer's state tensors that newcomers get.

        Empty before the first optimizer step, and for optimizers without state.
        """
        return () if self.optimizer_state is None else self.optimizer_state.keys

    @property
    def trained_elements(self) -> int:
        """Return the number of elements of one key's tensors."""
        return 0 if self.optimizer_state is None else self.optimizer_state.trained_elements

    def optimizer_scalars(self) -> dict[str, float]:
        """Return the scalars of the optimizer's state (``step``), for a node that takes this state over.

        Each is the largest over the parameters, which a parameter with a gradient in every step has. For the others the
        bias correction is then too small, which only makes their next steps smaller.
        """
        return {} if self.optimizer_state is None else self.optimizer_state.scalars()

    def recent_optimizer_scalars(self) -> dict[str, float] | None:
        """Return the scalars, perhaps as of the last call, without waiting for a device; None if there are none yet."""
        return self.optimizer_scalars() if self.optimizer_state is None else self.optimizer_state.recent_scalars()

    def optimizer_range(self) -> range:
        """Return the range of the optimizer's state in the vector that newcomers take, which is behind all weights."""
        return range(self.layout.size, self.layout.size + len(self.optimizer_keys) * self.trained_elements)

    def begin_read_optimizer(self, out: Floats, start: int) -> Pending | None:
        """Begin to read the state, key by key, from ``start``, an index in the vector that newcomers take."""
        assert not out.size, "a state with keys has to give them"
        return None

    # -- the moments of the optimizer, which members mix -------------------------------------------------------------
    mix_state: str = "off"
    """The choice of the moments to mix, as in :class:`gossip.Config`; the node sets it."""

    def moment_form(self) -> MomentForm | None:
        """Return the form of the optimizer's moments that are mixed; None if none are."""
        return None if self.moments is None else self.moments.form(self.mix_state)

    def begin_read_moments(self, rows: Floats, form: MomentForm, start: int, stop: int) -> Pending | None:
        """Begin to read elements [start, stop) of each moment into its row."""
        raise NotImplementedError

    def mix_moments(self, moments: Moments) -> Pending | None:
        """Begin to mix a partner's moments, by the rule of :class:`Moments`."""
        raise NotImplementedError

    def size(self) -> int:
        """Return the number of elements that exchanges carry."""
        return self.layout.exchanged

    def adopt(self, vector: Floats, optimizer_keys: tuple[str, ...], scalars: dict[str, float]) -> None:
        """Overwrite the weights, and the optimizer's state if this state keeps the same kind."""
        self.write(vector[: self.layout.size])

    def adopt_exchanged(self, vector: Floats, optimizer_keys: tuple[str, ...], scalars: dict[str, float]) -> None:
        """Overwrite as :meth:`adopt`, but leave the frozen weights, whose place in ``vector`` may hold anything."""
        self.read_frozen(vector[self.layout.exchanged : self.layout.frozen_stop], self.layout.exchanged)
        self.adopt(vector, optimizer_keys, scalars)

    def inventory(self) -> Inventory:
        """Return all tensors with their treatments."""
        return Inventory(
            Item(
                segment.name, segment.shape, segment.dtype, "average" if segment.kind in EXCHANGED else "copy",
                segment.kind,
            )
            for segment in self.layout.segments
        )  # fmt: skip

    def tensor_at(self, position: int) -> str:
        """Return the name of the tensor of a position in the vector."""
        return self.layout.name_at(position)

    # -- checkpoints -------------------------------------------------------------------------------------------------
    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors for a checkpoint, by name."""
        whole = torch.from_numpy(self._read(self.layout.size))
        return {
            segment.name: whole[start:stop].reshape(segment.shape).to(getattr(torch, segment.dtype))
            for segment, start, stop in self.layout.places()
        }

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Load what :meth:`tensors` returned. Raise :class:`~gossip.errors.CheckpointError` before any change."""
        vector = np.empty(self.layout.size, np.float32)
        for segment, start, stop in self.layout.places():
            tensor = tensors.get(segment.name)
            if tensor is None or tuple(tensor.shape) != segment.shape:
                in_file = "not there" if tensor is None else f"of shape {tuple(tensor.shape)}"
                raise CheckpointError(
                    f"it holds another model than this node's (tensor {segment.name!r} is {in_file} in the file and of "
                    f"shape {segment.shape} here)."
                )
            vector[start:stop] = tensor.to(torch.float32).reshape(-1).numpy()
        self.write(vector)

    def _read(self, elements: int) -> Floats:
        out = np.empty(elements, np.float32)
        self.read(out)
        return out


State = VectorState  # The name for users. The class has another one, since gossip.exchange.session has a State too.
