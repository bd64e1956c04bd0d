"""A lying member: it runs a Peer, and sends any well-formed message at any time under its own identity."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections import deque
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from gossip.effects import Effect
from gossip.errors import GossipError
from gossip.exchange.progress import RunProgress
from gossip.ids import MOST_SAMPLES, Address, Claim, MemberRecord, PeerId
from gossip.wire.frames import decode, encode
from gossip.wire.messages import (
    Abort,
    Accept,
    Ack,
    Begin,
    Busy,
    Commit,
    Digest,
    Fetch,
    Gossip,
    Hint,
    Invite,
    Joined,
    Nack,
    Offer,
    Outcome,
    Ping,
    PingReq,
    Reach,
    Reached,
    Records,
    Refuse,
    Serving,
    Settled,
)  # fmt: skip
from tests.harness.world import address_of
from tests.simulation.host import ELEMENTS, Host

if TYPE_CHECKING:
    from tests.simulation.network import Link

PREFIX_BYTES = 12  # before a frame's header
SEEN = 32  # session numbers and records that it can speak of
NUMBERS = (0, 1, 2**31, 2**53 - 1, 2**53, 2**62, 2**63 - 1)
FLOATS = (0.0, -0.0, -1.0, 0.5, 5e-324, 1e-310, 1e-300, 1.0, 1e6, 2.0**53 - 1, 2.0**53, 1.7e308, math.inf, math.nan)


class Lying(RunProgress):
    """Progress that states as much as a message holds in every exchange."""

    @property
    def claim(self) -> Claim:
        return Claim(*[MOST_SAMPLES] * 4)


class Liar(Host):
    """A member that follows the protocol in part.

    It draws the share of its messages that it withholds or says twice, how often it answers early, and how often it
    lies.
    """

    liar = True

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        rng = self.rng
        self.withholding = rng.choice([0.0, 0.1, 0.5])
        self.twice = rng.choice([0.0, 0.1])
        self.eager = rng.choice([0.0, 0.3, 0.6])  # commits, aborts and answers long before they are due
        self.every_s = rng.choice([0.02, 0.1, 0.5])
        self.sybils = rng.choice([0, 0, 20])
        self.seen: deque[int] = deque(maxlen=SEEN)
        self.records: deque[MemberRecord] = deque(maxlen=SEEN)
        self.hints: deque[Hint] = deque(maxlen=SEEN)
        if rng.random() < 0.5:
            self.peer.local.progress.__class__ = Lying
        self.fibs = list(rng.sample(FIBS, rng.randint(2, len(FIBS))))

    def start(self) -> None:
        super().start()
        self.later(self.every_s, self.speak)

    # -- as a driver ---------------------------------------------------------------------------------------------
    def call(self, event: str, *arguments: Any) -> None:
        try:
            super().call(event, *arguments)
        except (GossipError, AssertionError, KeyError, ValueError):
            return  # what becomes of a liar's own state is its own affair

    def perform(self, effects: list[Effect]) -> None:
        for effect in effects:
            try:
                super().perform([effect])
            except (GossipError, AssertionError, KeyError, ValueError):
                continue

    def received(self, link: Link, sender: Host, message: Any) -> None:
        session = getattr(message, "session", None)
        if session is not None:
            self.seen.append(session)
            if self.eager and self.rng.random() < self.eager:
                self.answer(sender.id, message, session)
        for update in (*getattr(message, "updates", ()), *getattr(message, "records", ())):
            (self.records if isinstance(update, MemberRecord) else self.hints).append(update)
        super().received(link, sender, message)

    def answer(self, to: PeerId, message: Any, session: int) -> None:
        """Answer long before it is due, and perhaps contradict itself."""
        if type(message) is Offer and self.rng.random() < 0.5:
            self.say(to, Commit(session))
            self.say(to, Busy(session))
            return
        self.say(to, self.rng.choice([
            Commit(session), Settled(session, True), Settled(session, False), Outcome(session), Busy(session),
            Abort(session, "late"), Accept(session, 0.0, 0.5, "fp32"), Refuse(session, "run_id"),
        ]))  # fmt: skip

    def send(self, to: PeerId, message: Any) -> None:
        if self.rng.random() < self.withholding:
            return
        super().send(to, message)
        if self.rng.random() < self.twice:
            super().send(to, message)

    # -- lies ----------------------------------------------------------------------------------------------------
    def speak(self) -> None:
        self.later(self.every_s, self.speak)
        others = [peer for peer in self.links if self.world.by_id[peer].liar is False]
        if not others:
            known = [host for host in self.world.honest if host.dialable]
            if known and self.rng.random() < 0.3:
                other = self.rng.choice(known)
                self.world.network.dial(self, address_of(other.number), other.id)
            return
        self.say(self.rng.choice(others), getattr(self, self.rng.choice(self.fibs))())

    def say(self, to: PeerId, message: Any) -> None:
        """Send a message if the wire can carry it."""
        try:
            message = decode(encode(message)[PREFIX_BYTES:])
        except (GossipError, OverflowError, ValueError):
            return
        self.world.judge.sent(self, to, message)
        super().send(to, message)

    def session(self) -> int:
        rng = self.rng
        return rng.choice(list(self.seen)) if self.seen and rng.random() < 0.8 else rng.getrandbits(62)

    def someone(self) -> PeerId:
        return self.rng.choice([host.id for host in self.world.hosts])

    def figure(self) -> float:
        rng = self.rng
        return rng.choice(FLOATS) if rng.random() < 0.5 else float(self.peer.local.version + rng.uniform(-2, 2))

    def claim(self) -> Claim:
        """Return a claim of progress: a number at a bound, or one near the liar's own."""
        rng, own = self.rng, self.peer.local.progress.claim
        samples, most = rng.choice([*NUMBERS, own.samples]), rng.choice([*NUMBERS, own.most])
        return Claim(samples, most, rng.choice([*NUMBERS, own.members]), rng.choice([*NUMBERS, own.interval]))

    def lie_offer(self) -> Offer:
        local, rng = self.peer.local, self.rng
        return Offer(
            rng.getrandbits(62) if rng.random() < 0.5 else self.session(), rng.choice(["f", "f", "f", "g"]),
            local.run_id, self.figure() if rng.random() < 0.3 else local.version,
            rng.choice([0.5, 0.5, 0.25, 1e-9, 2.0]),
            rng.choice(["fp32", "fp32", "int8", "moniqua4", "none"]),
            "push" if self.config.pushes != (rng.random() < 0.1) else rng.choice(["pair", "pair", "ahead"]),
            rng.choice([0.0, 1.0, 1.0, 2.0**32, 1e-9]),
            rng.choice(["all", "all", "mask 0.1", "top 0.01", "fragment 1/4", "nothing"]),
            self.claim(),
        )  # fmt: skip

    def lie_answer(self) -> Any:
        rng, session = self.rng, self.session()
        return rng.choice([
            Accept(session, self.figure(), rng.choice([0.5, 0.25, 0.0, 3.0]), rng.choice(["fp32", "int8", "none"]),
                   self.claim()),
            Busy(session), Refuse(session, "run_id"), Commit(session), Commit(session), Abort(session, "late"),
            Abort(session, "checksum"), Outcome(session), Settled(session, True), Settled(session, False),
        ])  # fmt: skip

    def lie_group(self) -> Any:
        rng, session, local = self.rng, self.session(), self.peer.local
        members = tuple(sorted({self.id, *(self.someone() for _ in range(rng.randint(0, 5)))}))
        return rng.choice([
            Invite(session, "f", local.run_id, local.version, "fp32", members),
            Invite(rng.getrandbits(62), "f", local.run_id, local.version, "fp32", members),
            Joined(session, self.figure(), "fp32", self.claim()),
            Begin(session, members, self.figure(), "fp32", self.claim()),
        ])  # fmt: skip

    def lie_fetch(self) -> Any:
        rng, local = self.rng, self.peer.local
        start, session = rng.choice([0, 0, 1024, ELEMENTS]), self.session()
        moments = (("exp_avg", "exp_avg_sq"), "fs") if session % 3 else (("exp_avg",), "")
        return rng.choice([
            Fetch(rng.getrandbits(62), (), start, rng.choice([start, ELEMENTS, 2**62])),
            Fetch(session, moments[0], 0, ELEMENTS, moments[1]),
            Serving(self.session(), self.figure(), local.run_id, rng.choice([(), ("zzz",)]), (("step", 1e308),),
                    rng.choice(NUMBERS), rng.random() < 0.5),
            Reach(), Reached(rng.random() < 0.5),
        ])  # fmt: skip

    def lie_hints(self) -> Gossip:
        rng = self.rng
        hints = []
        for _ in range(rng.randint(1, 8)):
            victim = rng.choice(self.world.hosts)
            record = self.peer.membership.record(victim.id)
            incarnation = record.incarnation if record is not None else 1
            hints.append(Hint(victim.id, rng.choice([incarnation, incarnation, incarnation + 1, 2**53]),
                              rng.random() < 0.5, self.id))  # fmt: skip
        if self.hints and rng.random() < 0.5:
            hints.append(rng.choice(list(self.hints)))  # a hint with its author's signature
        return Gossip(tuple(hints))

    def lie_records(self) -> Any:
        rng = self.rng
        mine = self.peer.membership.me
        changes: dict[str, Any] = {"sequence": mine.sequence + rng.randint(1, 5), "ready": rng.random() < 0.7}
        if rng.random() < 0.5:
            changes |= {"samples": rng.choice(NUMBERS[:5]), "steps": rng.choice(NUMBERS[:5])}
        if rng.random() < 0.5:
            changes |= {"progress": rng.choice(NUMBERS[:5]), "loss": rng.choice(FLOATS)}
        if rng.random() < 0.3:
            changes |= {"version": rng.choice(FLOATS), "finished": rng.random() < 0.5}
        if rng.random() < 0.2:
            runs = [host.peer.view.run_id for host in self.world.honest]
            changes |= {"run_id": rng.choice([b"\xff" * 16, b"", b"\0" * 16, rng.randbytes(16), *runs])}
        if rng.random() < 0.3:
            changes |= {"incarnation": mine.incarnation + rng.choice([1, 5, 999, 1001, 2**52])}
        changed: list[Any] = [dataclasses.replace(mine, **changes)]
        for number in range(rng.randint(0, 6) if self.sybils else 0):
            name = hashlib.sha256(b"sybil %d %d" % (self.number, rng.randrange(self.sybils) + number)).digest()
            address = Address("10.0.0.2", 2000 + name[0])
            changed.append(MemberRecord(PeerId(name[:16]), b"", 1, rng.randint(0, 9), address=address, ready=True,
                                        run_id=self.peer.local.run_id, samples=rng.choice(NUMBERS[:4]),
                                        progress=rng.choice(NUMBERS[:4]), finished=rng.random() < 0.3))  # fmt: skip
        if self.records and rng.random() < 0.5:
            changed.append(rng.choice(list(self.records)))  # an earlier version of a record
        return rng.choice([Gossip, lambda updates: Records(updates, b"")])(tuple(changed))

    def lie_probe(self) -> Any:
        rng = self.rng
        return rng.choice([
            Ping(rng.choice(NUMBERS), ()), Ack(rng.choice(NUMBERS), ()),
            PingReq(rng.choice(NUMBERS), self.someone(), ()),
            Nack(rng.choice(NUMBERS)), Digest(b""), Digest(bytes(2048)), Records((), bytes(range(256))),
        ])  # fmt: skip

    # -- vectors -------------------------------------------------------------------------------------------------
    def stream(self, link: Link, number: int, what: str, value: Any) -> None:
        """Stream wrong values, or nothing."""
        lie = self.rng.random()
        if lie < 0.3:
            return
        if lie < 0.6:
            value = value + (Fraction(self.rng.randint(-500, 500)) if self.model.exact else 1.0)
        super().stream(link, number, what, value)


FIBS = ("lie_offer", "lie_answer", "lie_answer", "lie_group", "lie_fetch", "lie_hints", "lie_records", "lie_probe")
