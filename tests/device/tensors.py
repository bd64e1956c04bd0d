"""Tensors on the simulated device. Their values arrive late; their shapes are known at once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.device.device import Device
from tests.device.memory import Block, poison

aten = torch.ops.aten
# Results whose shape or value the host needs at once.
ASKING = {
    aten._local_scalar_dense.default, aten.equal.default, aten.nonzero.default, aten.masked_select.default,
    aten.is_nonzero.default, aten._unique2.default, aten.unique_dim.default,
}  # fmt: skip
INDEXING = {aten.index.Tensor, aten.index_put_.default, aten.index_put.default}
SHAPES: dict[Any, Any] = {}  # Results without memory, by operator and the shapes of its arguments.
UNSAFE_VIEWS = {aten._unsafe_view.default, aten._reshape_alias.default}


class DeviceTensor(Tensor):
    """A tensor over simulated device memory.

    ``mem`` is an ordinary tensor with the values so far. Views share it and its block.
    """

    mem: Tensor
    block: Block
    on: Device
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, mem: Tensor, block: Block, on: Device) -> DeviceTensor:
        made = Tensor._make_wrapper_subclass(
            cls, mem.shape, strides=mem.stride(), storage_offset=mem.storage_offset(), dtype=mem.dtype, device="cpu"
        )
        made.mem, made.block, made.on = mem, block, on
        return made

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        on = next(one.on for one in leaves(args, kwargs or {}) if isinstance(one, DeviceTensor))
        return dispatched(on, func, args, kwargs or {})

    @property
    def device(self) -> torch.device:
        return self.on.torch

    @property
    def is_cuda(self) -> bool:
        return self.on.kind == "cuda"

    @property
    def is_cpu(self) -> bool:
        return False

    def data_ptr(self) -> int:
        return self.mem.data_ptr()

    def record_stream(self, stream) -> None:
        with self.on.queues.lock:
            self.block.users.append(stream.queue)

    def numpy(self, *, force=False):
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first.")

    def tolist(self):
        return self.cpu().tolist()

    def __deepcopy__(self, memo):
        copied = self.detach().clone().requires_grad_(self.requires_grad)
        copied._is_param = getattr(self, "_is_param", False)
        memo[id(self)] = copied
        return copied

    def __repr__(self, **kwargs) -> str:
        return f"DeviceTensor({tuple(self.shape)}, {self.dtype}, {self.device})"


class Dispatch(TorchDispatchMode):
    """A dispatch mode that sends operators on the device to it, in the thread that enters the mode."""

    def __init__(self, on: Device) -> None:
        super().__init__()
        self.on = on

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # Skipping would import torch's compiler.

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return dispatched(self.on, func, args, kwargs or {})


def dispatched(on: Device, func: Any, args: tuple, kwargs: dict) -> Any:
    """Run one operator as torch would with a device."""
    flat = leaves(args, kwargs)
    of = next((one for one in flat if isinstance(one, DeviceTensor)), None)
    to = kwargs.get("device")
    if of is None and (to is None or to.type != on.kind):
        return on_host(on, func, args, kwargs)
    if func is aten._to_copy.default:
        return moved(on, args[0], kwargs)
    if func is aten.copy_.default:
        return copied(on, args[0], args[1], args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
    if func is aten._foreach_copy_.default:
        late = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
        for target, source in zip(args[0], args[1], strict=True):
            copied(on, target, source, late)
        return None
    if of is None:  # Fresh values.
        host = func(*args, **kwargs | {"device": torch.device("cpu"), "pin_memory": False})
        return fresh(on, host, None if func in (aten.empty.memory_format, aten.empty_strided.default) else host)
    check(on, func, flat)
    there = mapped(args, below), {key: mapped(value, below) for key, value in kwargs.items()}
    if "device" in kwargs:
        there[1]["device"] = torch.device("cpu")
    if func.is_view or func in UNSAFE_VIEWS:
        return mapped(func(*there[0], **there[1]), lambda one: DeviceTensor(one, of.block, on))
    if func in ASKING or (func in INDEXING and any(is_mask(one) for one in args[1])):
        on.wait(str(func))
        return mapped(func(*there[0], **there[1]), lambda one: fresh(on, one, one) if isinstance(one, Tensor) else one)
    if func._schema.is_mutable:
        written = [value for one, value in arguments(func, args, kwargs) if one.alias_info and one.alias_info.is_write]
        on.run(lambda: func(*there[0], **there[1]))
        returns = [one for one in func._schema.returns if one.alias_info is not None]
        return None if not returns else written[0] if len(returns) == 1 else tuple(written)
    return computed(on, func, *there)


def computed(on: Device, func: Any, args: tuple, kwargs: dict) -> Any:
    """Queue a function of values; its result exists at once, without values."""
    key = func, *map(described, args), *((name, described(value)) for name, value in kwargs.items())
    shaped = SHAPES.get(key)
    if shaped is None:
        shaped = func(*mapped(args, outline), **{name: mapped(value, outline) for name, value in kwargs.items()})
        SHAPES[key] = shaped
    results = mapped(shaped, lambda one: fresh(on, one, None))
    targets = [one.mem for one in leaves((results,), {})]

    def work() -> None:
        values = func(*on_cpu(func, args), **kwargs)
        for target, value in zip(targets, leaves((values,), {}), strict=True):
            target.copy_(value)

    on.run(work)
    return results


def on_cpu(func: Any, args: tuple) -> tuple:
    """Return arguments as the CPU wants them. A device keeps layer norm's statistics of half precision in float32."""
    if func is not aten.native_layer_norm_backward.default:
        return args
    gradient, values, shape, mean, scale, *others = args
    return gradient, values, shape, mean.to(values.dtype), scale.to(values.dtype), *others


def leaves(args: Any, kwargs: dict) -> list:
    """Return all arguments, and all items of lists among them."""
    each = (one if isinstance(one, list | tuple) else [one] for one in (*args, *kwargs.values()))
    return [item for items in each for item in items]


def mapped(value: Any, change: Any) -> Any:
    """Change a value, or each item of a list or tuple."""
    if isinstance(value, list | tuple):
        return type(value)([mapped(one, change) for one in value])
    return change(value)


def below(one: Any) -> Any:
    """Return the memory of a device's tensor; a number on the host is passed by value."""
    if isinstance(one, DeviceTensor):
        return one.mem
    return one.clone() if isinstance(one, Tensor) else one


def described(one: Any) -> Any:
    """Return what decides a result's shape: for a tensor its shape, otherwise the value."""
    if isinstance(one, Tensor):
        return one.shape, one.stride(), one.dtype
    if isinstance(one, list | tuple):
        return tuple(map(described, one))
    return type(one), None if isinstance(one, float) else one


def fresh(on: Device, like: Tensor, values: Tensor | None) -> DeviceTensor:
    """Return new device memory, with these values once the stream comes to it."""
    mem = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype)
    made = DeviceTensor(mem, on.block(mem), on)
    if values is not None:
        on.run(lambda: mem.copy_(values))
    return made


def moved(on: Device, source: Tensor, kwargs: dict) -> Tensor:
    """Convert and move, as ``to`` does."""
    # Without a call from Python the device is what torch believes: no copy leaves the device that way.
    to = getattr(on.here, "to", None) or source.device
    late, dtype = kwargs.get("non_blocking", False), kwargs.get("dtype") or source.dtype
    shape = outline(source.mem if isinstance(source, DeviceTensor) else source)
    how = kwargs.get("memory_format") or torch.preserve_format
    like = torch.empty_like(shape, dtype=dtype, memory_format=how)
    host = torch.empty_strided(like.shape, like.stride(), dtype=dtype)
    if to.type == on.kind:
        return copied(on, DeviceTensor(host, on.block(host), on), source, late)
    return copied(on, on.page_lock(host) if late else host, source, late)


def copied(on: Device, target: Tensor, source: Tensor, late: bool) -> Tensor:
    """Copy within the device, to it or from it."""
    there, here = isinstance(target, DeviceTensor), isinstance(source, DeviceTensor)
    to, values = target.mem if there else target, source.mem if here else source
    if there and here:
        on.run(lambda: to.copy_(values))
        return target
    host = to if here else values
    # Asynchronous copies convert on the device, others on the host.
    on.crossed_bytes["down" if here else "up"] += (host if late else to if there else values).nbytes
    if target.dtype != source.dtype or not (target.is_contiguous() and source.is_contiguous()):
        # Conversion takes a temporary on the device where the copy is asynchronous.
        size = to.numel() * (to if here else values).element_size() if late else 0
        on.memory.reserve(size)
        on.memory.release(size)
    if not here:
        # The driver has taken pageable memory before the call returns.
        values = values if on.pinned.holds(host) and late else values.clone()
        on.run(lambda: to.copy_(values))
    else:
        poison(to)
        on.run(lambda: to.copy_(values))
    if to.numel() and not (late and on.pinned.holds(host)):
        on.wait("copy from the device" if here else "copy to the device")
    return target


def on_host(on: Device, func: Any, args: tuple, kwargs: dict) -> Any:
    """Run an operator of the host; page-locked memory is ordinary memory that we remember."""
    if func is aten.is_pinned.default:
        return on.pinned.holds(args[0])
    if func in (aten._pin_memory.default, aten.pin_memory.default):
        return on.page_lock(args[0].clone())
    if kwargs.get("pin_memory"):
        return on.page_lock(func(*args, **kwargs | {"pin_memory": False}))
    return func(*args, **kwargs)


def check(on: Device, func: Any, flat: list) -> None:
    for one in flat:
        if isinstance(one, Tensor) and not isinstance(one, DeviceTensor) and one.dim():
            if func not in INDEXING:
                raise RuntimeError(
                    f"Expected all tensors to be on the same device, but found at least two devices, {on.torch} and "
                    f"cpu! ({func})"
                )
            on.wait("indices on the host")


def outline(one: Any) -> Any:
    """Return a tensor of this shape without memory."""
    if isinstance(one, torch.device):
        return torch.device("meta")
    if not isinstance(one, Tensor):
        return one
    return torch.empty_strided(one.shape, one.stride(), dtype=one.dtype, device="meta")


def is_mask(index: Any) -> bool:
    return isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8)


def arguments(func: Any, args: tuple, kwargs: dict):
    """Yield each argument of the operator's schema with its value."""
    for at, one in enumerate(func._schema.arguments):
        if at < len(args) and not one.kwarg_only:
            yield one, args[at]
        elif one.name in kwargs:
            yield one, kwargs[one.name]
