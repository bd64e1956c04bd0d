"""The node's side of the agreement tests: real Runtimes on memory streams, in the virtual time of trio's mock clock.

A connection is two of node.stream's memory streams with a carrier between them, which holds what one side sends for the
latency and loses it while the two are cut off. Opening one takes what the simulator's links take: a latency to the
acceptor's machine, one back, and one for the acceptor to hear of it.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterable
from contextlib import nullcontext

import numpy as np
import trio
import trio._core._run as scheduler
import trio.testing

from gossip.arithmetic.correction import Correction, steps_between_parts
from gossip.arithmetic.outer_step import OuterStep
from gossip.averaging.boundary import Boundary
from gossip.averaging.visit import Visit
from gossip.config import Config
from gossip.ids import Address
from gossip.peer import Peer
from node.faults import Faults
from node.links.connector import Access
from node.links.handshake import Greeter
from node.loop.steps import StepLoop
from node.model.backup import KeptWeights
from node.model.pool import VectorPool
from node.model.snapshot import ModelState
from node.network.runtime import Runtime
from node.observe.events import ExchangeEvent, NodeEvent
from node.transport.byte_stream import BrokenLinkError, ByteStream
from sim.engine.host import Lessons
from sim.engine.training import POLL_S, REPORT_S, next_poll
from sim.world.network import NetworkModel
from tests.memory_stream import MemoryStream, memory_stream_pair

PIPE_BYTES = 1 << 20  # More than a node sends at one instant, so that all of it also arrives at one instant.
START_S = 1024.0
"""When trio's clock starts. It jumps by differences, and from here on the difference of two times is exact (Sterbenz:
the later one is less than twice the earlier), so that it jumps to the very number it was told to."""

Handler = Callable[[ByteStream], Awaitable[None]]
OnStep = Callable[[int, np.ndarray, int], None]


class Carrier:
    """One direction of a connection: what comes out of ``near`` goes into ``far`` a latency later."""

    def __init__(
        self, near: MemoryStream, far: MemoryStream, latency: Callable[[], float], cut: Callable[[], bool]
    ) -> None:
        self.near, self.far, self.latency, self.cut = near, far, latency, cut
        self.back: Carrier
        self.moving: deque[tuple[float, bytes | None, bool]] = deque()  # (due, bytes, or the end and whether proper)
        self.more = trio.Event()

    def put(self, data: bytes | None, proper: bool = True) -> None:
        if not self.cut():
            self.moving.append((trio.current_time() + self.latency(), data, proper))
            self.more.set()

    async def take(self) -> None:
        buffer = memoryview(bytearray(PIPE_BYTES))
        try:
            while count := await self.near.receive_into(buffer):
                self.put(bytes(buffer[:count]))
            self.put(None, True)
        except BrokenLinkError:
            self.put(None, False)

    async def give(self) -> None:
        while True:
            while not self.moving:
                self.more = trio.Event()
                await self.more.wait()
            await trio.sleep_until(self.moving[0][0])
            data = b""
            while self.moving and self.moving[0][0] <= trio.current_time() and self.moving[0][1] is not None:
                data += self.moving.popleft()[1] or b""
            try:
                if data:
                    await self.far.send_all(data)
                elif self.moving.popleft()[2]:
                    await self.far.aclose()
                    return
                else:
                    self.far.close_now()
                    return
            except BrokenLinkError:  # The far end is closed: its machine resets the connection.
                self.back.put(None, False)
                return


class World:
    """The network of all nodes, which the test cuts and heals, and the nodes on it."""

    def __init__(self, network: NetworkModel, nursery: trio.Nursery) -> None:
        self.network, self.nursery = network, nursery
        self.group_of: dict[int, int] | None = None
        self.ports: dict[Address, Port] = {}
        self.nodes: list[Trainer] = []

    def partition(self, groups: Iterable[Iterable[int]]) -> None:
        self.group_of = {index: number for number, group in enumerate(groups, 1) for index in group}

    def heal(self) -> None:
        self.group_of = None

    def cut(self, a: int, b: int) -> bool:
        return self.group_of is not None and self.group_of.get(a, 0) != self.group_of.get(b, 0)

    def add(
        self, peer: Peer, config: Config, vector: np.ndarray, on_step: OnStep, step_s: float, first_step_s: float
    ) -> None:
        node = Trainer(self, len(self.nodes), peer, config, vector, on_step, step_s)
        self.nodes.append(node)
        self.nursery.start_soon(node.main, trio.current_time() + first_step_s)


class Port:
    """A node's way to the network: node.links.Network over memory streams."""

    def __init__(self, world: World, index: int, address: Address) -> None:
        self.world, self.index, self.address = world, index, address
        self.accepting: tuple[Handler, trio.Nursery] | None = None
        world.ports[address] = self

    async def serve(self, handler: Handler, nursery: trio.Nursery) -> None:
        self.accepting = handler, nursery
        try:
            await trio.sleep_forever()
        finally:
            self.accepting = None

    async def connect(self, address: Address, allows: Callable[[str], bool] | None = None) -> ByteStream:
        world, to = self.world, self.world.ports[address]
        if allows is not None and not allows(address.host):
            raise BrokenLinkError(f"{address} must not be dialled.")

        def there() -> float:
            return world.network.latency(self.index, to.index)

        def back() -> float:
            return world.network.latency(to.index, self.index)

        def cut() -> bool:
            return world.cut(self.index, to.index)

        if cut():
            await trio.sleep_forever()  # The caller's timeout ends the dial.
        await trio.sleep(there())
        listening = to.accepting is not None
        if cut():
            await trio.sleep_forever()
        await trio.sleep(back())
        if not listening:
            raise ConnectionRefusedError(f"{address} refused")
        ours, near = memory_stream_pair(PIPE_BYTES)
        theirs, far = memory_stream_pair(PIPE_BYTES)
        out, home = Carrier(near, far, there, cut), Carrier(far, near, back, cut)
        out.back, home.back = home, out
        for carrier in (out, home):
            world.nursery.start_soon(carrier.take)
            world.nursery.start_soon(carrier.give)
        if not cut():
            world.nursery.start_soon(self.knock, to, theirs, there())
        return ours

    async def knock(self, to: Port, stream: MemoryStream, after_s: float) -> None:
        await trio.sleep(after_s)
        if to.accepting is None:
            stream.close_now()
        else:
            handler, nursery = to.accepting
            nursery.start_soon(handler, stream)


class Trainer:
    """A Runtime and, in place of a training thread, a task that takes steps: the boundary between them is the one of
    Node.step."""

    def __init__(
        self, world: World, index: int, peer: Peer, config: Config, vector: np.ndarray, on_step: OnStep, step_s: float
    ) -> None:
        address = peer.membership.me.address
        assert address is not None
        self.world, self.index, self.peer, self.vector = world, index, peer, vector
        self.on_step, self.step_s, self.steps = on_step, step_s, 0
        state = ModelState({"x": vector})
        pool = VectorPool(state)
        self.woken = trio.Event()
        self.boundary = Boundary(state, pool, KeptWeights(state), config.conserves, wake=lambda: self.woken.set())
        self.loop = StepLoop(config, self.boundary, self, REPORT_S, visit_gap_s=0.0)
        self.loop.reported_at = trio.current_time()
        self.outer = OuterStep(vector.size, *config.outer, config.averaged, config.measures_momentum)
        self.outer.reset(vector)
        self.correction: Correction | None = None
        if config.kappa and config.first_interval:
            numbers = vector.size, vector.size, config.kappa, config.first_interval
            # A node learns as soon as an exchange ends, and the simulator at the next boundary. So learn there too.
            self.correction, self.outer.correction = Correction(*numbers), Lessons(*numbers)
        self.corrected_at_step = 0
        self.pool, self.outer_lock = pool, nullcontext()
        self.faults = Faults(self.notify)
        access = Access(Port(world, index, address), Greeter(config.swarm, state.layout))
        self.runtime = Runtime(peer, access, self, self)
        self.told: Counter[str] = Counter()  # Exchanges reported by events: "done", or the reason of a failure.
        self.runtime.on_batch_end = self.update_hints
        self.runtime.read_progress = lambda: (self.steps, self.steps)
        self.scope, self.training = trio.CancelScope(), trio.CancelScope()
        self.gone = False

    async def main(self, first_step_at: float) -> None:
        with self.scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self.runtime.main)
                nursery.start_soon(self.train, first_step_at)

    def kill(self) -> None:
        """Reset the node's streams and end its tasks."""
        self.gone = True
        self.scope.cancel()

    def leave(self, within_s: float) -> None:
        self.gone = True
        self.world.nursery.start_soon(self.say_goodbye, within_s)

    async def say_goodbye(self, within_s: float) -> None:
        await self.hand_over()
        await self.runtime.leave(within_s)
        self.scope.cancel()

    async def hand_over(self) -> None:
        """Stop in the middle of a step, which still counts, and mix a last time, polling as the simulator does."""
        self.training.cancel()
        self.take_step()
        self.peer.update_counts(self.steps, self.steps)
        look_at = trio.current_time()
        self.peer.note_boundary(look_at)
        self.runtime.perform(self.peer.hand_over(look_at))
        until = look_at + self.peer.config.internal.grace_s
        while trio.current_time() < until and self.peer.view.is_handing_over:
            look_at = min(until, look_at + POLL_S)
            while trio.current_time() < look_at:
                self.loop.visit(trio.current_time())
                self.woken = trio.Event()
                with trio.move_on_at(look_at):
                    await self.woken.wait()

    def check(self) -> None:
        """Assert that the Runtime keeps no state of finished sessions."""
        peer, averager = self.peer, self.runtime.averager
        under_way = peer.exchanges.table.keys() | peer.donating.table.keys() | peer.joining.pieces.keys()
        under_way |= peer.joining.check.comparisons.keys()
        assert averager.transfers.keys() <= under_way
        assert averager.boundary.requests.keys() <= under_way

        counted = Counter(peer.exchanges.failures_by_reason, done=peer.exchanges.done_count)
        told = Counter(self.told)
        told["replaced"] = counted["replaced"]  # The peer does not count every replaced exchange.
        assert told <= counted
        assert peer.exchanges.table or told == counted

    def notify(self, kind: str, sentence: str) -> None:
        """Discard the notice."""

    def announce(self, event: NodeEvent) -> None:
        if isinstance(event, ExchangeEvent) and event.kind != "exchange.begun":
            self.told[event.reason or "done"] += 1

    async def train(self, when: float) -> None:
        with self.training:
            while True:
                await trio.sleep_until(when)
                if self.peer.view.ready:
                    self.take_step()
                    self.loop.step(self.steps, trio.current_time())
                else:
                    self.loop.visit(trio.current_time())
                self.peer.note_boundary(trio.current_time())  # a node says so four times a second
                if self.loop.is_lockstep:
                    await self.hold(when)
                when = trio.current_time() + self.step_s

    def take_step(self) -> None:
        self.steps += 1
        self.on_step(self.index, self.vector, self.steps)
        if self.correction is not None:
            self.correct(self.correction)

    def correct(self, correction: Correction) -> None:
        """Correct the last steps as a Node does, in numpy: torch rounds once where numpy rounds twice."""
        steps = self.steps - self.corrected_at_step
        if steps >= steps_between_parts(correction.interval_steps):
            self.corrected_at_step = self.steps
            if correction.pull is not None:
                self.vector += np.float32(correction.step_factor(steps)) * correction.pull

    async def hold(self, since: float) -> None:
        """Wait in lockstep as a Node does, polling at the simulator's times."""
        landing = False
        while self.loop.must_wait(landing):
            landing = True
            if not self.boundary.has_requests:
                self.woken = trio.Event()
                with trio.move_on_at(next_poll(since, trio.current_time())):
                    await self.woken.wait()
            self.loop.step(self.steps, trio.current_time())

    def update_hints(self) -> None:
        self.loop.hints.update_from(self.peer)
        if not self.loop.hints.must_wait:
            self.woken.set()

    # -- the loop's owner ----------------------------------------------------------------------------------------
    def on_replaced(self, weights: np.ndarray) -> None:
        self.outer.replace(weights)
        if self.correction is not None:
            self.correction.reset()

    def learn(self, visit: Visit) -> None:
        if self.correction is not None and visit.updates and not visit.adopted:
            assert isinstance(self.outer.correction, Lessons)
            for shift, lesson in self.outer.correction.take():
                self.correction.learn(shift, 1.0, lesson)

    def is_copy_due(self) -> bool:
        return False

    def report_updates(self, visit: Visit) -> None:
        self.learn(visit)
        self.runtime.averager.use_copies(visit)

    def report(self, visit: Visit) -> None:
        self.learn(visit)
        self.runtime.averager.on_visit(visit, self.steps, self.steps, None)


def run(main: Callable[[], Awaitable[None]]) -> None:
    """Run a trio program in virtual time, its scheduler seeded as hypothesis-trio seeds it."""
    clock = trio.testing.MockClock(autojump_threshold=0)
    clock.jump(START_S)
    before = scheduler._ALLOW_DETERMINISTIC_SCHEDULING
    scheduler._ALLOW_DETERMINISTIC_SCHEDULING = True  # type: ignore[misc]
    state = scheduler._r.getstate()
    scheduler._r = random.Random(0)
    try:
        trio.run(main, clock=clock)
    finally:
        scheduler._ALLOW_DETERMINISTIC_SCHEDULING = before  # type: ignore[misc]
        scheduler._r.setstate(state)
