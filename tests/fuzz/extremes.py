"""Every number of every message at its extremes, sent to a peer in each of several states."""

import math
from collections.abc import Iterator
from random import Random
from typing import Any

import msgpack

from gossip.config import Config
from gossip.effects import Send
from gossip.errors import RemoteError
from gossip.ids import MOST_SAMPLES, Claim, PeerId, peer_id_of
from gossip.wire.frames import FIELDS, PREFIX_BYTES, RECORD_FIELDS, decode, encode
from gossip.wire.messages import Accept, Commit, Fetch, Hint, Invite, Joined, Offer, Settled
from tests.fuzz.engine import Target
from tests.fuzz.grammar import World, key_of, member
from tests.fuzz.wire import Messages

EXTREMES: tuple[Any, ...] = (
    0, 1, -1, 2**53 - 1, 2**53, 2**63 - 1, 2**64 - 1, True, False, 0.0, -0.0, 5e-324, 1e-310, -1e-310, 0.5, 2.0**53,
    1.7976931348623157e308, -1.7976931348623157e308, math.inf, -math.inf, math.nan, None, "1", (),
)  # fmt: skip
NUMBERS = ("int", "float", "bool")
IN_RECORDS = ("incarnation", "sequence", "left", "ready", "steps", "samples", "progress", "loss", "version", "finished")
PARTNER = peer_id_of(key_of(0))
SENSE: dict[str, Any] = {
    "fingerprint": "f", "run_id": World.run_id, "version": 1.0, "weight": 0.5, "codec": "fp32", "mixing": "pair",
    "mass": 0.0, "part": "all", "progress": Claim(100, 50, 3), "members": (), "start": 0, "stop": 0, "elements": 1_000,
    "optimizer_keys": (), "optimizer_scalars": (("step", 3.0),), "swarm_samples": 100, "code": "late",
}  # fmt: skip


def sensible(cls: type, session: int, me: PeerId) -> Any:
    """Return a message of this type that is meaningful to a peer with this session."""
    values: dict[str, Any] = {}
    for name, kind in FIELDS[cls]:
        empty: dict[str, Any] = {"int": 1, "float": 0.5, "bool": True, "text": "x", "bytes": b"", "record?": member(0)}
        values[name] = SENSE.get(name, empty.get(kind.form, ()))
        if name == "session":
            values[name] = session
        elif name == "target":
            values[name] = peer_id_of(key_of(1))
        elif kind.form == "updates":
            values[name] = (member(1, sequence=1), Hint(peer_id_of(key_of(2)), 1, False, PARTNER))
        elif name == "members" and kind.form == "ids":
            values[name] = tuple(sorted((PARTNER, me)))
    return cls(**values)


def replaced(cls: type, table: dict[str, Any], value: Any) -> Iterator[dict[str, Any]]:
    """Yield the header with each of its numbers replaced, one at a time."""
    for name, kind in FIELDS[cls]:
        here = table[name]
        if kind.form in NUMBERS and name != "session":
            yield table | {name: value}
        elif kind.form == "claim":
            for place in range(len(here)):
                yield table | {name: [*here[:place], value, *here[place + 1 :]]}
        elif kind.form == "scalars":
            yield table | {name: [[label, value] for label, _ in here]}
        elif kind.form == "updates":
            member, hint = here
            for field in IN_RECORDS:
                place = RECORD_FIELDS.index(field)
                yield table | {name: [[*member[:place], value, *member[place + 1 :]]]}
            yield table | {name: [[hint[0], value, *hint[2:]]]}


def cases(cls: type, session: int, me: PeerId) -> Iterator[bytes]:
    """Return headers as they arrive over the wire."""
    table = msgpack.unpackb(encode(sensible(cls, session, me))[PREFIX_BYTES:], raw=False)
    for value in EXTREMES:
        for header in replaced(cls, table, value):
            yield msgpack.packb(header, use_bin_type=True)


class Extreme(Messages):
    """A live peer that is brought into a state."""

    def __init__(self, state: str) -> None:
        Target.__init__(self, Random(1))
        config = Config(mix_every_steps=8, **({"mixing": "group"} if "group" in state else {}))
        self.sends: list[Send] = []
        self.session = 1
        self.begin(config, is_alone=state != "joining")
        for number in range(1 if config.grouped else 3):
            self.link(number)
        getattr(self, state.replace(" ", "_"))()

    def perform(self, effects: list[Any]) -> None:
        self.sends += [effect for effect in effects if isinstance(effect, Send)]
        super().perform(effects)
        self.look()

    def look(self) -> None:
        """Assert that all values computed from the members' numbers are finite."""
        local = self.peer.local
        assert 0.0 <= local.version < 2**53
        assert type(local.progress.samples) is int
        assert 0 <= local.progress.samples <= MOST_SAMPLES
        assert all(type(value) is int and value >= 0 for value in (local.progress.members, local.progress.claim.most))
        for one in self.peer.exchanges.table.values():
            assert math.isfinite(one.our_version)
            assert not math.isnan(one.timer_at)
            assert math.isfinite(getattr(one, "weight", 0.0))
            assert math.isfinite(getattr(one, "mass", 0.0))

    def step(self, steps: int) -> None:
        self.steps += steps
        self.perform(self.peer.on_stepped(self.steps, 8 * self.steps, 0.5, self.now))

    def report_all(self) -> None:
        for effect in self.todo[:]:
            self.todo.remove(effect)
            match type(effect).__name__:
                case "Snapshot" | "CopyPiece":
                    self.perform(self.peer.on_snapshotted(effect.session, self.now, 0.0, 1.0))
                case "Transfer":
                    self.perform(self.peer.on_streamed(effect.session, 1.0, 4.0, self.now))
                case "Gather":
                    self.perform(self.peer.on_gathered(effect.session, 1.0, 4.0, {}, set(), self.now))
                case "ReceivePiece":
                    self.perform(self.peer.on_collected(effect.session, effect.stop, self.now))
                case "Adopt" if self.peer.joining.phase.name == "ADOPTING":
                    self.perform(self.peer.on_adopted(self.now, 1.0, 4.0))

    def said(self, cls: type) -> Any:
        """Return the last message of this type that the peer sent, and its receiver."""
        return next((send for send in reversed(self.sends) if isinstance(send.message, cls)), None)

    # -- states --------------------------------------------------------------------------------------------------
    def idle(self) -> None:
        self.step(1)

    def offered(self) -> None:
        for _ in range(4):
            self.step(8)
            self.report_all()
        offer = self.said(Offer)
        self.sender, self.session = offer.to, offer.message.session

    def streaming(self) -> None:
        self.offered()
        self.perform(self.peer.receive(self.sender, Accept(self.session, 1.0, 0.5, "fp32"), self.now))
        assert self.peer.exchanges.table[self.session].state.name == "STREAMING"

    def joining(self) -> None:
        self.now += 1.0
        self.tick()
        fetch = self.said(Fetch)
        self.sender, self.session = fetch.to, fetch.message.session

    def group_offered(self) -> None:
        for _ in range(4):
            self.step(8)
            self.report_all()
        invite = self.said(Invite)
        self.sender, self.session = invite.to, invite.message.session

    def group_joined(self) -> None:
        self.sender, self.session = PARTNER, 77
        invite = Invite(77, "f", World.run_id, 1.0, "fp32", tuple(sorted((PARTNER, self.peer.id))))
        self.perform(self.peer.receive(PARTNER, invite, self.now))
        self.report_all()
        assert self.said(Joined) is not None

    def told(self, header: bytes) -> None:
        """Receive the message, and assert that the peer then continues with finite numbers."""
        try:
            self.perform(self.peer.receive(self.sender, decode(header), self.now))
        except RemoteError:
            self.ended(RemoteError("x", "x"))
        for turn in range(4):
            self.report_all()
            for session in list(self.peer.exchanges.table):
                self.perform(self.peer.receive(self.sender, Commit(session), self.now))
                self.perform(self.peer.receive(self.sender, Settled(session, True), self.now))
            self.step(8)
            if turn == 2:
                self.perform(self.peer.settle(True, self.now))
            self.now = max(self.now, min(self.peer.deadline, self.now + 30.0))
            self.tick()
        self.perform(self.peer.settle(False, self.now))
        self.perform(self.peer.ending.count_votes(self.now))


STATES = ("idle", "offered", "streaming", "joining", "group offered", "group joined")


def play(state: str, cls: type) -> tuple[int, int]:
    """Send a peer in this state every extreme of this message's numbers; return how many decode, and of how many."""
    heard = told = 0
    played: set[str] = set()  # Many numbers are read as the same one, as 0, False and 0.0.
    first = Extreme(state)
    for header in cases(cls, first.session, first.peer.id):
        told += 1
        try:
            message = repr(decode(header))
        except RemoteError:
            continue
        heard += 1
        if message not in played:
            played.add(message)
            Extreme(state).told(header)
    return heard, told
