"""Values of host vectors on their way to a model's devices, and the changes of its tensors by them there.

They go there ahead of the step boundary that adds them, while it adds them, or spread over several boundaries.
"""

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from gossip.averaging.model import Upload
from node.model.device.copies import Copies, combined, memory_errors
from node.model.device.streams import CopyStreams
from node.model.flat import add, count_elements, merge

Change = Callable[[list[Tensor], Tensor], None]
"""Changes some tensors by values on their device, which it may overwrite."""
Relay = Callable[[Tensor], None]
"""Sends values on a device to the other ranks, or receives them there, in the order of the current stream."""
Run = tuple[torch.device, list[Tensor], Tensor]
"""Consecutive tensors on one device, and their part of a host vector."""


class PortionUpload:
    """An upload of values to one device, for a change of tensors there by one *portion* after the other.

    The values go through a few buffers in turn. Later work of the device waits for them, and the host does not. All
    memory is allocated at the start, so that a change cannot fail halfway through the model.

    Args:
        streams: The streams of the copies.
        device: The device.
        live: The tensors.
        max_elements: The limit of a portion.
        buffers: The largest number of buffers, each for one portion.
        scratch: So many times the memory of a portion's values is allocated by the change.

    Raises:
        torch.OutOfMemoryError: The device has no memory for it.
    """

    def __init__(
        self, streams: CopyStreams, device: torch.device, live: Sequence[Tensor], max_elements: int, buffers: int,
        scratch: int,
    ) -> None:  # fmt: skip
        self.streams, self.device, self.max_elements = streams, device, max_elements
        self.sizes = [count_elements(tensors) for tensors in portions(live, max_elements)]
        self.stops, self.largest = list(accumulate(self.sizes)), max([1, *self.sizes])
        # At most one tensor. It is released right before the change: nothing else takes this memory until then, and the
        # allocator has it for the change afterwards.
        self.scratch = [self.new_buffer(scratch * self.largest)] if scratch else []
        # A tensor that cannot be split may exceed the limit, and two buffers of its size are enough.
        count = min(buffers, buffers if self.largest <= max_elements else 2, len(self.sizes))
        with torch.cuda.stream(streams.of(device, "up")):  # The stream that writes to a buffer first allocates it.
            self.buffers = [self.new_buffer(self.largest) for _ in range(count)]
        self.last_uses: list[torch.cuda.Event | None] = [None] * count  # For each buffer the event after its change.
        self.arriving: deque[tuple[Tensor, torch.cuda.Event]] = deque()  # Values in buffers, the oldest first.
        self.changed = 0  # The number of portions whose tensors are changed.
        self.version = 0  # The version of the host vector, in a sweep.

    def new_buffer(self, elements: int) -> Tensor:
        return torch.empty(elements, dtype=torch.float32, device=self.device)

    def reserve(self, scratch: int) -> bool:
        """Allocate what the change takes, after the buffers; return False if the device has no memory for it."""
        try:
            self.scratch = [self.new_buffer(scratch * self.largest)] if scratch else []
        except torch.OutOfMemoryError:
            return False
        return True

    def portions_of(self, device: torch.device, live: Sequence[Tensor]) -> list[list[Tensor]] | None:
        """Return the portions of these tensors; None if the program has moved the model, so that they are others."""
        found = list(portions(live, self.max_elements))
        return found if device == self.device and self.sizes == list(map(count_elements, found)) else None

    def begin(self, host: Tensor | None) -> None:
        """Begin to copy the next portions' values into the buffers that are free; no values if a relay brings them.

        Any thread may call it before the first change.
        """
        copy_stream, first = self.streams.of(self.device, "up"), self.changed + len(self.arriving)
        for number in range(first, min(self.changed + len(self.buffers), len(self.sizes))):
            buffer, size, stop = number % len(self.buffers), self.sizes[number], self.stops[number]
            values, last_use = self.buffers[buffer][:size], self.last_uses[buffer]
            if last_use is not None:
                copy_stream.wait_event(last_use)
            if host is not None:
                with self.streams.copying(self.device, "up", 4 * size):
                    values.copy_(host[stop - size : stop], non_blocking=True)
            self.arriving.append((values, copy_stream.record_event()))

    def change_next(self, tensors: list[Tensor], change: Change, relay: Relay | None = None) -> torch.cuda.Event:
        """Change the next portion, once its values have arrived and a relay has sent them; return when they arrive."""
        current, (values, arrived) = torch.cuda.current_stream(self.device), self.arriving.popleft()
        self.scratch.clear()
        current.wait_event(arrived)
        if relay is not None:
            relay(values)
        change(tensors, values)
        values.record_stream(current)
        self.last_uses[self.changed % len(self.buffers)] = current.record_event()
        self.changed += 1
        return arrived

    def finish(
        self, live: Sequence[Tensor], host: Tensor | None, change: Change, relay: Relay | None = None
    ) -> Copies:  # fmt: skip
        """Change all portions of the tensors. The host vector is free after the last copy, as they end in order."""
        events: tuple[torch.cuda.Event, ...] = ()
        for tensors in portions(live, self.max_elements):
            self.begin(host)
            events = (self.change_next(tensors, change, relay),)
        return Copies(events)

    def advance(self, all_portions: list[list[Tensor]], host: Tensor, change: Change, version: int) -> bool:
        """Change the portions that have arrived, and begin to copy as many again. Return True once all are changed.

        The host vector may change between two calls, with a new version. A portion that was copied meanwhile may mix
        old and new values, and is copied again: later copies into these buffers follow on the same stream.
        """
        if version != self.version:
            self.arriving.clear()
        self.version = version
        for tensors in all_portions[self.changed :]:
            if not self.arriving or not self.arriving[0][1].query():  # type: ignore[no-untyped-call]
                break
            self.change_next(tensors, change)
        self.begin(host)
        return self.changed == len(self.sizes)


class Uploads:
    """The changes of one model by host vectors, whose copies have streams of their own."""

    PORTION_ELEMENTS = 1 << 24  # A portion of 64 MB takes milliseconds over PCIe, much more than its call.
    # The portions that are uploaded ahead of a boundary, and those that a boundary adds in a sweep: 256 MB of the
    # device, and 64 million parameters.
    AHEAD_PORTIONS = 4

    def __init__(self, streams: CopyStreams) -> None:
        self.streams = streams
        # While a sweep lasts, the upload for each run of tensors; None once they are changed.
        self.sweeps: list[PortionUpload | None] | None = None

    def allocate(
        self, device: torch.device, live: Sequence[Tensor], buffers: int = 2, scratch: int = 0, can_shrink: bool = True
    ) -> PortionUpload | None:
        """Return an upload, of smaller portions if the device is nearly full; None if it has no room, or no streams."""
        limits = (self.PORTION_ELEMENTS, max(self.PORTION_ELEMENTS >> 4, 1))[: 1 + can_shrink]
        for max_elements in limits if device.type == "cuda" else ():
            with contextlib.suppress(torch.OutOfMemoryError):
                return PortionUpload(self.streams, device, live, max_elements, buffers, scratch)
        return None

    @torch.no_grad()
    def begin_ahead(self, runs: Sequence[Run]) -> list[PortionUpload | None]:
        """Begin to upload values for each run, as far as devices have memory for them. Any thread may call it."""
        uploads = [self.allocate(device, live, self.AHEAD_PORTIONS) for device, live, _ in runs]
        for (_, _, host), upload in zip(runs, uploads, strict=True):
            if upload is not None:
                upload.begin(host)
        return uploads

    def apply(
        self, runs: Sequence[Run], change: Change, scratch: int = 0, ahead: Sequence[PortionUpload | None] = ()
    ) -> Copies:
        """Change the tensors of all runs, after each device has allocated what that needs.

        Args:
            runs: The tensors and their values.
            change: The change.
            scratch: As for :class:`PortionUpload`.
            ahead: The uploads that have begun. They are of no use if the program has moved the model meanwhile.
        """
        begun = ahead if len(ahead) == len(runs) else [None] * len(runs)
        uploads = [
            upload
            if upload is not None and upload.portions_of(device, live) is not None and upload.reserve(scratch)
            else self.allocate(device, live, scratch=scratch)
            for (device, live, _), upload in zip(runs, begun, strict=True)
        ]
        return combined([
            change_at_once(run, change) if upload is None else upload.finish(*run[1:], change)
            for run, upload in zip(runs, uploads, strict=True)
        ])  # fmt: skip

    def change_whole(self, rows: Sequence[tuple[torch.device, Tensor, Change]]) -> Copies:
        """Change some tensors of each device by all values of a vector at once, after all have allocated their memory.

        Raises:
            MemoryError: A device has no memory for it.
        """
        with memory_errors():
            uploads = [
                PortionUpload(self.streams, device, [host], host.numel(), 1, 2) if device.type == "cuda" else None
                for device, host, _ in rows
            ]
        return combined([
            change_at_once((device, [], host), change) if upload is None else upload.finish([host], host, change)
            for (device, host, change), upload in zip(rows, uploads, strict=True)
        ])  # fmt: skip

    def sweep(self, runs: Sequence[Run], change: Change, version: int) -> bool:
        """Change the tensors over several boundaries: on CUDA a few portions at each, elsewhere at the first one.

        ``version`` is that of the host vector, which must be page-locked, and stay unchanged during the call. Return
        True once all tensors are changed.
        """
        if self.sweeps is None:
            self.sweeps = [self.allocate(device, live, self.AHEAD_PORTIONS) for device, live, _ in runs]
            for run, upload in zip(runs, self.sweeps, strict=True):
                if upload is None:
                    change_at_once(run, change)
        if len(self.sweeps) != len(runs):
            self.sweeps.clear()  # The program has moved the model meanwhile: the rest is not added.
        for number, (upload, (device, live, host)) in enumerate(zip(self.sweeps, runs, strict=False)):
            found = None if upload is None else upload.portions_of(device, live)
            if upload is None or found is None or upload.advance(found, host, change, version):
                self.sweeps[number] = None
        if any(self.sweeps):
            return False
        self.sweeps = None
        return True


class UpdateUpload(Upload):
    """An update's values that are on their way to the model's devices, or that a relay will bring there.

    Args:
        apply: Applies a change with the values; its second argument is the ``scratch`` of :class:`PortionUpload`.
        parts: The upload for each run of the model's devices; None for a run that has none.
    """

    def __init__(self, apply: Callable[[Change, int], Copies], parts: Sequence[PortionUpload | None]) -> None:
        self._apply, self._parts = apply, [part for part in parts if part is not None]

    @property
    def portions(self) -> tuple[int, ...]:
        """Return the sizes of the portions, which are the same on all ranks."""
        return tuple(size for part in self._parts for size in part.sizes)

    def done(self) -> bool:
        """Return True once applying the values does not wait. Any thread may call it."""
        arriving = [event for part in self._parts for _, event in tuple(part.arriving)]
        return all(event.query() for event in arriving)  # type: ignore[no-untyped-call]

    def add(self) -> Copies:
        """Add the values, as :meth:`ModelState.add`."""
        return self._apply(change_of(None), 0)

    def merge(self, ratio: float) -> Copies:
        """Merge the values, as :meth:`ModelState.merge`."""
        return self._apply(change_of(ratio), 1)


def change_of(ratio: float | None) -> Change:
    """Return the change that merges values at this ratio, or adds them if it is None."""
    return add if ratio is None else partial(merge, weight=ratio)


def change_at_once(run: Run, change: Change) -> Copies:
    """Change tensors on a device without streams; on CUDA one after the other on the host, which takes no memory."""
    device, live, host = run
    if device.type != "cuda":
        change(live, host.to(device))
        return Copies()
    start = 0
    for tensor in live:
        stop = start + tensor.numel()
        copy = tensor.detach().cpu()
        change([copy], host[start:stop])
        tensor.copy_(copy)
        start = stop
    return Copies()


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
