"""The reader of a live swarm's weights, for inference and reinforcement learning. It is no member of the swarm.

It runs a newcomer's peer over links of an observer (:class:`node.links.handshake.Greeter`). So it takes pieces from
several donors and compares them, while no node lists it, mixes with it or misses it.
"""

import math
import os
import random
import secrets
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import median_low
from typing import Any

import torch
import trio
from torch import Tensor, nn

from gossip.arithmetic.layout import ITEM_BYTES, Layout
from gossip.config import Config
from gossip.discovery.seeds import Bootstrap
from gossip.errors import LayoutError, LocalError, RefusedError, RemoteError
from gossip.exchange.session import LocalModel
from gossip.ids import MemberRecord, quantity
from gossip.membership.protocol import Membership
from gossip.peer import Peer
from gossip.state_transfer.joining import Phase
from node.faults import Faults, first_cause
from node.identity.keys import Identity, read_secret, verify
from node.links.connector import Access
from node.links.handshake import Greeter
from node.loop.live import LiveModel, Trained
from node.model import checkpoint
from node.model.inventory.words import write_words
from node.model.optimizers import Optimizers
from node.model.state import Floats, State
from node.model.tensors import plain_name
from node.network.runtime import Runtime
from node.observe.status import no_answer, query_layout
from node.settings import gather_seeds
from node.transport.seeds import SeedLookup
from node.transport.tcp import TcpNetwork
from node.transport.tls import swarm_contexts

GIVE_UP_S = 60.0  # Time without data. Donors serve newcomers first, and other readers as well.
NOT_READY_S = 10.0  # Time to meet members that have weights, and to hear what they have.
POLL_S = 0.02
MEMORY_SHARE = 0.5  # The share of this machine's memory that the weights may take, whatever donors say.


@dataclass(frozen=True, eq=False)
class Weights:
    """The weights of a swarm: pieces of several members, whose models differ by the consensus distance."""

    tensors: dict[str, Tensor]  # By name, on the CPU, of the types that the swarm trains. Of tied tensors one is here.
    run_id: str  # 32 hexadecimal digits.
    samples: int  # Behind the run, of all members.
    steps: int  # Of the median member.
    version: float  # Mixing rounds behind the weights.
    finished: bool  # The run is finished.
    donors: int  # The number of members that gave pieces.
    seconds: float  # The time that the read took.
    bytes_received: int
    asked_at: float  # Before the first donor was asked, by time.monotonic.

    @property
    def staleness_s(self) -> float:
        """Return the seconds since members were asked. One whose loop stands gives its last snapshot, however old."""
        return time.monotonic() - self.asked_at

    def __str__(self) -> str:
        where = f"run {self.run_id[:8]}, {quantity(self.samples, 'sample')}, {quantity(self.steps, 'step')}"
        cost = f"{self.bytes_received / 1e6:,.2f} MB from {quantity(self.donors, 'member')} in {self.seconds:.2f} s"
        return f"{where}; {cost}, asked for {self.staleness_s:.2f} s ago"

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write a checkpoint without an optimizer, which :meth:`node.Node.load` reads too, and return its path.

        Raises CheckpointError.
        """
        meta = {"run_id": self.run_id, "swarm_samples": self.samples, "version": self.version, "steps": self.steps}
        checkpoint.save(path, self.tensors, None, {**meta, "finished": self.finished})
        return checkpoint.file_of(path)

    def load_into(self, module: nn.Module) -> None:
        """Load the weights into a module. What the swarm does not have stays. Raises LayoutError for another model."""
        own = module.state_dict()
        names = {plain_name(name): name for name in own}  # A compiled module has prefixed names.
        for name, tensor in self.tensors.items():
            if name not in names or own[names[name]].shape != tensor.shape:
                raise LayoutError(f"The swarm trains another model: its {name!r} does not fit this module.")
        module.load_state_dict({names[name]: tensor for name, tensor in self.tensors.items()}, strict=False)


class Reader:
    """A source of weights: ``Reader("10.0.0.5:7700").read()``.

    ``seeds`` and ``secret`` are those of a Node: addresses or an invite, and the secret's file. A seed has
    ``timeout_s`` seconds to answer.
    """

    def __init__(
        self, seeds: str | Iterable[str], secret: str | os.PathLike[str] | None = None, timeout_s: float = 5.0
    ) -> None:  # fmt: skip
        self.seeds, self.expected, self.sources, invited = gather_seeds([seeds] if isinstance(seeds, str) else seeds)
        self.secret = read_secret(Path(secret)) if secret else invited
        self.timeout_s = timeout_s

    def read(self) -> Weights:
        """Read the weights as they are now. Raises LocalError in one sentence."""
        try:
            return trio.run(self.fetch)
        except BaseExceptionGroup as group:
            raise first_cause(group) from group

    async def fetch(self) -> Weights:
        """Read as :meth:`read` does, in the caller's trio loop."""
        began_at = time.monotonic()
        lookup = SeedLookup(self.seeds, self.expected, self.sources, self.secret, None)
        layout, swarm = await self.describe(lookup)
        own = [each for each in layout.segments if each.dtype != "float32" or each.kind == "bits"]  # No views.
        size = 4 * layout.size + sum(math.prod(each.shape) * ITEM_BYTES[each.dtype] for each in own)
        if size > MEMORY_SHARE * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"):
            raise LocalError(f"The swarm's model takes {size / 1e9:.1f} GB, more than half of this machine's memory.")
        asked_at, reading = time.monotonic(), Reading(self.secret, lookup, layout, swarm)
        vector, peer, links = await reading.wait(), reading.runtime.peer, reading.runtime.links
        run_id = peer.joining.run_id
        records = peer.membership.run_members(run_id)
        if vector is None:
            is_there = "has no weights yet" if peer.membership.contacted() else "does not answer any more"
            what = "has busy members, which gave no weights" if records else is_there
            raise LocalError(f"The swarm {what}: try again once a node trains there.")
        return Weights(
            tensors_of(layout, vector), run_id.hex(), peer.joining.swarm_samples,
            median_low([record.steps for record in records] or [0]), peer.joining.version, peer.joining.finished,
            len(peer.joining.donors), time.monotonic() - began_at, links.bytes_received, asked_at,
        )  # fmt: skip

    async def describe(self, lookup: SeedLookup) -> tuple[Layout, str]:
        """Return the layout that a seed describes, and its swarm's name. Raises LocalError if none does."""
        found = await lookup.poll()
        reason = no_answer(", ".join([*map(str, found.addresses), *found.missing]), self.secret)
        for address in found.addresses:
            try:
                return await query_layout(address, self.secret, self.timeout_s)
            except (OSError, RemoteError, LayoutError, trio.TooSlowError) as error:
                reason = LocalError(str(error)) if isinstance(error, RefusedError) else reason
        raise reason


class Unread(State):
    """The model of a reader, which holds no weights: they stay in the vector that they come in."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout

    def read(self, out: Floats, start: int = 0) -> None:
        out.fill(0.0)

    def write(self, vector: Floats) -> None:
        raise NotImplementedError

    def add(self, shift: Floats) -> None:
        raise NotImplementedError

    read_frozen = read


class Reading:
    """One read: a newcomer's network side, up to the moment at which its training loop would take the weights."""

    def __init__(self, secret: bytes | None, lookup: SeedLookup, layout: Layout, swarm: str) -> None:
        self.faults = Faults(self.notify)
        config = Config(swarm=swarm, filter="none", connections=1, join_timeout_s=GIVE_UP_S)
        # Of two members that hear of each other the smaller id dials at once, and nobody hears of a reader.
        identity = min((Identity.fresh() for _ in range(64)), key=lambda each: each.id)
        rng, now = random.Random(secrets.randbits(64)), trio.current_time()
        record = MemberRecord(identity.id, identity.public_key, 1, run_id=secrets.token_bytes(16))
        frozen, bits = layout.frozen_stop - layout.exchanged, layout.size - layout.frozen_stop
        peer = Peer(
            Membership(record, sign=identity.sign, verify=verify, config=config, rng=rng, now=now), config,
            LocalModel(layout.fingerprint, layout.exchanged, 0, frozen, bits), rng=rng, now=now,
            bootstrap=Bootstrap(lookup.fixed, lookup.expected, lookup.is_needed, must_join=True),
        )  # fmt: skip
        contexts = None if secret is None else swarm_contexts(identity, secret)
        access = Access(TcpNetwork(None), Greeter(swarm, layout, reads=True), contexts, lookup)
        live = LiveModel(Trained(Unread(layout), Optimizers(None)), config)
        self.runtime = Runtime(peer, access, live, self)
        self.runtime.streams.is_allocated = True  # It mixes with nobody, which would take two vectors.

    def notify(self, kind: str, sentence: str) -> None:
        """Do nothing: an error says what matters."""

    def announce(self, event: Any) -> None:
        """Do nothing: a reader takes part in no exchange."""

    async def wait(self) -> Floats | None:
        """Run until the vector is whole; return None after ``GIVE_UP_S`` without data, or if no member has weights."""
        runtime, peer = self.runtime, self.runtime.peer
        missing, give_up_at = -1, trio.current_time() + NOT_READY_S
        async with trio.open_nursery() as nursery:
            await nursery.start(runtime.main)
            while peer.joining.phase is not Phase.ADOPTING and trio.current_time() < give_up_at:
                await trio.sleep(POLL_S)
                if peer.joining.phase is Phase.COLLECTING and peer.joining.missing_elements != missing:
                    missing, give_up_at = peer.joining.missing_elements, trio.current_time() + GIVE_UP_S
            vector = runtime.averager.joining_vector if peer.joining.phase is Phase.ADOPTING else None
            nursery.cancel_scope.cancel()
        return None if vector is None else vector.array


def tensors_of(layout: Layout, vector: Floats) -> dict[str, Tensor]:
    """Return the tensors in a vector of the whole layout, each of its own type."""
    pieces = torch.split(torch.from_numpy(vector), [segment.size for segment in layout.segments])
    tensors = {
        segment.name: torch.empty(segment.shape, dtype=getattr(torch, segment.dtype)) if segment.kind == "bits"
        else piece.reshape(segment.shape).to(getattr(torch, segment.dtype))
        for segment, piece in zip(layout.segments, pieces, strict=True)
    }  # fmt: skip
    write_words(layout, [tensors[segment.name] for segment in layout.segments if segment.kind == "bits"], vector)
    return tensors
