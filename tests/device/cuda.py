"""torch.cuda over the simulated device: streams, events, graphs, and queries."""

import contextlib
import threading
import warnings
from collections.abc import Iterator
from unittest import mock

import torch
from torch import Tensor
from torch.optim import Optimizer
from trio._core import _thread_cache

from tests.device.device import Device, Graph
from tests.device.tensors import Dispatch

# torch warns once in a process; the simulated device warns at each call.
PROTOTYPE = "Synchronization debug mode is a prototype feature and does not yet detect all synchronizing operations"


@contextlib.contextmanager
def simulated(kind: str = "cuda", seed: int = 0) -> Iterator[Device]:
    """Simulate a device of this kind, in this thread and in all threads that begin meanwhile."""
    on = Device(kind, seed)
    begin = threading.Thread._bootstrap_inner
    plain_to, plain_tensor, plain_as = Tensor.to, torch.tensor, torch.as_tensor

    def bootstrap(thread: threading.Thread) -> None:
        with Dispatch(on):
            begin(thread)

    def place(device: torch.device) -> torch.device:
        return on.torch if device.type == kind else device

    def to(tensor: Tensor, *args, copy=False, **kwargs) -> Tensor:
        """Move and convert: torch itself believes that all tensors lie on the host."""
        if args and isinstance(args[0], Tensor):
            args = args[0].device, args[0].dtype, *args[1:]
        device, dtype, late, how = torch._C._nn._parse_to(*args, **kwargs)
        device, dtype = torch.device(device or tensor.device), dtype or tensor.dtype
        if kind not in (device.type, tensor.device.type):
            return plain_to(tensor, device, dtype, late, copy, memory_format=how)
        if device.type == tensor.device.type and dtype == tensor.dtype and how is None and not copy:
            return tensor
        on.here.to = device
        try:
            return torch.ops.aten._to_copy(
                tensor, dtype=dtype, device=place(device), non_blocking=late, memory_format=how
            )
        finally:
            on.here.to = None

    def made(plain):
        def make(data, *args, device=None, **kwargs):
            host = plain(data, *args, **kwargs)
            return host if device is None else host.to(device)

        return make

    plain_groups = Optimizer._group_tensors_by_device_and_dtype

    def groups(lists, with_indices=False):
        """Group tensors by their stated device, as an optimizer does."""
        return {
            (next(one for row in rows[0] for one in row if one is not None).device, kind): rows
            for (_, kind), rows in plain_groups(lists, with_indices).items()
        }

    @contextlib.contextmanager
    def stream(one):
        before, on.here.stream = on.current, one.queue
        try:
            yield
        finally:
            on.here.stream = before

    @contextlib.contextmanager
    def graph(one, *args, **kwargs):
        on.here.graph = one.graph
        try:
            yield
        finally:
            on.here.graph = None

    class CUDAGraph:
        def __init__(self, *args, **kwargs) -> None:
            self.graph = Graph()

        def replay(self) -> None:
            for work in self.graph.work:
                on.run(work)

    def set_sync_debug_mode(mode):
        warnings.warn(PROTOTYPE, UserWarning, stacklevel=2)
        on.strict = mode in ("error", 2)

    def register(at, size, flags=0):
        on.pinned.ranges[at] = at + size
        return 0

    cudart = mock.Mock(cudaHostRegister=register, cudaHostUnregister=lambda at: on.pinned.ranges.pop(at, None) and 0)
    patches = {
        "_lazy_init": lambda: None, "is_available": lambda: True, "device_count": lambda: 1,
        "is_initialized": lambda: True, "current_device": lambda: 0, "set_device": lambda device: None,
        "Stream": lambda device=None, priority=0: _Stream(on, on.queues.new("side")),
        "Event": lambda enable_timing=False: _Event(on), "current_stream": lambda device=None: _Stream(on, on.current),
        "stream": stream, "synchronize": lambda device=None: on.synchronize(), "CUDAGraph": CUDAGraph, "graph": graph,
        "is_current_stream_capturing": lambda: on.graph is not None, "empty_cache": lambda: None,
        "set_sync_debug_mode": set_sync_debug_mode, "memory_allocated": lambda device=None: on.memory.bytes,
        "max_memory_allocated": lambda device=None: on.memory.peak_bytes,
        "max_memory_reserved": lambda device=None: on.memory.peak_bytes,
        "reset_peak_memory_stats": lambda device=None: setattr(on.memory, "peak_bytes", on.memory.bytes),
        "cudart": lambda: cudart,
    }  # fmt: skip
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(threading.Thread, "_bootstrap_inner", bootstrap))
        # Trio keeps idle workers; earlier ones would know no device, or another one.
        stack.enter_context(mock.patch.object(_thread_cache, "THREAD_CACHE", _thread_cache.ThreadCache()))
        if kind == "cuda":
            for name, value in patches.items():
                stack.enter_context(mock.patch.object(torch.cuda, name, value))
        for owner, name, value in (
            (Tensor, "to", to), (Tensor, "cuda", lambda tensor, *args, **kwargs: tensor.to(on.torch, **kwargs)),
            (Tensor, "pin_memory", lambda tensor, *args: on.page_lock(tensor.clone())),
            (Tensor, "is_pinned", lambda tensor, *args: on.pinned.holds(tensor)),
            (Optimizer, "_group_tensors_by_device_and_dtype", staticmethod(groups)),
            (Tensor, "cpu", lambda tensor, **kwargs: tensor.to("cpu", **kwargs)),
            (torch, "tensor", made(plain_tensor)), (torch, "as_tensor", made(plain_as)),
        ):  # fmt: skip
            stack.enter_context(mock.patch.object(owner, name, value))
        # A moved parameter stays the same object, as on a real device, where torch exchanges its data.
        torch.__future__.set_swap_module_params_on_conversion(True)
        stack.callback(torch.__future__.set_swap_module_params_on_conversion, False)
        stack.enter_context(Dispatch(on))
        yield on


class _Stream:
    def __init__(self, on: Device, queue) -> None:
        self.on, self.queue, self.device = on, queue, on.torch

    def wait_event(self, event) -> None:
        if event.mark is not None and self.on.graph is None:
            self.on.queues.put(self.queue, "wait", event.mark)

    def wait_stream(self, other) -> None:
        self.wait_event(other.record_event())

    def record_event(self, event=None):
        event = event or torch.cuda.Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        self.on.wait("Stream.synchronize", self.queue)

    def __eq__(self, other) -> bool:
        return isinstance(other, _Stream) and other.queue is self.queue

    def __hash__(self) -> int:
        return id(self.queue)


class _Event:
    def __init__(self, on: Device) -> None:
        self.on, self.mark = on, None

    def record(self, stream=None) -> None:
        queue = self.on.current if stream is None else stream.queue
        self.mark = None if self.on.graph is not None else self.on.queues.mark(queue)

    def wait(self, stream=None) -> None:
        (stream or torch.cuda.current_stream()).wait_event(self)

    def query(self) -> bool:
        self.on.queues.drift()
        return self.mark is None or self.mark.done

    def synchronize(self) -> None:
        if self.mark is not None and not self.mark.done:
            self.on.wait("Event.synchronize")
            self.on.queues.finish(self.mark)

    def elapsed_time(self, other) -> float:
        if not (self.mark.done and other.mark.done):
            raise RuntimeError("CUDA error: device not ready")
        return 1e3 * (other.mark.at_s - self.mark.at_s)
