"""Copies of an update's values to the device: ahead of the boundary that adds them, or in portions while it adds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from node.model.device.copies import memory_errors
from node.model.device.streams import CopyStreams
from node.model.flat import count_elements

__all__ = ["Change", "Relay", "Uploading", "Uploads", "Work"]

Change = Callable[[list[Tensor], Tensor], None]
"""Changes some tensors by values on their device, which it may overwrite."""
Relay = Callable[[Tensor], None]
"""Sends values on a device to the other ranks, or receives them there, in the order of the current stream."""
Work = Callable[[], list[torch.cuda.Event]]
"""Queues a prepared change on the current stream; returns the events after which the host vector is free."""


@dataclass(frozen=True, slots=True)
class Uploading:
    """An upload ahead of its boundary: the values for the first portions of the tensors on a device."""

    flat: Tensor
    event: torch.cuda.Event
    portions: int  # The number of portions that it covers.


@dataclass(frozen=True, slots=True)
class UploadMemory:
    """The memory that a change takes on its device.

    Attributes:
        buffers: The buffers that values are uploaded to, one or two.
        scratch: At most one tensor, as large as what the change allocates. It is released right before the change:
            nothing else takes this memory until then, and the allocator has it for the change afterwards.
    """

    buffers: list[Tensor]
    scratch: list[Tensor]


class Uploads:
    """Copies from host vectors to the devices of one model, on streams of their own.

    A change uploads one *portion* of the tensors after the other, into two buffers in turn.
    """

    AHEAD_ELEMENTS = 1 << 26  # Limit of an upload ahead, 256 MB on the device.
    PORTION_ELEMENTS = 1 << 24  # A portion of 64 MB takes milliseconds over PCIe, much more than its call.

    def __init__(self, streams: CopyStreams) -> None:
        self.streams = streams

    @torch.no_grad()
    def begin_ahead(self, device: torch.device, live: Sequence[Tensor], host: Tensor) -> Uploading | None:
        """Begin to upload values, at most ``AHEAD_ELEMENTS``. Any thread may call it.

        Returns:
            The upload; None if the device has no memory for it, or the first tensor is too large.
        """
        count = stop = 0
        for portion in portions(live, self.PORTION_ELEMENTS):
            if stop + count_elements(portion) > self.AHEAD_ELEMENTS:
                break
            count, stop = count + 1, stop + count_elements(portion)
        if not count:
            return None
        copy_stream = self.streams.of(device, "up")
        try:
            with self.streams.copying(device, "up", 4 * stop):
                flat = torch.empty(stop, dtype=torch.float32, device=device)
                flat.copy_(host[:stop], non_blocking=True)
        except torch.OutOfMemoryError:
            return None
        return Uploading(flat, copy_stream.record_event(), count)

    def prepare(
        self, device: torch.device, live: Sequence[Tensor], host: Tensor, change: Change,
        ahead: Uploading | None = None, scratch: bool = False,
    ) -> Work:  # fmt: skip
        """Allocate what a change of these tensors needs, so that it cannot fail halfway through the model.

        Args:
            device: The device of all these tensors.
            live: The tensors.
            host: A value for each of their elements.
            change: The change.
            ahead: The values that were uploaded ahead.
            scratch: True if ``change`` allocates as much memory again as a portion's values.

        Returns:
            The work. If the device has no memory for two portions, it changes the tensors on the host, and waits.
        """
        full_portions = list(portions(live, self.PORTION_ELEMENTS))
        uploaded = 0 if ahead is None else ahead.portions
        try:
            memory, fitting = self.allocate_buffers(device, full_portions, uploaded, scratch)
        except torch.OutOfMemoryError:
            return partial(self.change_on_host, live, host, change)
        return partial(self.queue_change, device, fitting, host, change, ahead, memory)

    def prepare_relay(
        self, device: torch.device, live: Sequence[Tensor], host: Tensor | None, change: Change, relay: Relay,
        scratch: bool,
    ) -> tuple[Work, list[int]] | None:  # fmt: skip
        """Prepare a change as :meth:`prepare`, by values that rank 0 sends to the other ranks.

        Args:
            device: The device of all these tensors.
            live: The tensors.
            host: A value for each of their elements, on rank 0; None on the others.
            change: The change.
            relay: Sends or receives the values of a portion.
            scratch: True if ``change`` allocates as much again.

        Returns:
            The work, and the sizes of its portions; None if the device has no memory for it.
        """
        all_portions = list(portions(live, self.PORTION_ELEMENTS))
        sizes = [count_elements(tensors) for tensors in all_portions]
        # The first stream that writes to a buffer allocates it. A rank that receives does so in the current stream, in
        # which a second buffer would gain nothing.
        stream, count = self.streams.of(device, "up"), 2
        if host is None:
            stream, count = torch.cuda.current_stream(device), 1
        try:
            memory = allocated(device, stream, sizes, count, max(sizes, default=0) if scratch else 0)
        except torch.OutOfMemoryError:
            return None
        return partial(self.queue_change, device, all_portions, host, change, None, memory, relay), sizes

    def queue_change(
        self, device: torch.device, all_portions: list[list[Tensor]], host: Tensor | None, change: Change,
        ahead: Uploading | None, memory: UploadMemory, relay: Relay | None = None,
    ) -> list[torch.cuda.Event]:  # fmt: skip
        """Queue the change of each portion, behind the copy of its values. This is the work that `prepare` returns.

        First come the portions whose values were uploaded ahead, and then the others by way of the buffers. With a
        relay the values are sent once they are on the device, or received there if there is no ``host``.
        """
        current, copy_stream = torch.cuda.current_stream(device), self.streams.of(device, "up")
        buffers = memory.buffers
        memory.scratch.clear()
        start, uploaded, events = 0, 0, list[torch.cuda.Event]()
        if ahead is not None:
            current.wait_event(ahead.event)
            ahead.flat.record_stream(current)
            uploaded, events = ahead.portions, [ahead.event]
            for tensors in all_portions[:uploaded]:
                stop = start + count_elements(tensors)
                change(tensors, ahead.flat[start:stop])
                start = stop
        # For each buffer the event after its last use by the current stream; None before the first.
        last_uses: list[torch.cuda.Event | None] = [None, None]
        for number, tensors in enumerate(all_portions[uploaded:]):
            stop, last_use = start + count_elements(tensors), last_uses[number % 2]
            values = buffers[number % len(buffers)][: stop - start]
            if host is not None:
                if last_use is not None:
                    copy_stream.wait_event(last_use)
                with self.streams.copying(device, "up", 4 * (stop - start)):
                    values.copy_(host[start:stop], non_blocking=True)
                arrived = copy_stream.record_event()
                current.wait_event(arrived)
                events = [arrived]  # This event is the last, because the copies of one stream end in order.
            if relay is not None:
                relay(values)
            change(tensors, values)
            last_uses[number % 2] = current.record_event()
            start = stop
        for buffer in buffers:
            buffer.record_stream(current)
        return events

    def change_on_host(self, live: Sequence[Tensor], host: Tensor, change: Change) -> list[torch.cuda.Event]:
        """Change the tensors on the host, one after the other, which needs no memory of the device."""
        start = 0
        for tensor in live:
            stop = start + tensor.numel()
            copy = tensor.detach().cpu()
            change([copy], host[start:stop])
            tensor.copy_(copy)
            start = stop
        return []

    def prepare_at(self, device: torch.device, host: Tensor, change: Change) -> Work:
        """Allocate what a change at some positions by these values needs. Return the work, as :meth:`prepare`.

        Raises:
            MemoryError: The device has no memory for it.
        """
        copy_stream = self.streams.of(device, "up")
        with memory_errors():
            memory = allocated(device, copy_stream, [host.numel()], 1, 2 * host.numel())
        [flat] = memory.buffers

        def work() -> list[torch.cuda.Event]:
            current = torch.cuda.current_stream(device)
            with self.streams.copying(device, "up", host.nbytes):
                flat.copy_(host, non_blocking=True)
            arrived = copy_stream.record_event()
            current.wait_event(arrived)
            memory.scratch.clear()
            change([], flat)
            flat.record_stream(current)
            return [arrived]

        return work

    def allocate_buffers(
        self, device: torch.device, all_portions: list[list[Tensor]], uploaded: int, scratch: bool
    ) -> tuple[UploadMemory, list[list[Tensor]]]:
        """Allocate the buffers for the portions that are not uploaded yet, and the memory that the changes take.

        Returns:
            What :func:`allocated` returns, and the portions that fit. They are smaller if the device is nearly full.
        """
        copy_stream = self.streams.of(device, "up")
        rest = [tensor for tensors in all_portions[uploaded:] for tensor in tensors]
        for max_elements in (self.PORTION_ELEMENTS, self.PORTION_ELEMENTS >> 4):
            fitting = [*all_portions[:uploaded], *portions(rest, max_elements)]
            sizes = [count_elements(tensors) for tensors in fitting[uploaded:]]
            try:
                scratch_elements = max(map(count_elements, fitting), default=0) if scratch else 0
                return allocated(device, copy_stream, sizes, 2, scratch_elements), fitting
            except torch.OutOfMemoryError as error:
                last_error = error
        raise last_error


def allocated(
    device: torch.device, stream: torch.cuda.Stream, sizes: Sequence[int], count: int, scratch_elements: int
) -> UploadMemory:
    """Return at most ``count`` buffers for portions of these sizes, to which ``stream`` writes first, and scratch."""
    scratch = [torch.empty(scratch_elements, dtype=torch.float32, device=device)] if scratch_elements else []
    with torch.cuda.stream(stream):
        buffers = [torch.empty(max(sizes), dtype=torch.float32, device=device) for _ in range(min(len(sizes), count))]
    return UploadMemory(buffers, scratch)


def portions(live: Sequence[Tensor], max_elements: int) -> Iterator[list[Tensor]]:
    """Yield consecutive tensors of at most ``max_elements`` together. A larger tensor is split if it is contiguous."""
    portion: list[Tensor] = []
    size = 0
    for tensor in live:
        is_whole = tensor.numel() <= max_elements or not tensor.is_contiguous()
        for piece in [tensor] if is_whole else torch.split(tensor.detach().view(-1), max_elements):
            if portion and size + piece.numel() > max_elements:
                yield portion
                portion, size = [], 0
            portion.append(piece)
            size += piece.numel()
    if portion:
        yield portion
