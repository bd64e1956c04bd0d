"""What happens in a small swarm, in words: a line for what a peer decides, and for what it is told from outside."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from fractions import Fraction
from typing import Any

from gossip.effects import Adopt, Effect, Gather, MemberChanged, Mix, Notice, Release, Send, Snapshot, Transfer
from gossip.ids import PeerId, short
from gossip.wire.messages import TAGS, Message
from tests.gossip.group_harness import GroupSwarm
from tests.gossip.swarm_harness import Node, Swarm

CHATTER = {"ping", "ack", "ping-req", "nack", "gossip", "digest", "records", "reach", "reached"}


class Recorder(Swarm):
    """From :meth:`record` on it writes ``lines``, with the seconds since then. Of membership it tells what it comes to,
    links and states, where ``members`` is set; of exchanges only that they mixed, unless ``exchanges`` is."""

    lines: list[str] | None = None
    members, exchanges = False, True

    def record(self) -> None:
        self.lines, self.began = [], self.now
        self.numbers: dict[int, int] = {}  # session -> what it is called here
        self.partners: dict[tuple[PeerId, int], str] = {}  # in a session
        self.linked: set[int] = set()  # links told of

    def say(self, what: str, who: str = "") -> None:
        assert self.lines is not None
        self.lines.append(f"{self.now - self.began:8.3f}  {who:<6}  {what}")

    def step(self, what: str, who: str) -> None:
        """Of an exchange, on its way to a mix."""
        if self.exchanges:
            self.say(what, who)

    def until(self, condition: Callable[[], bool], limit_s: float) -> float:
        """To the millisecond, so that a trace ends where it says."""
        begin = self.now
        while not condition():
            assert self.now - begin <= limit_s, f"not within {limit_s} s"
            self.run(0.001)
        return self.now - begin

    # -- words -------------------------------------------------------------------------------------------------------
    def names(self, *peers: PeerId) -> str:
        return " ".join("abc"[self.by_id[peer].number] for peer in peers)

    def number(self, session: int) -> str:
        return f"#{self.numbers.setdefault(session, len(self.numbers) + 1)}"

    def words(self, message: Message) -> str:
        """The message as docs/protocol.md names it, without what is the same throughout a trace."""
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
    def perform(self, node: Node, effects: list[Effect]) -> None:
        for effect in effects:
            if self.lines is not None:
                self.decided(node, effect, self.names(node.id))
            super().perform(node, [effect])

    def decided(self, node: Node, effect: Effect, who: str) -> None:
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
            case Release(session) if session in node.snapshots and session not in node.serving:
                if session not in {mixed for _, mixed, _ in node.mixes}:
                    self.step(f"drops {self.number(session)}", who)
            case Adopt():
                self.say("has all weights, and takes them at its next step boundary", who)
            case MemberChanged(peer, before, after) if self.members:
                was = f", no longer {before.name}" if before else ", whom it has just met"
                incarnation = node.peer.membership.record(peer).incarnation
                self.say(f"holds {self.names(peer)} {after.name}{was} (incarnation {incarnation})", who)
            case Notice(kind, sentence):
                self.say(f"says: {kind}: {sentence.replace(short(node.genesis), '1')}", who)

    # -- what is told from outside -----------------------------------------------------------------------------------
    def call(self, node: Node, event: str, *arguments: Any) -> None:
        if self.lines is not None and node.running:
            who, first = self.names(node.id), arguments[0]
            match event:
                case "linked" if self.members and node.links[first] not in self.linked:
                    self.linked.add(node.links[first])
                    self.say(f"a link, which {who} dialled", f"{who} -- {self.names(first)}")
                case "streamed":
                    self.step(f"has all that {self.partners[node.id, first]} streams for {self.number(first)}", who)
                case "gathered":
                    self.say(f"has the mean of every slice of {self.number(first)}", who)
                case "collected":
                    self.say(f"has the elements up to {arguments[1]:,} by {self.number(first)}", who)
        super().call(node, event, *arguments)

    def broken(self, node: Node, peer: PeerId) -> None:
        self.say(f"sees that its link with {self.names(peer)} is broken", self.names(node.id))
        super().broken(node, peer)

    def deliver(self, sender: Node, to: Node, life: int, message: Message) -> None:
        if to.links.get(sender.id) != life and TAGS[type(message)] not in CHATTER:
            self.say(f"lost with the link: {self.words(message)}", f"{self.names(sender.id)} -> {self.names(to.id)}")
        super().deliver(sender, to, life, message)

    def apply_shifts(self, node: Node) -> None:
        """Snapshots are taken just after this."""
        before, some = node.value, bool(node.shifts)
        super().apply_shifts(node)
        if self.lines is None:
            return
        who = self.names(node.id)
        if some:
            self.say(f"adds the difference: its weights were {before} and are {node.value}", who)
        for session in node.wanted:
            self.step(f"takes a snapshot for {self.number(session)}: its weights are {node.value}", who)


class GroupRecorder(Recorder, GroupSwarm):
    pass
