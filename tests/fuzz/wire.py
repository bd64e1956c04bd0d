"""Targets: data from a link. Frames, records, layouts, statuses, and messages to a live peer in any order."""

import io
import math
from random import Random
from typing import Any

import msgpack

from gossip import effects
from gossip.arithmetic.layout import Layout, Segment
from gossip.config import Config
from gossip.discovery.seeds import Bootstrap
from gossip.errors import ProtocolError, RemoteError
from gossip.exchange.session import LocalModel
from gossip.ids import MemberRecord, peer_id_of
from gossip.membership.protocol import Membership
from gossip.peer import Peer
from gossip.wire import frames
from gossip.wire.frames import PREFIX_BYTES, decode, encode, read_prefix
from gossip.wire.records import check, payload, trusting, unsigned
from node.cli.main import print_status
from node.cli.top import picture_of
from node.identity.keys import verify
from node.links.frame_reader import FrameReader
from node.observe.figures import HEADINGS
from node.observe.status import METRICS, TEXTS, read_pages
from node.terminal import plain_console
from node.transport.blocking_io import run_to_end
from node.transport.byte_stream import BrokenLinkError
from tests.fuzz.engine import Input, Target
from tests.fuzz.grammar import World, key_of, make_message, make_record, member
from tests.fuzz.mutations import mutated_bytes, mutated_value


class Prefixes(Target):
    """The 12 bytes before a header."""

    name, share, declared = "prefixes", 0.05, (ProtocolError,)

    def prepare(self, rng: Random) -> Input:
        data = mutated_bytes(
            rng, frames.PREFIX.pack(frames.MAGIC, rng.randrange(1, 65_537), rng.choice((0, 4_096))), most=16
        )

        def act() -> None:
            header, body = read_prefix(data)
            assert 1 <= header <= frames.MAX_HEADER_BYTES
            assert 0 <= body <= frames.MAX_BODY_BYTES

        return data, act


def read(header: bytes, body: int) -> None:
    """Decode a header, and assert that an accepted message survives being encoded and decoded again."""
    message = decode(header, body)
    try:
        sent = encode(message, body)
    except ValueError as error:  # Our longer encoding of floats may exceed the limit; no node forwards such a message.
        if "over the limit" in str(error):
            return
        raise AssertionError("what was read cannot be written") from error
    assert read_prefix(sent[:PREFIX_BYTES]) == (len(sent) - PREFIX_BYTES, body)
    assert decode(sent[PREFIX_BYTES:], body) == message


class Frames(Target):
    """Headers of messages with their bytes changed."""

    name, share, declared = "frames", 0.2, (ProtocolError,)

    def __init__(self, rng: Random) -> None:
        super().__init__(rng)
        world = World()
        self.samples = [encode(make_message(rng, world))[PREFIX_BYTES:] for _ in range(8)]

    def prepare(self, rng: Random) -> Input:
        data = mutated_bytes(rng, rng.choice(self.samples), self.samples, most=65_536)
        body = rng.choice((0, 0, 0, 1, 4_096))
        return (data, body), lambda: read(data, body)


class Headers(Target):
    """Headers of messages with their values changed, packed again."""

    name, share, declared = "headers", 0.2, (ProtocolError,)

    def __init__(self, rng: Random) -> None:
        super().__init__(rng)
        world = World()
        packed = [encode(make_message(rng, world))[PREFIX_BYTES:] for _ in range(8)]
        self.samples = [msgpack.unpackb(data, raw=False) for data in packed]

    def prepare(self, rng: Random) -> Input:
        value = mutated_value(rng, rng.choice(self.samples), self.samples)
        data = pack(value)
        return data, lambda: read(data, 0)


def pack(value: Any) -> bytes:
    try:
        data: bytes = msgpack.packb(value, use_bin_type=True)
    except (OverflowError, ValueError, TypeError, RecursionError):  # Too large or too deeply nested for msgpack.
        return b"\xc0"
    return data[:65_536]


class Records(Target):
    """Member records with their values changed: read, verified and written again."""

    name, share, declared = "records", 0.1, (RemoteError, ValueError, TypeError)

    def __init__(self, rng: Random) -> None:
        super().__init__(rng)
        world = World()
        self.samples = [frames.write_record(make_record(rng, world)) for _ in range(8)]

    def prepare(self, rng: Random) -> Input:
        value = mutated_value(rng, rng.choice(self.samples), self.samples)
        really = rng.random() < 0.05  # Verifying a signature takes longer than all the rest.

        def act() -> None:
            record = frames.read_record(msgpack.unpackb(pack(value), raw=False, strict_map_key=False))
            payload(record)
            check(record, verify if really else trusting)
            assert frames.read_record(msgpack.unpackb(msgpack.packb(frames.write_record(record)), raw=False)) == record

        return value, act


class Layouts(Target):
    """The summary of another node's model, and the sentence about the first difference."""

    name, share, declared = "layouts", 0.05, (ProtocolError,)
    layout = Layout([
        Segment("a.weight", (4, 3), "float32", "parameter"), Segment("b", (7,), "bfloat16", "buffer"),
        Segment("c", (2,), "float32", "frozen"),
    ])  # fmt: skip

    def prepare(self, rng: Random) -> Input:
        value = mutated_value(rng, as_lists(self.layout.summary()))

        def act() -> None:
            said = self.layout.difference(Layout.parse(value))
            assert len(said) < 2_000
            assert said.isprintable()

        return value, act


def as_lists(value: Any) -> Any:
    return [as_lists(item) for item in value] if isinstance(value, tuple | list) else value


CONFIGS: tuple[dict[str, Any], ...] = (
    {}, {"outer_momentum": 0.5, "outer_rate": 0.7}, {"codec": "moniqua4"}, {"part": "mask 0.1"},
    {"part": "fragments 8"}, {"mixing": "group"}, {"mixing": "group", "filter": "trimmed"},
    {"mixing": "push-sum"}, {"mixing": "row-stochastic"}, {"partners": 0, "selection": "ring"}, {"selection": "ring"},
    {"filter": "balance"},
    {"codec": "auto"}, {"selection": "nearest"}, {"max_version_gap": 0.0}, {"staleness_exponent": 1.0},
)  # fmt: skip
STREAMS = effects.Transfer, effects.Gather, effects.ReceivePiece, effects.SendPiece
REPORTED = (  # The driver reports what became of these.
    *STREAMS, effects.Snapshot, effects.CopyPiece, effects.Adopt, effects.Dial, effects.TryDial, effects.Mix,
)  # fmt: skip


class Messages(Target):
    """A live peer, members that send any messages in any order, a driver that reports plausible events, and time.

    A message may raise nothing but a RemoteError. All messages that the peer sends can be encoded, other nodes accept
    its record, and a tick moves its deadline.
    """

    name, share, life, declared = "messages", 0.3, 128, (RemoteError,)

    def __init__(self, rng: Random) -> None:
        super().__init__(rng)
        self.begin(Config(**rng.choice(CONFIGS)), is_alone=rng.random() < 0.7)
        self.peer.local.optimizer_keys = rng.choice(((), self.world.keys))
        for number in range(4):
            self.link(number)

    def begin(self, config: Config, is_alone: bool) -> None:
        """Start a peer, which knows no address if it is alone."""
        self.now, self.steps, self.world = 1_000.0, 0, World(ids=[peer_id_of(key_of(n)) for n in range(6)])
        self.linked: set[Any] = set()
        self.todo: list[Any] = []
        self.sender = self.world.ids[0]
        key, address, rng = b"me" * 16, frames.Address("10.0.0.9", 9), Random(self.rng.getrandbits(32))
        me = MemberRecord(peer_id_of(key), key, 1, address=address, run_id=self.world.run_id)
        members = Membership(me, sign=unsigned, verify=trusting, config=config, rng=rng, now=self.now)
        model = LocalModel("f", self.world.elements, 100)
        bootstrap = Bootstrap(() if is_alone else (frames.Address("10.0.0.1", 7_700),))
        self.peer = Peer(members, config, model, rng=rng, bootstrap=bootstrap, now=self.now)
        self.world.ids.append(self.peer.id)
        self.perform(self.peer.start(self.now))

    def link(self, number: int) -> None:
        record = member(number)
        self.linked.add(record.id)
        self.perform(self.peer.on_linked(record.id, record, self.now))

    def prepare(self, rng: Random) -> Input:
        if rng.random() < 0.35:
            return self.event()
        self.now += rng.choice((0.0, 0.0, 0.001, 0.05))
        sender = rng.choice(sorted(self.linked)) if self.linked else self.world.ids[0]
        if sender not in self.linked:
            return "link", lambda: self.link(0)
        self.sender = sender
        exchanges, joining, donating = self.peer.exchanges, self.peer.joining, self.peer.donating
        own = sorted({*exchanges.table, *joining.surveys, *joining.pieces, *donating.table})
        self.world.sessions = [*own[-4:], *own[-4:], 1, 2, 3, rng.getrandbits(62)]
        message = make_message(rng, self.world)
        return (sender, message), lambda: self.receive(sender, message)

    def receive(self, sender: Any, message: Any) -> None:
        arrived = decode(encode(message)[PREFIX_BYTES:])
        self.perform(self.peer.receive(sender, arrived, self.now))

    def event(self) -> Input:
        """Return an event other than a message, as a driver reports it: a step, a tick, a lost link, ..."""
        rng, peer = self.rng, self.peer
        match rng.randrange(6):
            case 0:
                self.steps += rng.choice((1, 8, 100))
                loss = rng.choice((None, 0.5))
                return "step", lambda: self.perform(peer.on_stepped(self.steps, 8 * self.steps, loss, self.now))
            case 1 | 2:
                later = self.now + rng.choice((0.0, 0.5, 5.0, 40.0))
                is_at_deadline = rng.random() < 0.7 and math.isfinite(peer.deadline)
                self.now = max(self.now, peer.deadline if is_at_deadline else later)
                return ("tick", self.now), self.tick
            case 5 if rng.random() < 0.1:
                own = sorted({*peer.exchanges.table, *peer.donating.table})
                session = rng.choice([None, *own[-3:]])
                if peer.local.sound:
                    return ("spoiled", session), lambda: self.perform(peer.on_spoiled(session, self.now))
                return "mended", lambda: self.perform(peer.on_mended(self.now))
            case 3 | 4 if self.todo:
                effect = self.todo.pop(rng.randrange(len(self.todo)))
                return ("report", effect), lambda: self.report(effect)
        gone = rng.choice(sorted(self.linked)) if self.linked and rng.random() < 0.3 else None
        if gone is not None:
            self.linked.discard(gone)
            orderly = rng.random() < 0.3
            return ("unlink", gone), lambda: self.perform(peer.on_unlinked(gone, self.now, orderly))
        number = rng.randrange(6)
        return ("link", number), lambda: self.link(number)

    def tick(self) -> None:
        for _ in range(4):  # A tick of one part may make another part due at once.
            self.perform(self.peer.tick(self.now))
            if self.peer.deadline > self.now:
                return
        raise AssertionError("a deadline that ticks do not move")

    def perform(self, told: list[Any]) -> None:
        for effect in told:
            if isinstance(effect, effects.Send):
                data = encode(effect.message)
                assert decode(data[PREFIX_BYTES:]) == effect.message
            elif isinstance(effect, REPORTED):
                self.todo.append(effect)
        del self.todo[:-64]
        check(self.peer.membership.me, trusting)
        assert not math.isnan(self.peer.deadline)

    def report(self, effect: Any) -> None:
        rng, peer, now = self.rng, self.peer, self.now
        squares = rng.choice((0.0, 1.0, 1e30, math.inf, rng.random())), rng.choice((0.0, 1.0, 1e30, 1.0))
        match effect:
            case effects.Snapshot(session) | effects.CopyPiece(session):
                self.perform(peer.on_snapshotted(session, now, rng.choice((0.0, 0.5)), rng.choice((math.nan, 1.0))))
            case _ if isinstance(effect, STREAMS) and rng.random() < 0.3:
                why = rng.choice(("broken", "checksum", "overflow", "stalled"))
                self.perform(peer.on_failed(effect.session, why, now))
            case effects.Transfer():
                self.perform(peer.on_streamed(effect.session, *squares, now))
            case effects.Gather():
                self.perform(peer.on_gathered(effect.session, *squares, {}, set(), now))
            case effects.ReceivePiece():
                self.perform(peer.on_collected(effect.session, effect.stop, now))
            case effects.SendPiece():
                self.perform(peer.on_served(effect.session, now))
            case effects.Adopt() if peer.joining.phase.name == "ADOPTING":
                self.perform(peer.on_adopted(now))
            case effects.Dial(_, expect):
                self.perform(peer.on_dial_failed(expect, now))
            case effects.TryDial(asker, _):
                self.perform(peer.on_dial_tried(asker, rng.random() < 0.5, now))

    def ended(self, error: BaseException) -> None:
        """Report the sender's link as lost, as a driver does after a RemoteError."""
        self.linked.discard(self.sender)
        self.perform(self.peer.on_unlinked(self.sender, self.now))


class Statuses(Target):
    """Replies to `gossip status` with any content, over a stream that may end anywhere."""

    name, share, declared = "statuses", 0.05, (RemoteError,)

    def prepare(self, rng: Random) -> Input:
        row, other = ([id_ * 16, "10.0.0.1:7700", "alive", 8, 64, 0.5, True, 0.1, 2.0] for id_ in (b"i", b"j"))
        values = {name: "a text" for name in TEXTS} | {name: [["ab" * 16, "why", 3]] for name in HEADINGS}
        values["id"] = "0f" * 16
        metrics = [values.get(name, 3) for name in METRICS]
        reply = {"t": "status", "metrics": metrics, "members": [row, other], "more": False}
        packed = pack(mutated_value(rng, reply, [row])) if rng.random() < 0.7 else pack(reply)
        data = frames.PREFIX.pack(frames.MAGIC, len(packed), 0) + packed
        if rng.random() < 0.4:
            data = mutated_bytes(rng, data)

        def act() -> None:
            stream = Canned(data)
            answer = run_to_end(lambda source: read_pages(source, FrameReader(source)), stream)
            assert all(len(member["id"]) <= 64 for member in answer["members"])
            console = plain_console(io.StringIO())
            console.print(picture_of(answer, answer, 1.0))
            print_status(answer, console)

        return data, act


class Canned:
    """A stream that delivers these bytes and then ends."""

    peer_host = "canned"

    def __init__(self, data: bytes) -> None:
        self.data, self.at, self.asked = data, 0, 0

    async def send_all(self, data: Any) -> None:
        self.asked += 1
        if self.asked > 20:
            raise BrokenLinkError("asked again and again")
        self.at = 0 if self.asked > 1 else self.at

    async def receive_into(self, buffer: memoryview) -> int:
        piece = self.data[self.at : self.at + len(buffer)]
        buffer[: len(piece)] = piece
        self.at += len(piece)
        return len(piece)
