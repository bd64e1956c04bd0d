"""The simulator's driver: every peer of a swarm in virtual time on one heap, the same shape as node/runtime.py."""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from gossip.codecs import get_codec
from gossip.config import Config
from gossip.effects import (
    Adopt,
    Collect,
    Dial,
    Effect,
    MemberChanged,
    Mix,
    Notice,
    Release,
    Send,
    Serve,
    Snapshot,
    Transfer,
    TryDial,
)  # fmt: skip
from gossip.ids import Address, MemberRecord, PeerId
from gossip.mixing import OuterStep, difference
from gossip.peer import Peer
from gossip.records import trusting, unsigned
from sim.events import Events
from sim.host import Floats, Host
from sim.links import Links
from sim.network import Network

__all__ = ["Swarm", "derive"]

OnStep = Callable[[int, Floats, int], None]

REST_S = 0.01  # after a tick that did not move its deadline, as a node rests
PORT = 7700
TICK, STEP, STREAMED, COLLECTED = 210, 211, 212, 213  # in the log of events, above those of sim.links


def derive(seed: int, name: str, purpose: str) -> bytes:
    """32 bytes that depend on the seed, one peer's name and the purpose alone: adding a peer changes no other's."""
    return hashlib.sha256(f"{seed}/{name}/{purpose}".encode()).digest()


class Swarm:
    """Peers of one Config on one Network. The same seed and the same calls give the same :meth:`digest`.

    ``on_step(index, vector, steps)`` is called at the end of each training step of a ready peer and may change the
    vector; by default nothing trains, and the swarm averages what it began with.
    """

    def __init__(self, seed: int, network: Network, config: Config, on_step: OnStep | None = None) -> None:
        self.seed, self.network, self.config, self.on_step = seed, network, config, on_step
        self.hosts: list[Host] = []
        self.events = Events()
        self.links = Links(self.events, network, config, self.perform)
        self.raw = get_codec("fp32")
        self.performers: dict[type, Callable[[Host, Any], None]] = {
            Send: self.links.send, Dial: self.links.dial, TryDial: self.links.try_dial,
            Snapshot: self.snapshot, Transfer: self.transfer, Mix: self.mix, Release: self.release,
            Collect: self.collect, Serve: self.serve, Adopt: self.adopt, Notice: self.ignore,
            MemberChanged: self.ignore,
        }  # fmt: skip

    @property
    def now(self) -> float:
        """Virtual seconds since the swarm was made."""
        return self.events.now

    # -- what happens to the swarm -------------------------------------------------------------------------------
    def add_peer(
        self,
        vector: Floats,
        seeds: Iterable[int] = (),
        *,
        step_s: float = 0.1,
        samples_per_step: int = 1,
        name: str | None = None,
    ) -> int:
        """Start a peer now; returns its index. ``vector``: float32, one dimension, used as it is and changed in place,
        so it may be a row of the caller's matrix. ``seeds``: indices of peers to join through, none to start a swarm.

        Its randomness comes from the swarm's seed and its ``name`` (by default its index).
        """
        name = str(len(self.hosts)) if name is None else name
        record = MemberRecord(
            PeerId(derive(self.seed, name, "id")[:16]), b"", 1, address=Address(f"peer-{name}", PORT),
            genesis=derive(self.seed, name, "genesis")[:16],
        )  # fmt: skip
        peer = Peer(
            record, sign=unsigned, verify=trusting, config=self.config, fingerprint=f"vector of {vector.size}",
            elements=vector.size, rng=random.Random(derive(self.seed, name, "peer")),
            seeds=tuple(self.hosts[seed].address for seed in seeds), now=self.now,
        )  # fmt: skip
        # Somewhere within a step, or all peers would mix at the same instants.
        first_step_s = step_s * (1.0 - random.Random(derive(self.seed, name, "phase")).random())
        return self.host(peer, vector, name, step_s, first_step_s, samples_per_step)

    def host(
        self, peer: Peer, vector: Floats, name: str, step_s: float, first_step_s: float, samples_per_step: int = 1
    ) -> int:
        """Run a Peer that was made elsewhere; its first step ends in ``first_step_s``."""
        assert vector.dtype == np.float32, "models are float32 vectors"
        assert vector.ndim == 1, "models are flat vectors"
        outer = OuterStep(vector.size, self.config.outer_momentum, self.config.outer_rate)
        outer.reset(vector)
        rng = random.Random(derive(self.seed, name, "network"))
        host = Host(len(self.hosts), peer, vector, outer, step_s, samples_per_step, rng)
        self.hosts.append(host)
        self.links.add(host)
        self.perform(host, peer.start(self.now))
        self.events.push(self.now + first_step_s, self.on_boundary, host)
        return host.index

    def kill(self, index: int) -> None:
        """End a peer without a word, as kill -9 does: its machine tells its partners that their links are gone."""
        host = self.hosts[index]
        host.gone = True
        for partner in host.links:
            self.links.hang_up(host, partner)

    def leave(self, index: int) -> None:
        """Let a peer say LEFT and go."""
        host = self.hosts[index]
        for effect in host.peer.leave(self.now):
            if not isinstance(effect, Send) or effect.to in host.links:  # it does not stay to dial the others
                self.performers[type(effect)](host, effect)
        self.kill(index)

    def partition(self, groups: Iterable[Iterable[int]]) -> None:
        """Cut the network into these groups of peers; those not named, and newcomers, are one more."""
        self.links.partition(groups)

    def heal(self) -> None:
        """Join the groups again."""
        self.links.heal()

    def run_until(self, when: float) -> None:
        """Let virtual time pass up to ``when``, in seconds."""
        self.events.run_until(when)

    # -- questions -----------------------------------------------------------------------------------------------
    def alive(self) -> list[Host]:
        """Those neither killed nor gone."""
        return [host for host in self.hosts if not host.gone]

    def digest(self) -> str:
        """SHA-256 of the log of events and of all vectors, in hexadecimal."""
        whole = self.events.digest()
        for host in self.hosts:
            whole.update(host.vector.tobytes())
        return whole.hexdigest()

    # -- effects and time ----------------------------------------------------------------------------------------
    def perform(self, host: Host, effects: list[Effect]) -> None:
        performers = self.performers
        for effect in effects:
            performers[type(effect)](host, effect)
        self.arm(host)

    def arm(self, host: Host) -> None:
        """One timer a host. A deadline that moved back lets the timer go off early, which costs less than another."""
        due = max(host.peer.deadline, host.rest_until, self.events.now)
        if due < host.armed:
            host.armed = due
            self.events.push(due, self.on_timer, host, due)

    def on_timer(self, host: Host, due: float) -> None:
        if due != host.armed or host.gone:
            return
        host.armed = math.inf
        peer, now = host.peer, self.events.now
        if now >= peer.deadline and now >= host.rest_until:
            self.events.note(host.index, 0, TICK)
            performers = self.performers
            for effect in peer.tick(now):
                performers[type(effect)](host, effect)
            if peer.deadline <= now:
                host.rest_until = now + REST_S
        self.arm(host)

    # -- the training loop ---------------------------------------------------------------------------------------
    def on_boundary(self, host: Host) -> None:
        """The end of a step: what node.boundary's visit and Runtime.at_boundary do, in their order."""
        if host.gone:
            return
        peer, now = host.peer, self.events.now
        if peer.ready:
            host.steps += 1
            host.samples += host.samples_per_step
            if self.on_step is not None:
                self.on_step(host.index, host.vector, host.steps)
        self.events.note(host.index, host.steps, STEP)
        adopted, host.adopting = host.adopting, False
        shifts, host.shifts = host.shifts, []
        requests, host.requests = host.requests, {}
        if adopted:
            assert host.joining_vector is not None
            host.vector[:] = host.joining_vector
            host.outer.reset(host.vector)
            host.joining_vector = None
        for shift in shifts:
            host.vector += shift
        copy = host.vector.copy() if requests else host.vector  # before the peer hears anything, as in a node
        if adopted:
            self.perform(host, peer.adopted(now))
        for session in requests:
            if session in peer.exchanges.table or session in peer.donating.table:
                host.snapshots[session] = copy
                self.perform(host, peer.snapshotted(session, now))
        self.perform(host, peer.stepped(host.steps, host.samples, None, now))
        self.events.push(now + host.step_s, self.on_boundary, host)

    # -- exchanges -----------------------------------------------------------------------------------------------
    def snapshot(self, host: Host, effect: Snapshot) -> None:
        assert not effect.full, "simulated peers have no optimizer state to share"
        host.requests[effect.session] = None

    def transfer(self, host: Host, effect: Transfer) -> None:
        session, snapshot = effect.session, host.snapshots.get(effect.session)
        if snapshot is None or effect.partner not in host.links:
            self.events.push(self.now, self.on_failed, host, session, "broken")
            return
        codec = get_codec(effect.codec)
        host.transfers[session] = (effect.partner, codec)
        size_bytes = codec.encoded_bytes(snapshot.size)
        self.stream(host, self.links.by_id[effect.partner], session, snapshot, size_bytes, self.on_stream)

    def stream(
        self, host: Host, to: Host, session: int, values: Floats, size_bytes: int, handler: Callable[..., None]
    ) -> float:
        """All of ``values`` arrives with its last byte, chunks being a matter of a real node's memory and progress;
        returns when that byte is sent."""
        sent = self.now + self.network.stream_s(host.index, to.index, size_bytes)
        self.events.push(sent, self.on_sent, host, to, session, values, handler)
        return sent

    def on_sent(self, host: Host, to: Host, session: int, values: Floats, handler: Callable[..., None]) -> None:
        """The last byte is on its way, behind the messages of this instant: control goes ahead of bulk."""
        if host.gone:
            return
        if self.links.cut(host, to) or self.network.loses(host.rng):
            self.events.push(self.now + self.config.stall_s, self.on_stalled, to, host, session)
        else:
            self.events.push(self.links.after(host, to), handler, to, host, session, values)

    def on_stream(self, host: Host, sender: Host, session: int, theirs: Floats) -> None:
        transfer = host.transfers.get(session)
        if host.gone or transfer is None or transfer[0] != sender.id:
            return
        ours, out = host.snapshots[session], np.empty_like(theirs)
        codec = transfer[1]
        if not codec.raw:
            codec.quantised(theirs, out)
            theirs, quantised = out, np.empty_like(ours)
            codec.quantised(ours, quantised)
            ours = quantised
        difference_sq = difference(theirs, ours, out)
        host.differences[session] = out
        self.events.note(host.index, sender.index, STREAMED)
        self.perform(host, host.peer.streamed(session, difference_sq, float(np.dot(ours, ours)), self.now))

    def on_stalled(self, host: Host, sender: Host, session: int) -> None:
        """Nothing has moved for too long, and a node closes the link."""
        waiting = session in host.collecting or (session in host.transfers and session not in host.differences)
        if waiting and sender.id in host.links and not host.gone:
            self.links.close(host, sender.id)

    def on_failed(self, host: Host, session: int, code: str) -> None:
        if not host.gone:
            self.perform(host, host.peer.failed(session, code, self.now))

    def mix(self, host: Host, effect: Mix) -> None:
        snapshot, out = host.snapshots.get(effect.session), host.differences.pop(effect.session, None)
        if snapshot is None or out is None:
            return
        if host.peer.local.settling:
            out *= np.float32(effect.weight)
        else:
            host.outer.shift(snapshot, out, effect.weight)
        host.shifts.append(out)

    def release(self, host: Host, effect: Release) -> None:
        session = effect.session
        host.requests.pop(session, None)
        host.snapshots.pop(session, None)
        host.transfers.pop(session, None)
        host.differences.pop(session, None)
        host.collecting.pop(session, None)

    # -- joining -------------------------------------------------------------------------------------------------
    def collect(self, host: Host, effect: Collect) -> None:
        if host.joining_vector is None:
            host.joining_vector = np.zeros(effect.size, np.float32)
        if effect.partner in host.links:
            host.collecting[effect.session] = effect
        else:
            self.events.push(self.now, self.on_failed, host, effect.session, "broken")

    def serve(self, host: Host, effect: Serve) -> None:
        snapshot = host.snapshots.get(effect.session)
        if snapshot is None or effect.partner not in host.links:
            self.events.push(self.now, self.on_failed, host, effect.session, "broken")
            return
        piece = snapshot[effect.start : effect.stop]
        to, size_bytes = self.links.by_id[effect.partner], self.raw.encoded_bytes(piece.size)
        sent = self.stream(host, to, effect.session, piece, size_bytes, self.on_piece)
        self.events.push(sent, self.on_served, host, effect.session)

    def on_served(self, host: Host, session: int) -> None:
        if not host.gone:
            self.perform(host, host.peer.served(session, self.now))

    def on_piece(self, host: Host, sender: Host, session: int, piece: Floats) -> None:
        effect = host.collecting.get(session)
        if host.gone or effect is None or effect.partner != sender.id:
            return
        assert host.joining_vector is not None
        host.joining_vector[effect.start : effect.stop] = piece
        self.events.note(host.index, sender.index, COLLECTED)
        self.perform(host, host.peer.collected(session, effect.stop, self.now))

    def adopt(self, host: Host, effect: Adopt) -> None:
        host.adopting = True
        host.shifts.clear()  # they belong to the weights that go

    def ignore(self, host: Host, effect: Notice | MemberChanged) -> None:
        """For people, who ask the peers."""
