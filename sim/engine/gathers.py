"""Group means: everybody's slices to their owners, and the means of them back to all."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from gossip.arithmetic.group_mean import group_mean, norm_accepts, slices
from gossip.codecs import CODECS, Codec
from gossip.config import Config
from gossip.effects import Effect, Gather
from gossip.filters.registry import filter_of
from gossip.ids import PeerId
from sim.engine.events import Events
from sim.engine.flows import Flow, Flows
from sim.engine.host import Floats, Host
from sim.engine.links import VirtualLinks
from sim.world.network import NetworkModel

__all__ = ["GroupMeans"]

Key = tuple[Host, int]  # and the session
Handler = Callable[[Host, int, int, Floats], None]

GATHERED = 214  # in the log of events


class GroupMean:
    """One host's side of a group mean."""

    __slots__ = ("awaited", "codec", "effect", "mean", "missing", "ours", "own_mean", "parts", "place", "refused",
                 "slices", "streamed")  # fmt: skip

    def __init__(self, effect: Gather, snapshot: Floats, codec: Codec) -> None:
        self.effect, self.codec, self.place = effect, codec, effect.place
        self.slices = slices(snapshot.size, len(effect.members))
        self.ours = through(codec, snapshot, effect.session)  # as everybody takes it
        own = self.slices[effect.place]
        self.parts = np.empty((len(effect.members), own.stop - own.start), np.float32)
        self.parts[effect.place] = self.ours[own]
        self.mean = np.empty_like(self.ours)
        others = [place for place in range(len(effect.members)) if place != effect.place]
        self.missing = set(others if own.stop > own.start else ())  # whose slices our mean waits for
        self.awaited = {place for place, one in enumerate(self.slices) if one.stop > one.start}  # means not here
        self.streamed: set[int] = set()  # to whom our slices go
        self.own_mean: Floats | None = None
        self.refused: list[PeerId] = []


class GroupMeans:
    """Performs Gather, and reports what becomes of it."""

    def __init__(
        self, events: Events, network: NetworkModel, config: Config, links: VirtualLinks, flows: Flows,
        perform: Callable[[Host, list[Effect]], None], sent: Callable[[int], None],
    ) -> None:  # fmt: skip
        self.events, self.network, self.config = events, network, config
        self.links, self.flows, self.perform, self.sent = links, flows, perform, sent
        self.table: dict[Key, GroupMean] = {}
        self.under_way: dict[Key, dict[Flow, None]] = {}
        self.early: dict[Key, list[Callable[[], None]]] = {}  # what came before its group began

    @property
    def idle(self) -> bool:
        return not (self.table or self.early)

    def gather(self, host: Host, effect: Gather, snapshot: Floats) -> None:
        """Stream to those members to whom there is a link, and at another call to those linked since."""
        key = host, effect.session
        one, first = self.table.get(key), key not in self.table
        if one is None:
            one = self.table[key] = GroupMean(effect, snapshot, CODECS[effect.codec])
        values = one.ours
        if host.liar is not None:
            values = through(one.codec, host.liar.sends(snapshot, effect.session), effect.session)
        for place, member in enumerate(effect.members):
            if place == one.place or place in one.streamed or not self.links.linked(host, member):
                continue
            one.streamed.add(place)
            self.stream(host, one, member, values[one.slices[place]], self.on_slice)
            if one.own_mean is not None:
                self.stream(host, one, member, one.own_mean, self.on_mean)
        if first:
            for arrive in self.early.pop(key, []):
                arrive()
            self.close_slice(host, one)

    def stream(
        self, host: Host, one: GroupMean, member: PeerId, values: Floats, handler: Handler
    ) -> None:  # fmt: skip
        if not values.size:
            return
        to, key = self.links.by_id[member], (host, one.effect.session)
        size_bytes = one.codec.encoded_bytes(values.size)
        self.sent(size_bytes)
        flow: Flow | None = None

        def done() -> None:
            if flow is not None:
                self.under_way[key].pop(flow, None)
            self.on_sent(host, to, key[1], one.place, values, handler)

        flow = self.flows.start(host.index, to.index, size_bytes, done)
        if flow is not None:
            self.under_way.setdefault(key, {})[flow] = None

    def on_sent(
        self, host: Host, to: Host, number: int, place: int, values: Floats, handler: Handler
    ) -> None:  # fmt: skip
        """The last byte is on its way."""
        if host.gone:
            return
        if self.links.cut(host, to) or self.network.loses(host.rng):
            self.events.push(self.events.now + self.config.stall_s, self.on_stalled, to, host, number)
        else:
            self.events.push_bulk(self.links.after(host, to), self.arrive, to, number, place, values, handler)

    def arrive(self, host: Host, number: int, place: int, values: Floats, handler: Handler) -> None:
        """A stream that is here before the group began here waits for it."""
        if host.gone:
            return
        if (host, number) in self.table:
            handler(host, number, place, values)
        elif host.peer.exchange(number) is not None:
            self.early.setdefault((host, number), []).append(partial(handler, host, number, place, values))

    def on_slice(self, host: Host, number: int, place: int, values: Floats) -> None:
        """Somebody's values of the slice that is ours."""
        one = self.table.get((host, number))
        if one is not None:
            one.parts[place] = values
            one.missing.discard(place)
            self.close_slice(host, one)

    def close_slice(self, host: Host, one: GroupMean) -> None:
        """When all of our slice is here, its mean goes to all."""
        effect, own = one.effect, one.slices[one.place]
        if one.missing or one.own_mean is not None or own.stop == own.start:
            return
        mean, refused = group_mean(one.parts, one.place, filter_of(self.config).mean, self.config.norm_bound)
        one.refused = [effect.members[place] for place in refused]
        said = mean if host.liar is None else host.liar.sends(mean, effect.session)
        one.own_mean = through(one.codec, said, effect.session, own.start)
        for place in sorted(one.streamed):
            self.stream(host, one, effect.members[place], one.own_mean, self.on_mean)
        kept = one.own_mean if host.liar is None else through(one.codec, mean, effect.session, own.start)
        self.on_mean(host, effect.session, one.place, kept)

    def on_mean(self, host: Host, number: int, place: int, values: Floats) -> None:
        """The mean of somebody's slice."""
        one = self.table.get((host, number))
        if one is None:
            return
        one.mean[one.slices[place]] = values
        one.awaited.discard(place)
        if one.awaited or one.missing:
            return
        self.events.note(host.index, host.index, GATHERED)
        apart_sq = own_sq = 0.0
        with np.errstate(all="ignore"):  # what is not finite is refused
            apart = one.mean - one.ours
            for at, part in enumerate(one.slices):
                squares = float(apart[part].dot(apart[part])), float(one.ours[part].dot(one.ours[part]))
                apart_sq, own_sq = apart_sq + squares[0], own_sq + squares[1]
                if norm_accepts(*squares, part.stop - part.start, self.config.norm_bound) is not None:
                    one.refused.append(one.effect.members[at])
        self.perform(host, host.peer.gathered(number, apart_sq, own_sq, one.refused, self.events.now))

    def on_stalled(self, host: Host, sender: Host, number: int) -> None:
        """Nothing has moved for too long, and a node closes the link."""
        one = self.table.get((host, number))
        if host.gone or one is None or sender.id not in one.effect.members:
            return
        place = one.effect.members.index(sender.id)
        if (place in one.missing or place in one.awaited) and self.links.linked(host, sender.id):
            self.links.close(host, sender.id)

    def take(self, host: Host, session: int) -> tuple[Floats, int] | None:
        """``mean - ours`` of a group that is settled, and how many were in it."""
        one = self.table.get((host, session))
        return None if one is None else (one.mean - one.ours, len(one.effect.members))

    def release(self, host: Host, session: int) -> None:
        key = host, session
        self.table.pop(key, None)
        self.early.pop(key, None)
        for flow in self.under_way.pop(key, {}):
            self.flows.stop(flow)

    def forget(self, host: Host) -> None:
        for key in [key for key in dict.fromkeys((*self.table, *self.under_way, *self.early)) if key[0] is host]:
            self.release(*key)


def through(codec: Codec, values: Floats, seed: int, start: int = 0) -> Floats:
    """As the others decode it."""
    out = np.empty_like(values)
    codec.quantised(values, out, seed, start)
    return out
