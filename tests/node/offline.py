"""A Runtime without a network and without a training thread, which does at once what it is told."""

import functools
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import trio

from gossip.arithmetic.outer_step import OuterStep
from gossip.averaging.boundary import Boundary
from gossip.config import Config
from gossip.effects import Snapshot
from gossip.ids import PeerId
from node.faults import Faults
from node.links.connector import Access
from node.links.frame_reader import FrameReader
from node.links.handshake import Greeter
from node.links.link import Link
from node.model.backup import KeptWeights
from node.model.pool import VectorPool
from node.model.snapshot import ModelState
from node.network.runtime import Runtime
from tests.agreement.scenario import ELEMENTS, Scenario, identity, make_peer
from tests.memory_stream import memory_stream_pair

OTHER = identity(1).id


def runtime(config=None):
    """Return a Runtime with a ready peer; ``events`` collects its notices."""
    config = config or Config(filter="none")
    peer = make_peer(0, (), Scenario([], 0.0, config), trio.current_time())
    state = ModelState({"x": np.zeros(ELEMENTS, np.float32)})
    pool = VectorPool(state)
    outer = OuterStep(ELEMENTS, *config.outer, config.averaged, config.measures_momentum)
    events = []
    boundary = Boundary(state, pool, KeptWeights(state), config.conserves)
    live = SimpleNamespace(boundary=boundary, pool=pool, outer=outer, outer_lock=nullcontext())

    def notice(kind, sentence):
        events.append((kind, sentence))

    reporter = SimpleNamespace(notify=notice, announce=lambda event: None, faults=Faults(notice))
    made = Runtime(peer, Access(None, Greeter(config.swarm, state.layout)), live, reporter)
    made.events = events
    made.perform(peer.start(trio.current_time()))
    assert peer.view.ready
    return made


def link(peer=OTHER, capacity_bytes=4_096):
    """Return a link to ``peer`` and a reader of its far end. Sends wait once ``capacity_bytes`` are unread."""
    near, far = memory_stream_pair(capacity_bytes)
    return Link(near, FrameReader(near), PeerId(peer)), FrameReader(far)


def in_trio(test):
    @functools.wraps(test)
    def inside(*arguments, **named):
        async def main():
            with trio.fail_after(30):
                found = test(*arguments, **named)
                if found is not None:
                    await found

        trio.run(main)

    return inside


def wants_snapshot(node):
    """Have the peer promise an exchange that needs a snapshot, unless it has one. Return the session."""
    exchange = next(iter(node.peer.exchanges.table.values()), None)
    if exchange is None:
        node.peer.linked_peers[OTHER] = 0.0
        node.peer.partners.choose = lambda asked, now, *more: OTHER if not asked else None
        effects = node.peer.exchanges.begin_mix(node.now)
        node.perform(effects)
        [wish] = [effect for effect in effects if isinstance(effect, Snapshot)]
        return wish.session
    return exchange.session
