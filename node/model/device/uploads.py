"""Copies of an update's values to the device, ahead of the boundary that adds them, or in pieces while it adds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from node.model.device.copies import memory_errors
from node.model.device.streams import CopyStreams
from node.model.flat import elements

__all__ = ["Change", "Uploading", "Uploads", "Work"]

Change = Callable[[list[Tensor], Tensor], None]
Work = Callable[[], list[torch.cuda.Event]]


@dataclass(frozen=True, slots=True)
class Uploading:
    """Values for the first tensors on a device, whose copy to the device has begun."""

    flat: Tensor
    event: torch.cuda.Event
    portions: int  # The number of portions that they cover.


class Uploads:
    """Copies from host vectors to the devices of one model, on streams of their own."""

    AHEAD_ELEMENTS = 1 << 26  # 256 MB of float32 on the device.
    # 64 MB take milliseconds over PCIe, so that the cost of a call is negligible. The device holds two portions.
    PORTION_ELEMENTS = 1 << 24

    def __init__(self, streams: CopyStreams) -> None:
        self.streams = streams

    @torch.no_grad()
    def ahead(self, device: torch.device, live: Sequence[Tensor], host: Tensor) -> Uploading | None:
        """Begin to upload values, at most ``AHEAD_ELEMENTS``. Any thread may call it.

        Returns:
            None if there is no memory for it, or the first tensor is too large for it.
        """
        count = stop = 0
        for portion in portions(live, self.PORTION_ELEMENTS):
            if stop + elements(portion) > self.AHEAD_ELEMENTS:
                break
            count, stop = count + 1, stop + elements(portion)
        if not count:
            return None
        side = self.streams.of(device, "up")
        try:
            with self.streams.copying(device, "up", stop):
                flat = torch.empty(stop, dtype=torch.float32, device=device)
                flat.copy_(host[:stop], non_blocking=True)
        except torch.OutOfMemoryError:
            return None
        return Uploading(flat, side.record_event(), count)

    def prepared(
        self, device: torch.device, live: Sequence[Tensor], host: Tensor, change: Change,
        ahead: Uploading | None = None, scratch: bool = False,
    ) -> Work:  # fmt: skip
        """Allocate what a change of these tensors needs.

        Args:
            device: The device of all these tensors.
            live: The tensors.
            host: A value for each of their elements.
            change: Queues the change of some tensors by their values on the device, which it may overwrite.
            ahead: The values that were uploaded ahead.
            scratch: True if ``change`` allocates as much again.

        Returns:
            A function that queues all of it on the current stream, and returns the events after which ``host`` is free.
            If the device has no memory for two portions, it changes the tensors on the host, and waits.
        """
        cuts = list(portions(live, self.PORTION_ELEMENTS))
        done = 0 if ahead is None else ahead.portions
        try:
            buffers, cuts = self.buffers(device, cuts, done, scratch)
        except torch.OutOfMemoryError:
            return partial(self.on_host, live, host, change)
        return partial(self.work, device, cuts, host, change, ahead, buffers)

    def work(
        self, device: torch.device, cuts: list[list[Tensor]], host: Tensor, change: Change, ahead: Uploading | None,
        buffers: list[Tensor],
    ) -> list[torch.cuda.Event]:  # fmt: skip
        current, side = torch.cuda.current_stream(device), self.streams.of(device, "up")
        start, done, events = 0, 0, list[torch.cuda.Event]()
        if ahead is not None:
            current.wait_event(ahead.event)
            ahead.flat.record_stream(current)
            done, events = ahead.portions, [ahead.event]
            for tensors in cuts[:done]:
                stop = start + elements(tensors)
                change(tensors, ahead.flat[start:stop])
                start = stop
        used: list[torch.cuda.Event | None] = [None, None]  # The current stream reads each buffer until its event.
        for at, tensors in enumerate(cuts[done:]):
            stop, before = start + elements(tensors), used[at % 2]
            values = buffers[at % 2][: stop - start]
            if before is not None:
                side.wait_event(before)
            with self.streams.copying(device, "up", stop - start):
                values.copy_(host[start:stop], non_blocking=True)
            arrived = side.record_event()
            current.wait_event(arrived)
            change(tensors, values)
            used[at % 2] = current.record_event()
            start, events = stop, [arrived]  # The copies of one stream end in order, the one ahead included.
        for buffer in buffers:
            buffer.record_stream(current)
        return events

    def on_host(self, live: Sequence[Tensor], host: Tensor, change: Change) -> list[torch.cuda.Event]:
        """Change the tensors on the host, one after the other, which takes no memory of the device."""
        start = 0
        for tensor in live:
            stop = start + tensor.numel()
            here = tensor.detach().cpu()
            change([here], host[start:stop])
            tensor.copy_(here)
            start = stop
        return []

    def prepared_at(self, device: torch.device, host: Tensor, change: Change) -> Work:
        """Allocate what a change at some positions by these values needs; return a function like :meth:`prepared`."""
        side = self.streams.of(device, "up")
        with memory_errors():
            torch.empty(2 * host.numel(), dtype=torch.float32, device=device)  # The allocator keeps it for `change`.
            with torch.cuda.stream(side):
                flat = torch.empty(host.numel(), dtype=torch.float32, device=device)

        def work() -> list[torch.cuda.Event]:
            current = torch.cuda.current_stream(device)
            with self.streams.copying(device, "up", host.numel()):
                flat.copy_(host, non_blocking=True)
            arrived = side.record_event()
            current.wait_event(arrived)
            change([], flat)
            flat.record_stream(current)
            return [arrived]

        return work

    def buffers(
        self, device: torch.device, cuts: list[list[Tensor]], done: int, scratch: bool
    ) -> tuple[list[Tensor], list[list[Tensor]]]:
        """Allocate what all changes need, before the first: an update is applied whole or not at all.

        Returns:
            The buffers, and the portions that fit into them: smaller ones if the device is nearly full.
        """
        side = self.streams.of(device, "up")
        rest = [tensor for tensors in cuts[done:] for tensor in tensors]
        for most in (self.PORTION_ELEMENTS, self.PORTION_ELEMENTS >> 4):
            smaller = [*cuts[:done], *portions(rest, most)]
            sizes = [elements(tensors) for tensors in smaller[done:]]
            try:
                if scratch:  # The allocator keeps it for the changes.
                    torch.empty(max(map(elements, smaller), default=0), dtype=torch.float32, device=device)
                with torch.cuda.stream(side):
                    buffers = [
                        torch.empty(max(sizes), dtype=torch.float32, device=device) for _ in range(min(len(sizes), 2))
                    ]
                return buffers, smaller
            except torch.OutOfMemoryError as error:
                full = error
        raise full


def portions(live: Sequence[Tensor], most: int) -> Iterator[list[Tensor]]:
    """Yield consecutive tensors of at most ``most`` elements together. A larger one is split if it is contiguous."""
    held: list[Tensor] = []
    size = 0
    for tensor in live:
        whole = tensor.numel() <= most or not tensor.is_contiguous()
        for piece in [tensor] if whole else torch.split(tensor.detach().view(-1), most):
            if held and size + piece.numel() > most:
                yield held
                held, size = [], 0
            held.append(piece)
            size += piece.numel()
    if held:
        yield held
