"""A crowd: many members of a node's run in one process, at a small part of the cost of as many nodes.

    python benchmarks/crowd.py 499 127.0.0.1:40213 <the run>      499 members, of whom a few dial that node

Each member has a node's ``Peer`` and a key of its own. Members talk to each other over the simulator's links, with
virtual time tied to the clock. They talk to other nodes over real sockets: each listens on a port of its own and uses a
node's code to dial, greet, frame and close. Their training loops are idle. They claim to hold the weights of the node's
run, but no newcomer can fetch the weights from them.

Each input line is a query. "cpu" returns the CPU seconds used, "met" the smallest number of others that a member has
met, and "doubts" how often one member is not ALIVE to another. The process ends at the end of its input.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import itertools
import random
import resource
import secrets
import signal
import sys
import time
from collections import deque

import numpy as np
import trio

from gossip.arithmetic.layout import Layout
from gossip.config import Config
from gossip.effects import Dial, Effect, MemberState, Send, TryDial
from gossip.errors import RemoteError
from gossip.exchange.session import LocalModel
from gossip.ids import Address, MemberRecord, PeerId, from_hex, parse_address
from gossip.membership.protocol import Membership
from gossip.peer import Peer
from gossip.wire.messages import Close, Fetch, Hello, Invite, Message, Offer, Outcome, StatusQuery, Unknown, Widen
from gossip.wire.records import trusting
from node.faults import Faults
from node.identity.keys import Identity
from node.links.connector import Access, Connector
from node.links.handshake import Greeter
from node.links.link import Link
from node.links.pool import Links
from node.links.reading import read_link
from node.model.snapshot import ModelState
from node.transport.tcp import TcpNetwork
from sim.engine.host import Host
from sim.engine.swarm import Swarm
from sim.world.network import NetworkModel

ELEMENTS = 1_000
SWARM = "small"
TICK_S = 0.005  # interval at which the simulated events are run; messages of the node are handled at once
LATENCY_S = 0.0005  # latency of messages between members
LOOK_S = 0.75  # interval at which a member checks for idle links, as on a node
# Groups into which these checks are spread, as if the members had started at random times. Without them either all
# members or none would close a link before the node does.
TURNS = 15
IDLE_STEP_S = 1e9  # step time of an idle training loop
DIALLERS = 3  # members that dial the node
LAST_WORDS_S = 1.0  # time for a closing link to send the rest
PENDING = 32  # messages kept for a peer that is being dialled
PR_SET_PDEATHSIG = 1

DRIVER_MESSAGES = StatusQuery | Widen | Unknown  # messages for the driver, which a Peer does not handle


class Gate:
    """One member's links with nodes outside the crowd, in the role of a node's ``Runtime``."""

    def __init__(self, crowd: Crowd, host: Host, network: TcpNetwork) -> None:
        self.crowd, self.host, self.peer = crowd, host, host.peer
        self.links = Links()
        self.pending: dict[PeerId, deque[Message]] = {}  # messages for peers that are being dialled
        self.faults = Faults(self.notify)
        self.connector = Connector(Access(network, crowd.greeter), crowd.config, self)

    # -- for the connector -----------------------------------------------------------------------------------------
    def notify(self, kind: str, sentence: str) -> None:
        """Ignore what people would be told."""

    def report_misbehaviour(self, who: PeerId | str, kind: str) -> None:
        """Ignore failed handshakes."""

    # -- effects ---------------------------------------------------------------------------------------------------
    def send(self, to: PeerId, message: Message) -> None:
        link = self.links.newest(to)
        if link is not None:
            link.send(message)
            return
        record = self.peer.membership.record(to)
        if record is not None and record.address is not None:
            self.pending.setdefault(to, deque(maxlen=PENDING)).append(message)
            self.connector.dial(record.address, to)

    async def try_dial(self, asker: PeerId, address: Address) -> None:
        answered = await self.connector.try_dial(address)
        self.perform(self.peer.on_dial_tried(asker, answered, self.crowd.catch_up()))

    def on_dial_failed(self, peer: PeerId | None) -> None:
        if peer is not None:
            self.pending.pop(peer, None)
        self.perform(self.peer.on_dial_failed(peer, self.crowd.catch_up()))

    def perform(self, effects: list[Effect]) -> None:
        self.crowd.swarm.perform(self.host, effects)

    # -- a link ----------------------------------------------------------------------------------------------------
    async def run_link(self, link: Link, theirs: Hello) -> None:
        """Run a link from the finished Hello to the end of its stream."""
        if theirs.record is None:
            link.stream.close_now()
            return
        peer = self.peer
        self.links.add(link)
        try:
            pending = self.pending.pop(link.peer, ())
            self.perform(peer.on_linked(link.peer, theirs.record, self.crowd.catch_up()))
            for message in pending:
                if peer.view.should_send(link.peer, message):
                    self.send(link.peer, message)
            async with trio.open_nursery() as nursery:
                link.cancel_scope = nursery.cancel_scope
                nursery.start_soon(self.write, link)
                accepts_from = functools.partial(self.on_message, link)
                await read_link(link, accepts_from, lambda chunk, size: None, lambda chunk: None)
                link.finish()
                nursery.cancel_scope.deadline = trio.current_time() + LAST_WORDS_S
        except* RemoteError:
            pass
        finally:
            link.stream.close_now()
            self.unlink(link)

    async def write(self, link: Link) -> None:
        await link.write_loop(lambda session: None, lambda session: None)
        with trio.move_on_after(LAST_WORDS_S):
            await link.stream.aclose()
        if link.cancel_scope is not None:
            link.cancel_scope.cancel()

    def on_message(self, link: Link, message: Message) -> None:
        if isinstance(message, Close):
            link.is_orderly = link.is_orderly or message.code == "idle"
        elif not isinstance(message, DRIVER_MESSAGES):
            now = self.crowd.catch_up()
            if isinstance(message, Offer | Invite | Fetch | Outcome):
                self.crowd.swarm.training.report_steps(self.host)
            self.perform(self.peer.receive(link.peer, message, now))

    def unlink(self, link: Link) -> None:
        now, code = self.crowd.catch_up(), "idle" if link.is_orderly else "broken"
        if self.links.remove(link):
            for session in self.peer.view.pairs_with(link.peer):
                self.perform(self.peer.on_failed(session, code, now))
            self.perform(self.peer.on_unlinked(link.peer, now, orderly=link.is_orderly))

    def watch(self, now: float, idle_s: float) -> None:
        for link in self.links.all():
            if now - link.used_at > idle_s:
                link.retire()


class Crowd:
    """The members of one run, which know each other. Nothing happens before :meth:`run`."""

    def __init__(self, run_id: bytes) -> None:
        self.config = Config(swarm=SWARM)
        self.run_id = run_id
        self.layout: Layout = ModelState({"x": np.zeros(ELEMENTS, np.float32)}).layout
        self.greeter = Greeter(self.config.swarm, self.layout)
        network = NetworkModel(latency_s=LATENCY_S, congestion="cubic")  # TCP enables idle timeouts
        self.swarm = Swarm(0, network, self.config)
        self.swarm.performers |= {Send: self.send, Dial: self.dial, TryDial: self.try_dial}
        self.gates: list[Gate] = []
        self.nursery: trio.Nursery | None = None
        self.began = 0.0

    async def add(self) -> None:
        network = TcpNetwork(Address("127.0.0.1", 0), self.config.hello_timeout_s)
        identity = Identity.fresh()
        record = MemberRecord(
            identity.id, identity.public_key, 1, address=await network.bind(), run_id=self.run_id, ready=True
        )  # fmt: skip
        rng, now = random.Random(secrets.randbits(64)), self.swarm.now
        members = Membership(record, sign=identity.sign, verify=trusting, config=self.config, rng=rng, now=now)
        model = LocalModel(self.layout.fingerprint, self.layout.exchanged)
        peer = Peer(members, self.config, model, rng=rng, now=now)
        vector = np.zeros(self.layout.exchanged, np.float32)
        index = self.swarm.add_made_peer(peer, vector, identity.id.hex(), IDLE_STEP_S, IDLE_STEP_S)
        self.gates.append(Gate(self, self.swarm.hosts[index], network))

    async def run(self, node: Address) -> None:
        """Run the crowd until cancelled."""
        self.swarm.introduce()
        self.began = trio.current_time() - self.swarm.now
        async with trio.open_nursery() as self.nursery:
            for gate in self.gates:
                gate.connector.open(self.nursery)
            for gate in self.gates[:DIALLERS]:
                gate.connector.dial(node, None)
            self.nursery.start_soon(self.keep_time)
            self.nursery.start_soon(self.watch)

    # -- time ------------------------------------------------------------------------------------------------------
    def catch_up(self) -> float:
        """Run the simulated events that are due, and return the members' virtual time."""
        self.swarm.events.run_until(trio.current_time() - self.began)
        return self.swarm.now

    async def keep_time(self) -> None:
        while True:
            self.catch_up()
            await trio.sleep(TICK_S)

    async def watch(self) -> None:
        for turn in itertools.cycle(range(TURNS)):
            await trio.sleep(LOOK_S / TURNS)
            now = trio.current_time()
            for gate in self.gates[turn::TURNS]:
                gate.watch(now, self.config.internal.idle_s)

    # -- effects ---------------------------------------------------------------------------------------------------
    def send(self, host: Host, effect: Send) -> None:
        if effect.to in self.swarm.links.by_id:
            self.swarm.links.send(host, effect)
        else:
            self.gates[host.index].send(effect.to, effect.message)

    def dial(self, host: Host, effect: Dial) -> None:
        if effect.address in self.swarm.links.dials.by_address:
            self.swarm.links.dial(host, effect)
        else:
            self.gates[host.index].connector.dial(effect.address, effect.expect)

    def try_dial(self, host: Host, effect: TryDial) -> None:
        if effect.address in self.swarm.links.dials.by_address:
            self.swarm.links.try_dial(host, effect)
        elif self.nursery is not None:
            self.nursery.start_soon(self.gates[host.index].try_dial, effect.asker, effect.address)

    # -- questions -------------------------------------------------------------------------------------------------
    def met(self) -> int:
        """Return the smallest number of others that a member has met."""
        return min(gate.peer.view.alive_count for gate in self.gates) - 1

    def doubts(self) -> int:
        """Return how often a member is not ALIVE to another."""
        return sum(state is not MemberState.ALIVE for gate in self.gates for _, state in gate.peer.membership.members())


async def serve(count: int, node: Address, run_id: bytes) -> None:
    """Run a crowd of ``count`` members, and answer queries until the input ends."""
    crowd = Crowd(run_id)
    for _ in range(count):
        await crowd.add()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(crowd.run, node)
        async for question in trio.wrap_file(sys.stdin):
            match question.strip():
                case "cpu":
                    print(time.process_time(), flush=True)
                case "met":
                    print(crowd.met(), flush=True)
                case "doubts":
                    print(crowd.doubts(), flush=True)
        nursery.cancel_scope.cancel()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("count", type=int, help="how many members")
    parser.add_argument("node", type=parse_address, help="where the node listens whose run theirs is")
    parser.add_argument("run", type=from_hex, help="its run, 32 hexadecimal digits")
    arguments = parser.parse_args()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # end when the benchmark ends
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    trio.run(serve, arguments.count, arguments.node, arguments.run)


if __name__ == "__main__":
    main()
