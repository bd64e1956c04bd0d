"""The reader of a live swarm's weights, for inference and reinforcement learning. It is no member of the swarm.

It takes the weights as a newcomer does: in pieces from several donors, which are compared. Nobody lists it, mixes with
it or misses it.
"""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import median_low
from typing import Any

import torch
import trio
from torch import Tensor, nn

from gossip.arithmetic.layout import Layout
from gossip.errors import ConfigError, LayoutError, LocalError, RefusedError, RemoteError
from gossip.ids import Address, parse_address
from node.identity.keys import read_secret
from node.links.frame_reader import FrameReader
from node.model import checkpoint
from node.model.inventory.words import write_words
from node.model.state import Floats
from node.network.reading import Contact, Reading
from node.observe.layouts import read_layout
from node.observe.status import no_answer, observe, read_pages
from node.settings import checked_seconds, gather_seeds
from node.transport.seeds import SeedLookup
from node.transport.tcp import Scope, TcpNetwork, scope_of

__all__ = ["Reader", "Weights"]

MAX_DONORS = 16  # Nodes that are greeted, as many as a newcomer keeps as possible donors.
GIVE_UP_S = 60.0  # Donors serve newcomers first, and other readers as well.
MEMORY_SHARE = 0.5  # Part of this machine's memory that the weights may take, which donors alone would decide else.


@dataclass(frozen=True, eq=False)
class Weights:
    """The weights of a swarm at one time, and how they came.

    They consist of pieces of several members, whose models differ by the consensus distance.

    Attributes:
        tensors: By name, on the CPU, each of the type that the swarm trains. A tied tensor has one of its names.
        run_id: 32 hexadecimal digits.
        samples: The samples behind the run, of all members.
        steps: The steps of a typical donor.
        version: The mixing rounds behind the weights.
        finished: True if the run is finished.
        donors: The number of members that gave pieces.
        seconds: How long the read took.
        bytes_received: All bytes that it took.
    """

    tensors: dict[str, Tensor]
    run_id: str
    samples: int
    steps: int
    version: float
    finished: bool
    donors: int
    seconds: float
    bytes_received: int
    asked_at: float  # By time.monotonic, before the first donor copied its piece.

    @property
    def staleness_s(self) -> float:
        """Return how old the weights are by now, at most. A donor whose loop stands gives its last snapshot."""
        return time.monotonic() - self.asked_at

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the weights and the run's figures as :meth:`node.Node.save` does. Raises CheckpointError."""
        meta = {"run_id": self.run_id, "swarm_samples": self.samples, "version": self.version, "steps": self.steps}
        checkpoint.save(path, self.tensors, None, {**meta, "finished": self.finished})

    def load_into(self, module: nn.Module) -> list[str]:
        """Load the weights into a module of the same names; return the names that the swarm does not have.

        Raises:
            LayoutError: The module is another model. It has not changed.
        """
        own = module.state_dict()
        for name, tensor in self.tensors.items():
            shape = tuple(own[name].shape) if name in own else "not there"
            if shape != tuple(tensor.shape):
                raise LayoutError(
                    f"Tensor {name!r} of the swarm has the shape {tuple(tensor.shape)} and is {shape} in this module: "
                    "build the model that the swarm trains."
                )
        module.load_state_dict(self.tensors, strict=False)
        given = {own[name].data_ptr() for name in self.tensors}
        return [name for name, tensor in own.items() if name not in self.tensors and tensor.data_ptr() not in given]


class Reader:
    """A source of a live swarm's weights: ``Reader("10.0.0.5:7700").read()``.

    Args:
        seeds: What a Node takes as seeds: "host:port", an invite, "@file" or a function, or several.
        secret: The file with the swarm's secret, if it has one and no invite brings it.
        timeout_s: Seconds to wait for a node's answer.

    Raises:
        LocalError: Or one of its kinds. One sentence says what to do.
    """

    def __init__(
        self, seeds: str | Callable[[], Iterable[str]] | Iterable[str], secret: str | os.PathLike[str] | None = None,
        timeout_s: float = 5.0,
    ) -> None:  # fmt: skip
        texts: list[Any] = [seeds] if isinstance(seeds, str) or callable(seeds) else list(seeds)
        self.addresses, self.expected, self.sources, invited = gather_seeds(texts)
        if not texts:
            raise ConfigError("A Reader needs a node to ask: give seeds, as '10.0.0.5:7700'.")
        self.secret = read_secret(Path(secret)) if secret else invited
        self.timeout_s = checked_seconds("timeout_s", timeout_s)

    def read(self) -> Weights:
        """Read the weights as they are now. It waits for donors that serve others, up to a minute.

        Raises:
            LocalError: In one sentence.
        """
        return trio.run(self.fetch)

    async def fetch(self) -> Weights:
        """Read as :meth:`read` does, in the caller's trio loop."""
        visit = Visit(self.secret, self.timeout_s)
        try:
            lookup = SeedLookup(self.addresses, self.expected, self.sources, self.secret, None)
            found = await lookup.poll()
            await visit.greet_all(dict.fromkeys(found.addresses, Scope.NOWHERE))
            if not visit.contacts:
                names = sorted({str(address) for address in (*self.addresses, *found.addresses)} | set(found.missing))
                raise visit.refusal or no_answer(", ".join(names), self.secret)
            await visit.greet_all(await visit.members())
            return await visit.fetch(visit.donors())
        except RefusedError as error:
            raise LocalError(str(error)) from error
        finally:
            visit.close()


class Visit:
    """One read: the nodes that were greeted, and all bytes that came from them."""

    def __init__(self, secret: bytes | None, timeout_s: float) -> None:
        self.secret, self.timeout_s = secret, timeout_s
        self.contacts: list[Contact] = []
        self.readers: list[FrameReader] = []
        self.refusal: RefusedError | None = None  # Why a node refused this one.
        self.began_at = time.monotonic()

    async def greet_all(self, addresses: dict[Address, Scope]) -> None:
        """Greet the nodes at these addresses, each in a network of this scope at least."""
        async with trio.open_nursery() as nursery:
            for address, scope in addresses.items():
                nursery.start_soon(self.add, address, scope)

    async def add(self, address: Address, scope: Scope) -> None:
        contact = await self.greet(address, scope)
        if contact is not None and contact.record.id not in {other.record.id for other in self.contacts}:
            self.contacts.append(contact)

    async def greet(self, address: Address, scope: Scope = Scope.NOWHERE) -> Contact | None:
        """Greet a node; return None if that fails."""
        stream, reader, theirs = None, None, None
        try:
            with trio.move_on_after(self.timeout_s):
                stream = await TcpNetwork(None, self.timeout_s).connect(address, lambda host: scope_of(host) >= scope)
                reader, theirs = await observe(stream, self.secret)
        except RefusedError as error:
            self.refusal = error
        except (OSError, RemoteError):
            pass
        finally:
            if stream is not None and theirs is None:
                stream.close_now()
        if reader is None or theirs is None or theirs.record is None:
            return None
        self.readers.append(reader)
        return Contact(address, reader, theirs.record, theirs.fingerprint)

    async def members(self) -> dict[Address, Scope]:
        """Return addresses of further members, at random, as the contacts name them.

        A node's word leads to no smaller network than its own.
        """
        named: dict[Address, Scope] = {}
        for contact in self.contacts:
            scope = scope_of(contact.reader.stream.peer_host)
            with trio.move_on_after(self.timeout_s):
                try:
                    rows = (await read_pages(contact.reader))["members"]
                except RemoteError:
                    continue
                texts = [row["address"] for row in rows if row["state"] == "alive" and row["ready"] and row["address"]]
                for text in random.sample(texts, min(len(texts), MAX_DONORS)):
                    named.setdefault(parse_address(text), scope)
        room = max(0, MAX_DONORS - len(self.contacts))
        return dict(random.sample(list(named.items()), min(room, len(named))))

    def donors(self) -> list[Contact]:
        """Return the contacts with the weights of the run that most of them have. Raises LocalError if none has any."""
        ready = [contact for contact in self.contacts if contact.record.ready]
        if not ready:
            raise LocalError(
                f"The swarm at {self.contacts[0].address} has no weights yet: none of its nodes that answer is ready; "
                "ask again once one of them trains."
            )
        counts = Counter((contact.record.run_id, contact.fingerprint) for contact in ready)
        chosen = max(counts, key=lambda run: (counts[run], run))
        return [contact for contact in ready if (contact.record.run_id, contact.fingerprint) == chosen]

    async def layout(self, donors: list[Contact]) -> Layout:
        """Return the layout of the donors' model, from any of them, since all state its fingerprint."""
        for contact in donors:
            with trio.move_on_after(self.timeout_s):
                try:
                    return await read_layout(contact.reader, contact.fingerprint)
                except (RemoteError, LayoutError):
                    continue
        raise LocalError(
            "No member tells the names of its tensors: its version may know no readers; install this one there as well."
        )

    async def fetch(self, donors: list[Contact]) -> Weights:
        """Fetch the weights from these donors. Raises LocalError."""
        layout = await self.layout(donors)
        memory_bytes = MEMORY_SHARE * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if 4 * layout.size > memory_bytes:
            raise LocalError(
                f"The swarm's model takes {4 * layout.size / 1e9:.1f} GB, more than half of this machine's memory: "
                "read it on a larger one."
            )
        asked_at = time.monotonic()
        reading = Reading(layout, donors, GIVE_UP_S, self.greet)
        if not await reading.run(donors):
            raise LocalError(
                f"No member has given its weights within {GIVE_UP_S:g} s: they serve newcomers first; try again later."
            )
        joining = reading.joining
        return Weights(
            tensors_of(layout, reading.vector), reading.run_id.hex(), joining.swarm_samples,
            median_low(contact.record.steps for contact in donors), joining.version, joining.finished,
            len(joining.donors), time.monotonic() - self.began_at,
            sum(reader.bytes_received for reader in self.readers), asked_at,
        )  # fmt: skip

    def close(self) -> None:
        for reader in self.readers:
            reader.stream.close_now()


def tensors_of(layout: Layout, vector: Floats) -> dict[str, Tensor]:
    """Return the tensors in a vector of the whole layout, each of its own type."""
    pieces = torch.split(torch.from_numpy(vector), [segment.size for segment in layout.segments])
    tensors: dict[str, Tensor] = {}
    for segment, piece in zip(layout.segments, pieces, strict=True):
        dtype = getattr(torch, segment.dtype)
        is_value = segment.kind != "bits"
        tensors[segment.name] = (
            piece.reshape(segment.shape).to(dtype) if is_value else torch.empty(segment.shape, dtype=dtype)
        )
    write_words(layout, [tensors[segment.name] for segment in layout.segments if segment.kind == "bits"], vector)
    return tensors
