"""A model that is sharded over several processes, as one flat vector on rank 0."""

import contextlib
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from gossip.arithmetic.mixing import is_finite
from gossip.arithmetic.moments import MomentForm
from gossip.arithmetic.movement import Movement
from gossip.averaging.vectors import Moments
from gossip.errors import LayoutError
from node.model.device.copies import Copies
from node.model.inventory.words import read_words, write_words
from node.model.snapshot import TorchState
from node.model.state import Floats, Positions
from node.model.tensors import plain_name, refuse_other_tensors
from node.ranks.sharded.memory import SharedVectors
from node.ranks.sharded.operation import Operation
from node.ranks.sharded.work import ShardWork


class ShardedState(TorchState):
    """The tensors of a sharded model and of its optimizers as flat float32 vectors of the logical (whole) tensors.

    A vector is the same as that of a whole model, so that whole and sharded nodes mix with each other. Rank 0 calls the
    methods, only while all ranks stand at one boundary. Each method announces operations, of which every rank's
    :attr:`work` does a part. A copy is complete when the call returns.

    Args:
        work: This rank's part.
    """

    adds_weighted = True
    donated = "as it was when their donor began"

    def __init__(self, work: ShardWork) -> None:
        super().__init__(work.tensors, work.optimizers, work.state)
        self.work = work
        self._network: int | None = None  # The network thread, once it runs.
        # The positions that gossip.arithmetic.movement samples and the weights there, while the network thread may read
        # them: before the first step. Otherwise None.
        self._sample: tuple[Positions, Floats] | None = None
        # A copy of the frozen weights, which any thread may read.
        self._frozen = np.empty(self.layout.frozen_stop - self.layout.exchanged, np.float32)

    # -- operations ------------------------------------------------------------------------------------------------
    @property
    def is_standing(self) -> bool:  # type: ignore[override]
        return self.work.ranks.is_standing

    @property
    def _memory(self) -> SharedVectors:
        memory = self.work.memory
        assert isinstance(memory, SharedVectors), "rank 0 alone makes vectors and announces operations"
        return memory

    def announce(self, operation: Operation) -> int:
        """Announce an operation and take part in it; return the number of ranks that report success."""
        is_owner = self.work.ranks.is_standing and threading.get_ident() != self._network
        assert is_owner, "the training thread alone reads and changes the model, while all ranks stand at a boundary"
        if not operation.reads:
            operation = replace(operation, follows=self.optimizer_state.followed_keys())
        memory, number, send_command = self._memory, operation.memory, self.work.ranks.send_command
        if dropped := memory.drop_unused():
            send_command("unmap", dropped)
        if number and not memory.is_offered(number):
            name = memory.made[number].name
            send_command("map", name)
            memory.on_offered(number, self.work.map(name))
        send_command("operation", operation)
        return self.work.perform(operation)

    def _on_array(self, operation: Operation, array: NDArray[Any]) -> bool:
        """Do an operation with all elements of an array. Return True if all ranks report success."""
        place = self._memory.locate(array)
        if place is None:  # Its elements go by way of memory that the ranks share.
            shared = self.buffer(array.nbytes // 4).view(array.dtype)
            if not operation.reads:
                shared[:] = array
            succeeds = self._on_array(operation, shared)
            if operation.reads:
                array[:] = shared
            return succeeds
        number, offset = place
        operation = replace(operation, elements=array.size, wide=array.dtype == np.float64)
        return self.announce(replace(operation, memory=number, offset=offset)) == self.work.ranks.size

    @property
    def absent_ranks(self) -> tuple[int, ...]:
        """Return the ranks that could not map memory of rank 0."""
        return tuple(sorted(self._memory.absent))

    def buffer(self, elements: int) -> Floats:
        return self._memory.make(elements)

    # -- the vector ------------------------------------------------------------------------------------------------
    @contextlib.contextmanager
    def starting(self) -> Iterator[None]:
        """Let the network thread read the sample that it begins with, while the training thread waits for its start."""
        self._copy_frozen()
        positions = Movement(self.layout.exchanged).positions
        self._sample = positions, self._read(self.layout.exchanged)[positions]
        try:
            yield
        finally:
            self._sample = None

    def read(self, out: Floats) -> None:
        if out.size == self.layout.size:
            self.read_bits(out[self.layout.frozen_stop :], self.layout.frozen_stop)
        self.finite = self._on_array(Operation("read"), out[: self.layout.frozen_stop])

    def read_bits(self, out: Floats, start: int) -> None:
        """Read the words of tensors of bits, which are whole on each rank, from ``start`` on."""
        read_words(self.layout, self.work.tensors.bits(), out, start)

    def begin_read(self, out: Floats) -> None:
        began = time.perf_counter()
        self.read(out)
        self.copy_s = time.perf_counter() - began

    def begin_read_piece(self, out: Floats, start: int) -> Copies:
        return finished(self._on_array(Operation("read", start), out))

    def begin_read_optimizer(self, out: Floats, start: int) -> Copies:
        return finished(self._on_array(Operation("read", start, keys=self.optimizer_keys), out))

    def begin_read_at(self, out: Floats, positions: Positions) -> Copies | None:
        if threading.get_ident() != self._network:
            out[:] = self._read(self.layout.exchanged)[positions]
            return finished(is_finite(out))
        if self._sample is not None and np.array_equal(self._sample[0], positions):
            out[:] = self._sample[1]
        else:
            out[:] = np.nan  # The network thread cannot read other weights, and takes NaN for unknown.
        return None

    def read_frozen(self, out: Floats, start: int) -> None:
        if start >= self.layout.frozen_stop:
            self.read_bits(out, start)
            return
        first = start - self.layout.exchanged
        out[:] = self._frozen[first : first + out.size]

    def _copy_frozen(self) -> None:
        if self._frozen.size:
            self._on_array(Operation("read", self.layout.exchanged), self._frozen)

    def _mix(self, operation: Operation, vector: Floats) -> None:
        """Do an operation of a mix, and note by how much it moves this rank's part."""
        with self.probe.mixing():
            self._on_array(operation, vector)

    def add(self, shift: Floats) -> None:
        self._mix(Operation("add"), shift)

    def add_weighted(self, shift: Floats, weight: float) -> None:
        self._mix(Operation("add", weight=weight), shift)

    def add_at(self, shift: Floats, positions: Positions) -> None:
        spread = self.buffer(self.layout.exchanged)
        spread[positions] = shift
        self.add(spread)

    def _read(self, elements: int) -> Floats:
        out = self.buffer(elements)  # Memory that the ranks share, where the base class has any memory.
        self.read(out)
        return out

    def merge(self, vector: Floats, ratio: float) -> None:
        self._mix(Operation("merge", weight=ratio), vector)

    def write(self, vector: Floats) -> None:
        self._on_array(Operation("write"), vector[: self.layout.frozen_stop])
        if vector.size == self.layout.size > self.layout.frozen_stop:
            write_words(self.layout, self.work.tensors.bits(), vector)
            self.announce(Operation("plain"))  # It brings them to the other ranks.
        if self._sample is not None:
            positions, values = self._sample
            values[:] = vector[positions]
        if vector.size == self.layout.size:
            self._frozen[:] = vector[self.layout.exchanged : self.layout.frozen_stop]

    def adopt(self, vector: Floats, optimizer_keys: tuple[str, ...], scalars: dict[str, float]) -> None:
        weights, self.state_refusal = self.layout.size, ""
        try:
            self.work.state.examples(optimizer_keys, scalars)
        except LayoutError as error:  # It is the state of another optimizer.
            self.state_refusal = str(error)
        self.write(vector[:weights])
        if self.state_refusal or not optimizer_keys:
            self.announce(Operation("clear"))
            return
        # After the weights, with which a part of the old state has moved.
        self.announce(Operation("create", keys=optimizer_keys, scalars=tuple(scalars.items())))
        self._on_array(Operation("write", weights, keys=optimizer_keys), vector[weights:])
        self.announce(Operation("bound"))

    def sound(self) -> bool:
        """Return True if every weight is finite. Between boundaries only this rank's part is checked."""
        ranks = self.work.ranks
        return self.announce(Operation("sound")) == ranks.size if ranks.is_standing else self.work.sound()

    def enter_thread(self) -> None:
        self._network = threading.get_ident()
        if self.device is not None:
            torch.cuda.set_device(self.device)

    @property
    def device(self) -> torch.device | None:
        """Return the CUDA device of this rank's part; None if it is on the host."""
        return self.work.device

    # -- the optimizer's moments -----------------------------------------------------------------------------------
    def begin_read_moments(self, rows: Floats, form: MomentForm, start: int, stop: int) -> Copies:
        """Read elements [start, stop) of each moment into its row; NaN if the moments are others by now."""
        if form != self.moments.current:
            rows.fill(np.nan)
            return finished(False)
        return finished(self._on_moments("read", form, rows[:, : stop - start], start))

    def mix_moments(self, moments: Moments) -> None:
        """Mix a partner's moments on all ranks, each in its own part, unless ours are others by now."""
        if moments.form == self.moments.current:
            self._on_moments("mix", moments.form, moments.rows[:, : moments.stop - moments.start], moments.start)
            if "grad_avg" in moments.form.names:
                self.announce(Operation("bound"))

    def _on_moments(self, kind: str, form: MomentForm, rows: Floats, start: int) -> bool:
        """Do an operation with the elements from ``start`` on of each moment. Return True if all ranks succeed."""
        first = self.layout.size + start
        return all([
            self._on_array(Operation(kind, first + number * form.elements, keys=form.names), row)
            for number, row in enumerate(rows)
        ])  # fmt: skip

    # -- checkpoints -----------------------------------------------------------------------------------------------
    def fetch(self, start: int, tensor: Tensor, in_optimizers: bool = False) -> Tensor:
        """Return the whole of a tensor whose first element has this index, on the host.

        Args:
            start: The index, as in :class:`Operation`.
            tensor: The tensor, of which each rank has a part.
            in_optimizers: As in :class:`Operation`.
        """
        host = np.empty(tensor.numel(), np.float64 if is_wide(tensor.dtype) else np.float32)
        self._on_array(Operation("read", start, in_optimizers=in_optimizers), host)
        return torch.from_numpy(host).to(tensor.dtype).view(tensor.shape)

    def put(self, start: int, whole: Tensor, in_optimizers: bool = False) -> None:
        """Set all ranks' parts of a tensor from the whole. The reverse of :meth:`fetch`."""
        host = whole.detach().to("cpu", torch.float64 if is_wide(whole.dtype) else torch.float32)
        self._on_array(Operation("write", start, in_optimizers=in_optimizers), host.contiguous().view(-1).numpy())

    def tensors(self) -> dict[str, Tensor]:
        """Return the same as for a whole model, collected on rank 0."""
        starts = self.work.starts()
        whole: dict[int, Tensor] = {}  # By the id of the sharded tensor, which may have several names.
        tensors = {}
        for name, tensor in self.work.named():
            if id(tensor) in starts and id(tensor) not in whole:
                whole[id(tensor)] = self.fetch(starts[id(tensor)], tensor)
            tensors[name] = whole.get(id(tensor), tensor.detach())
        return tensors

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        tensors = {plain_name(name): value for name, value in tensors.items()}
        ours = dict(self.work.named())
        refuse_other_tensors(ours, tensors, exact=isinstance(self.work.model, nn.Module))
        starts = self.work.starts()
        for name, tensor in ours.items():
            if id(tensor) in starts:
                self.put(starts[id(tensor)], tensors[name].to(tensor.dtype))
            else:
                tensor.copy_(tensors[name])
        self.announce(Operation("plain"))
        self._copy_frozen()


def finished(finite: bool) -> Copies:
    """Return a read that is done; the ranks have checked whether its values are finite."""
    return Copies(flags=(torch.tensor(finite, device="cpu"),))


def is_wide(dtype: torch.dtype) -> bool:
    """Return True if float32 cannot hold all values of a type."""
    return dtype.itemsize > 4 or (dtype.itemsize == 4 and not dtype.is_floating_point)
