"""The network thread of a node: performs a Peer's effects on real streams, keeps time, and decides nothing."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import trio
from numpy.typing import NDArray

from gossip.codecs import get_codec
from gossip.config import Config
from gossip.effects import (
    Adopt,
    Collect,
    Dial,
    Effect,
    MemberChanged,
    MemberState,
    Mix,
    Notice,
    Release,
    Send,
    Serve,
    Snapshot,
    Transfer,
    TryDial,
)  # fmt: skip
from gossip.errors import ProtocolError, RemoteError
from gossip.ids import Address, PeerId, short
from gossip.messages import Abort, Chunk, Close, Fetch, Hello, Message, Offer, Outcome, StatusQuery
from gossip.mixing import OuterStep
from gossip.peer import Peer
from node.boundary import Adoption, Boundary, Done, Vector, VectorPool
from node.doors import Doors
from node.handshake import Greeter
from node.links import Link, Links, Network
from node.sessions import Session, Sessions
from node.status import status_page
from node.tls import Contexts
from node.transfer import DifferenceReceiver, Sender, SliceReceiver

__all__ = ["Runtime"]

Floats = NDArray[np.float32]

PENDING_MESSAGES = 32  # kept for a peer that is being dialled
MESSAGES_PER_S = 2_000  # of one link; a member of the largest swarm sends under a tenth of it
SAID = {
    MemberState.ALIVE: "is alive", MemberState.SUSPECT: "does not answer", MemberState.DEAD: "is dead",
    MemberState.LEFT: "has left",
}  # fmt: skip
INLINE_ELEMENTS = 1 << 20  # a shift of up to 4 MB is computed in place, 1 ms; larger ones in a worker thread


@dataclass(frozen=True, slots=True)
class Mixed:
    """An exchange that both sides committed, on its way to the step boundary."""

    snapshot: Vector
    difference: Vector
    weight: float
    plainly: bool  # settling: the plain mean, whatever the outer step
    generation: int


class Runtime:
    """Runs in one trio task tree; ``main`` until cancelled. All methods but ``main`` and tasks are synchronous and run
    in trio's thread; the training thread reaches it through the token alone."""

    def __init__(
        self,
        peer: Peer,
        config: Config,
        network: Network,
        greeter: Greeter,
        contexts: Contexts | None,
        boundary: Boundary,
        pool: VectorPool,
        outer: OuterStep,
        on_event: Callable[[str, str], None],
    ) -> None:
        self.peer, self.config = peer, config
        self.boundary, self.pool, self.outer, self.on_event = boundary, pool, outer, on_event
        self.doors = Doors(
            network,
            greeter,
            contexts,
            config,
            lambda: peer.membership.me,
            self.run_link,
            self.dial_failed,
            on_event,
            frozenset(peer.seeds.seeds),
        )
        self.links = Links()
        self.sessions = Sessions(pool)
        self.pending: dict[PeerId, deque[Message]] = {}  # for peers that are being dialled
        self.rearm = trio.Event()
        self.armed = -math.inf  # when keep_time wakes by itself
        self.joining_vector: Floats | None = None
        self.durations: deque[float] = deque(maxlen=64)
        self.began: dict[int, float] = {}
        self.stopping = False
        self.mixes_open = 0
        self.generation = 0  # of the weights: counts replacements from outside
        self.mix_in, self.mix_out = trio.open_memory_channel[Mixed | Adoption](64)
        self.nursery: trio.Nursery | None = None
        self.after_perform: Callable[[], None] = lambda: None
        self.counts: Callable[[], tuple[int, int]] | None = None  # steps and samples of the training loop, now

    @property
    def now(self) -> float:
        return trio.current_time()

    async def main(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        async with trio.open_nursery() as nursery:
            self.nursery = nursery
            self.doors.open(nursery)
            nursery.start_soon(self.keep_time)
            nursery.start_soon(self.mixer)
            nursery.start_soon(self.watch)
            self.perform(self.peer.start(self.now))
            task_status.started()

    # -- effects -------------------------------------------------------------------------------------------------
    def perform(self, effects: Iterable[Effect]) -> None:
        for effect in effects:
            match effect:
                case Send(to, message):
                    self.send(to, message)
                case Snapshot(session, full):
                    self.boundary.want_snapshot(session, full)
                case Transfer():
                    self.transfer(effect)
                case Mix(session, weight):
                    self.mix(session, weight)
                case Release(session):
                    self.boundary.cancel(session)
                    self.sessions.release(session)
                    self.began.pop(session, None)
                case Dial(address, expect):
                    self.doors.dial(address, expect)
                case Collect():
                    self.collect(effect)
                case Serve():
                    self.serve(effect)
                case Adopt(keys, scalars):
                    assert self.joining_vector is not None
                    self.mix_in.send_nowait(Adoption(self.joining_vector, keys, scalars))  # behind mixes of the old
                case TryDial(asker, address):
                    self.spawn(self.try_dial, asker, address)
                case Notice(kind, sentence):
                    self.on_event(kind, sentence)
                case MemberChanged(peer, _, after):
                    self.on_event("member", f"Member {short(peer)} {SAID[after]}.")
        if self.peer.deadline < self.armed:  # to wake the timer for every message would cost as much as the message
            self.rearm.set()
        self.after_perform()

    def spawn(self, task: Callable[..., Any], *args: object) -> None:
        if self.nursery is not None and not self.stopping:
            self.nursery.start_soon(task, *args)

    def dial_failed(self, peer: PeerId | None) -> None:
        if peer is not None:
            self.pending.pop(peer, None)
        self.perform(self.peer.dial_failed(peer, self.now))

    async def try_dial(self, asker: PeerId, address: Address) -> None:
        ok = await self.doors.try_dial(address)
        self.perform(self.peer.dial_tried(asker, ok, self.now))

    def send(self, to: PeerId, message: Message) -> None:
        session = getattr(message, "session", None)
        link = self.sessions.links.get(session) if session is not None else None
        # An offer goes to one partner after another under one session, each over a link of its own.
        if link is None or link.peer != to or isinstance(message, Offer | Fetch):
            link = self.links.newest(to)
        if link is not None:
            if isinstance(message, Offer):  # a Fetch that is more than a question was bound by its Collect
                self.sessions.links[message.session] = link
            link.send(message)
            if isinstance(message, Abort):  # chunks already on their way belong to nothing any more
                self.sessions.recent.append(message.session)
            return
        record = self.peer.membership.record(to)
        if record is None or record.address is None or self.stopping:
            return
        self.pending.setdefault(to, deque(maxlen=PENDING_MESSAGES)).append(message)
        self.doors.dial(record.address, to)

    def transfer(self, effect: Transfer) -> None:
        snapshot = self.sessions.snapshots.get(effect.session)
        link = self.sessions.links.get(effect.session)
        size = self.sizes(effect.full)
        if snapshot is None or link is None or size > snapshot.array.size:
            self.spawn(self.report_failed, effect.session, "layout" if link is not None else "broken")
            return
        codec = get_codec(effect.codec)
        ours = snapshot.array[:size]  # the weights alone where the partner averages no optimizer
        difference = self.pool.take("full" if effect.full else "weights", size)
        self.began[effect.session] = self.now
        self.sessions.add(
            Session(
                effect.session, effect.partner, link,
                sender=Sender(effect.session, ours, codec, self.config.chunk_elements),
                receiver=DifferenceReceiver(effect.session, ours, difference.array, codec),
                difference=difference,
            )
        )  # fmt: skip

    def sizes(self, full: bool) -> int:
        local = self.peer.local
        return local.elements + (len(local.optimizer_keys) * local.trained_elements if full else 0)

    def mix(self, session: int, weight: float) -> None:
        taken = self.sessions.take_mix(session)
        began = self.began.get(session)
        if began is not None:
            self.durations.append(self.now - began)
        if taken is not None:
            self.mixes_open += 1
            self.mix_in.send_nowait(Mixed(*taken, weight, self.peer.local.settling, self.generation))

    async def mixer(self) -> None:
        """One finished exchange after another becomes a shift for the step boundary. Weights to adopt wait behind those
        that came before them: a shift of the old weights must not land on the new."""
        async for job in self.mix_out:
            if isinstance(job, Adoption):
                if job.vector is self.joining_vector:
                    self.boundary.want_adoption(job)
                continue
            if job.difference.array.size > INLINE_ELEMENTS:
                await trio.to_thread.run_sync(self.shift, job)
            else:
                self.shift(job)
            self.pool.give(job.snapshot)
            if job.generation == self.generation:
                self.boundary.want_shift(job.difference)
            else:
                self.pool.give(job.difference)
            self.mixes_open -= 1

    def shift(self, job: Mixed) -> None:
        if job.plainly:
            job.difference.array *= np.float32(job.weight)
        else:
            with self.boundary.outer_lock:
                self.outer.shift(job.snapshot.array, job.difference.array, job.weight)

    def replace_weights(self) -> None:
        """The weights were replaced from outside (a checkpoint): what was on its way to the old ones is dropped."""
        self.generation += 1
        self.joining_vector = None
        self.boundary.forget()

    def collect(self, effect: Collect) -> None:
        if self.joining_vector is None or self.joining_vector.size != effect.size:
            self.joining_vector = np.zeros(effect.size, np.float32)
        link = self.links.newest(effect.partner)
        if link is None:
            self.spawn(self.report_failed, effect.session, "broken")
            return
        receiver = SliceReceiver(
            effect.session, self.joining_vector, effect.start, effect.stop,
            lambda position: self.perform(self.peer.collected(effect.session, position, self.now)),
        )  # fmt: skip
        self.sessions.links[effect.session] = link
        self.sessions.add(Session(effect.session, effect.partner, link, receiver=receiver))

    def serve(self, effect: Serve) -> None:
        snapshot = self.sessions.snapshots.get(effect.session)
        link = self.sessions.links.get(effect.session)
        if snapshot is None or link is None or effect.stop > snapshot.array.size:
            self.spawn(self.report_failed, effect.session, "broken")
            return
        piece = snapshot.array[effect.start : effect.stop]
        sender = Sender(effect.session, piece, get_codec("fp32"), self.config.chunk_elements)
        self.sessions.add(Session(effect.session, effect.partner, link, sender=sender))

    async def report_failed(self, session: int, code: str) -> None:
        """A failure found while performing is reported after it, as a real one would be."""
        await trio.lowlevel.checkpoint()
        self.perform(self.peer.failed(session, code, self.now))

    # -- reports of the training thread --------------------------------------------------------------------------
    def at_boundary(
        self,
        steps: int,
        samples: int,
        loss: float | None,
        done: Done,
        optimizer: tuple[tuple[str, ...], tuple[tuple[str, float], ...]] | None = None,
    ) -> None:
        if optimizer is not None:
            self.peer.local.optimizer_keys, self.peer.optimizer_scalars = optimizer
        self.peer.counted(steps, samples)
        if done.adopted:
            self.joining_vector = None
            self.perform(self.peer.adopted(self.now))
        copied = all(copy.done() for copy in done.copies)
        self.perform(self.peer.stepped(steps, samples, loss, self.now))  # first: an Offer states how old the model is
        self.shifted(done)
        if copied:
            self.use_spare(done)

    def shifted(self, done: Done) -> None:
        """What exchanges brought is in the model; there is nothing to tell the peer."""
        if all(copy.done() for copy in done.copies):
            self.copied(done)
        else:
            self.spawn(self.wait_for_copies, done)

    async def wait_for_copies(self, done: Done) -> None:
        while not all(copy.done() for copy in done.copies):  # noqa: ASYNC110 - a CUDA event can only be polled
            await trio.sleep(0.001)
        self.copied(done)
        self.use_spare(done)

    def copied(self, done: Done) -> None:
        for shift in done.shifted:
            self.pool.give(shift)
        for session, vector in done.snapshots:
            if session in self.peer.exchanges.table or session in self.peer.donating.table:
                self.sessions.snapshots[session] = vector
                self.perform(self.peer.snapshotted(session, self.now))
            else:
                self.pool.give(vector)

    def use_spare(self, done: Done) -> None:
        """The exchange that began at this boundary has its snapshot already."""
        spare = done.spare
        if spare is None:
            return
        for session in self.boundary.take_requests():
            if session in self.peer.exchanges.table or session in self.peer.donating.table:
                spare.users += 1
                self.sessions.snapshots[session] = spare
                self.perform(self.peer.snapshotted(session, self.now))
        self.pool.give(spare)

    # -- a link's life -------------------------------------------------------------------------------------------
    async def run_link(self, link: Link, theirs: Hello) -> None:
        """From the finished Hello to the end of the stream."""
        member = theirs.record
        if member is not None:
            if self.stopping or (len(self.links) >= self.config.max_links and not self.make_room()):
                self.pending.pop(link.peer, None)
                link.stream.close_now()
                return
            self.links.add(link)
            pending = self.pending.pop(link.peer, None)
            self.perform(self.peer.linked(link.peer, member, self.now))
            for message in pending or ():
                self.send(link.peer, message)
        try:
            with trio.CancelScope() as scope:
                link.cancel_scope = scope
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self.write, link, scope)
                    try:
                        await self.read(link, member is None)
                    finally:
                        link.finish()
                        scope.deadline = trio.current_time() + 1.0
        except* RemoteError:
            pass
        finally:
            link.stream.close_now()
            if member is not None:
                self.unlink(link)

    async def write(self, link: Link, scope: trio.CancelScope) -> None:
        def sent(session: int) -> None:
            entry = self.sessions.table.get(session)
            if entry is not None:
                entry.moved_at = self.now

        def finished(session: int) -> None:
            if session in self.peer.donating.table:
                self.perform(self.peer.served(session, self.now))

        try:
            await link.write_loop(sent, finished)
            with trio.move_on_after(1.0):
                await link.stream.aclose()
        except RemoteError:
            pass
        scope.cancel()

    async def read(self, link: Link, observer: bool) -> None:
        window, count = self.now, 0

        def on_message(message: Message) -> None:
            nonlocal window, count
            if self.now - window >= 1.0:
                window, count = self.now, 0
            count += 1
            if count > MESSAGES_PER_S:
                raise ProtocolError("A member sends too many messages.")
            if isinstance(message, StatusQuery):
                link.send(status_page(self, message.after))
            elif isinstance(message, Close):
                self.on_close(link, message)
            elif isinstance(message, Hello) or observer:
                raise ProtocolError("A message came that does not belong here.")
            else:
                if not isinstance(message, Offer | Fetch | Outcome):
                    self.perform(self.peer.receive(link.peer, message, self.now))
                    return
                session = message.session
                self.sessions.links.setdefault(session, link)
                if self.counts is not None:
                    self.peer.counted(*self.counts())
                self.perform(self.peer.receive(link.peer, message, self.now))
                if session not in self.peer.exchanges.table and session not in self.peer.donating.table:
                    self.sessions.links.pop(session, None)  # answered and over: what was refused is not remembered

        def on_body(chunk: Chunk) -> None:
            session = self.sessions.table.get(chunk.session)
            if session is None or session.receiver is None:
                return
            session.moved_at = self.now
            if not session.receiver.arrived(chunk):
                self.perform(self.peer.failed(session.id, "checksum", self.now))
            elif session.receiver.done and isinstance(session.receiver, DifferenceReceiver):
                self.perform(self.peer.streamed(session.id, *Sessions.norms(session), self.now))

        await link.read_loop(on_message, lambda chunk, size: self.sessions.place(link, chunk, size), on_body)

    def on_close(self, link: Link, message: Close) -> None:
        link.orderly = link.orderly or message.code == "idle"
        if message.code in ("layout", "swarm", "version"):
            self.doors.tell(f"A member refused this node: {message.sentence}")

    def unlink(self, link: Link) -> None:
        broken = self.sessions.on(link)
        last = self.links.remove(link)
        for session in broken:
            self.sessions.links.pop(session, None)
            self.perform(self.peer.failed(session, "broken", self.now))
        if last:
            self.perform(self.peer.unlinked(link.peer, self.now, orderly=link.orderly))

    def make_room(self) -> bool:
        """Close the link that was idle the longest, if there is one without a session."""
        busy = set(self.sessions.links.values())
        idle = [link for link in self.links.all() if link not in busy and link.peer not in self.peer.reach.homes]
        if not idle:
            return False
        min(idle, key=lambda link: link.used_at).retire()
        return True

    # -- time ----------------------------------------------------------------------------------------------------
    async def keep_time(self) -> None:
        while True:
            self.rearm = trio.Event()
            self.armed = min(self.peer.deadline, self.now + 3600)
            with trio.move_on_at(self.armed):
                await self.rearm.wait()
            if self.now >= self.peer.deadline:
                self.perform(self.peer.tick(self.now))
                if self.peer.deadline <= self.now:  # a deadline that a tick did not move must not spin
                    await trio.sleep(0.01)

    async def watch(self) -> None:
        """Streams that stopped moving, links that are idle."""
        while True:
            await trio.sleep(self.config.stall_s / 4)
            now = self.now
            for session in self.sessions.stalled(now, self.config.stall_s):
                self.on_event(
                    "stalled", f"A transfer with {short(session.partner)} stopped moving; its link is closed."
                )
                session.link.close_now()
            busy = set(self.sessions.links.values())
            for link in self.links.all():
                if now - link.used_at > self.config.idle_s and link not in busy:
                    link.retire()

    async def leave(self, within_s: float) -> None:
        """Say LEFT, let it be sent, close every link."""
        if self.counts is not None:
            self.peer.counted(*self.counts())
        self.perform(self.peer.leave(self.now))
        self.stopping = self.doors.closed = True
        for link in self.links.all():
            link.finish()
        with trio.move_on_after(within_s):
            while len(self.links):  # noqa: ASYNC110 - a second at most, at the very end
                await trio.sleep(0.005)
        for link in self.links.all():
            link.close_now()
