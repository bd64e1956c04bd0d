"""Traces of a small swarm in words: a line for each decision of a peer, and for each event from outside."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from fractions import Fraction
from typing import Any

from gossip.config import Config
from gossip.effects import Adopt, Effect, Gather, MemberChanged, Mix, Notice, Release, Send, Snapshot, Transfer
from gossip.ids import MemberRecord, PeerId, short
from gossip.wire.messages import TAGS, Message
from tests.harness.host import Host
from tests.harness.network import Link, Network
from tests.harness.world import World

CHATTER = {"ping", "ack", "ping-req", "nack", "gossip", "digest", "records", "reach", "reached"}


class Recorder(World):
    """A World that writes a trace into ``lines``, with the seconds since :meth:`record`.

    If ``members`` is set, it also records links and states of members. If ``exchanges`` is False, it records only the
    mixes of exchanges, and not the messages before them.
    """

    lines: list[str] | None = None
    members, exchanges = False, True

    def __init__(self, seed: int, *, config: Config, latency_s: float = 0.01) -> None:
        super().__init__(seed, config=config, latency_s=latency_s)
        self.network = Lines(self, latency_s, loss=0.0)

    def start(self, *seeds: int, **how: Any) -> Recorded:
        return super().start(*seeds, kind=Recorded, **how)

    def record(self) -> None:
        self.lines, self.began = [], self.now
        self.numbers: dict[int, int] = {}  # The number of each session in the trace.
        self.partners: dict[tuple[PeerId, int], str] = {}  # The names of a node's partners in a session.
        self.linked: set[Link] = set()  # Links that the trace has shown.

    def say(self, what: str, who: str = "") -> None:
        assert self.lines is not None
        self.lines.append(f"{self.now - self.began:8.3f}  {who:<6}  {what}")

    def step(self, what: str, who: str) -> None:
        """Record a step of an exchange before its mix, if ``exchanges`` is set."""
        if self.exchanges:
            self.say(what, who)

    def until(self, condition: Callable[[], bool], limit_s: float, look_s: float = 0.001) -> float:
        """Run until the condition holds, checked every millisecond, so that a trace ends at an exact time."""
        return super().until(condition, limit_s, look_s)

    # -- words -------------------------------------------------------------------------------------------------------
    def names(self, *peers: PeerId) -> str:
        return " ".join("abc"[self.by_id[peer].number] for peer in peers)

    def number(self, session: int) -> str:
        return f"#{self.numbers.setdefault(session, len(self.numbers) + 1)}"

    def words(self, message: Message) -> str:
        """Return the message with the names of docs/protocol.md, without fields that are constant in a trace."""
        said = {field.name: getattr(message, field.name) for field in fields(message)}
        words = [TAGS[type(message)], self.number(said["session"])]
        if "members" in said:
            words.append(f"members {self.names(*said['members'])}")
        if "start" in said:
            start, stop = said["start"], said["stop"]
            words.append(f"elements {start:,} to {stop:,}" if start < stop else "no elements: what is there?")
        if "version" in said:
            words.append(f"version {said['version']:.2g}")
        if "weight" in said:
            words.append(f"weight {Fraction(said['weight'])}")
        words += [said[key] for key in ("codec", "code") if key in said]
        if "committed" in said:
            words.append("yes" if said["committed"] else "no")
        return " ".join(words)

    # -- what is decided ---------------------------------------------------------------------------------------------
    def decided(self, node: Recorded, effect: Effect) -> None:
        who = self.names(node.id)
        match effect:
            case Send(to, message) if TAGS[type(message)] not in CHATTER:
                self.step(self.words(message), f"{who} -> {self.names(to)}")
            case Snapshot(session):
                self.step(f"wants a snapshot for {self.number(session)}, at its next step boundary", who)
            case Transfer(session, partner):
                self.partners[node.id, session] = self.names(partner)
                self.step(f"streams {self.number(session)} to {self.names(partner)}", who)
            case Gather(session, members, place):
                self.partners[node.id, session] = self.names(*(one for one in members if one != node.id))
                self.step(f"streams {self.number(session)} by slices, of which slice {place} is its own", who)
            case Mix(session, weight):
                partner = self.partners[node.id, session]
                self.say(f"mixes {self.number(session)} with {partner}, weight {Fraction(weight)}", who)
            case Release(session) if node.sessions[session].value is not None and node.sessions[session].serve is None:
                if session not in {mixed for _, mixed, _ in node.mixes}:
                    self.step(f"drops {self.number(session)}", who)
            case Adopt():
                self.say("has all weights, and takes them at its next step boundary", who)
            case MemberChanged(peer, before, after) if self.members:
                was = f", no longer {before.name}" if before else ", whom it has just met"
                incarnation = node.peer.membership.record(peer).incarnation
                self.say(f"holds {self.names(peer)} {after.name}{was} (incarnation {incarnation})", who)
            case Notice(kind, sentence):
                self.say(f"says: {kind}: {sentence.replace(short(node.run_id), '1')}", who)


class Recorded(Host):
    """A Host that reports its decisions, and the events from outside, to a :class:`Recorder`."""

    world: Recorder

    def do(self, effect: Effect) -> None:
        if self.world.lines is not None:
            self.world.decided(self, effect)
        super().do(effect)

    def call(self, event: str, *arguments: Any) -> None:
        world = self.world
        if world.lines is not None:
            who, first = world.names(self.id), arguments[0]
            match event:
                case "on_streamed":
                    partner = world.partners[self.id, first]
                    world.step(f"has all that {partner} streams for {world.number(first)}", who)
                case "on_gathered":
                    world.say(f"has the mean of every slice of {world.number(first)}", who)
                case "on_collected":
                    world.say(f"has the elements up to {arguments[1]:,} by {world.number(first)}", who)
        super().call(event, *arguments)

    def up(self, link: Link, record: MemberRecord) -> None:
        world, who = self.world, self.world.names(self.id)
        if world.lines is not None and world.members and link not in world.linked:
            world.linked.add(link)
            world.say(f"a link, which {who} dialled", f"{who} -- {world.names(record.id)}")
        super().up(link, record)

    def lost(self, link: Link) -> None:
        self.world.say(f"sees that its link with {self.world.names(link.other(self).id)} is broken",
                       self.world.names(self.id))  # fmt: skip
        super().lost(link)

    def boundary(self) -> None:
        self.was = self.value if self.model.pending else None
        super().boundary()

    def take(self, numbers: list[int]) -> list[int]:
        """Take snapshots; record them and the difference that has just been added to the weights."""
        world, who = self.world, self.world.names(self.id)
        if world.lines is not None and self.was is not None:
            world.say(f"adds the difference: its weights were {self.was} and are {self.value}", who)
        for number in numbers if world.lines is not None else ():
            world.step(f"takes a snapshot for {world.number(number)}: its weights are {self.value}", who)
        return super().take(numbers)


class Lines(Network):
    """A Network that records lost messages."""

    def deliver(self, link: Link, place: int, message: Message) -> None:
        sender, to = link.ends[place], link.ends[1 - place]
        if not link.carries(to) and TAGS[type(message)] not in CHATTER:
            world = self.world
            world.say(
                f"lost with the link: {world.words(message)}", f"{world.names(sender.id)} -> {world.names(to.id)}"
            )
        super().deliver(link, place, message)
