"""Targets: files on a disk. Address books, keys, secrets, checkpoints and timelines, each damaged or foreign."""

import base64
import json
import math
import shutil
import struct
import tempfile
from pathlib import Path
from random import Random
from typing import Any

import msgpack
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from torch import nn

from gossip.errors import CheckpointError, ConfigError, IdentityError
from gossip.timeline import merge
from gossip.wire.records import MAX_COUNT, signed
from node.identity.keys import Identity, parse_invite, parse_secret, read_secret
from node.identity.statedir import Memory, StateDir, checksum
from node.model.checkpoint import Archive
from node.model.optimizers import Optimizers
from node.model.snapshot import ModelState
from tests.fuzz.engine import Input, Target
from tests.fuzz.grammar import World, make_record
from tests.fuzz.mutations import EDGE_TEXTS, mutated_bytes, mutated_text, mutated_value


class OnDisk(Target):
    """A target that has a folder for each life."""

    def __init__(self, rng: Random) -> None:
        super().__init__(rng)
        self.folder = Path(tempfile.mkdtemp(prefix="gossip-fuzz-", dir=MEMORY if MEMORY.is_dir() else None))
        for name in ("identity.pem", "secret"):  # The node refuses such files if other users may read them.
            (self.folder / name).touch(0o600)

    def close(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


MEMORY = Path("/dev/shm")


class Books(OnDisk):
    """A state directory's address book: a node starts whatever the file holds."""

    name, share, declared = "books", 0.04, ()

    def __init__(self, rng: Random) -> None:
        super().__init__(rng)
        world = World()
        self.records = [signed(make_record(rng, world), lambda _: b"s" * 64) for _ in range(rng.choice((0, 1, 5, 40)))]
        StateDir(self.folder).write(3, 1_000, self.records)
        self.sample = (self.folder / "members.bin").read_bytes()

    def prepare(self, rng: Random) -> Input:
        body = self.sample[: packed_bytes(self.sample)]
        value = msgpack.unpackb(body, raw=False)
        body = mutated_bytes(rng, body) if rng.random() < 0.5 else repacked(mutated_value(rng, value))
        data = body + checksum(body)  # The checksum is right, as if a node had written this body.
        if rng.random() < 0.1:
            data = mutated_bytes(rng, self.sample)

        def act() -> None:
            (self.folder / "members.bin").write_bytes(data)
            (self.folder / "finished").write_bytes(data)
            assert len(StateDir(self.folder).finished_run()) in (0, 16)
            memory = StateDir(self.folder).read()
            assert isinstance(memory, Memory)
            assert type(memory.incarnation) is type(memory.samples) is int
            assert 0 <= memory.incarnation < MAX_COUNT
            assert 0 <= memory.samples < MAX_COUNT

        return data, act


def packed_bytes(data: bytes) -> int:
    """Return the length in bytes of a file's msgpack value; a checksum may follow it."""
    reader = msgpack.Unpacker(raw=False)
    reader.feed(data)
    reader.skip()
    return int(reader.tell())


def repacked(value: Any) -> bytes:
    try:
        data: bytes = msgpack.packb(value, use_bin_type=True)
    except (OverflowError, ValueError, TypeError, RecursionError):
        return b""
    return data


class Keys(OnDisk):
    """A node's private key."""

    name, share, declared = "keys", 0.01, (IdentityError,)

    def __init__(self, rng: Random) -> None:
        super().__init__(rng)
        self.samples = [Identity(Ed25519PrivateKey.from_private_bytes(octet * 32)).pem() for octet in (b"a", b"b")]

    def prepare(self, rng: Random) -> Input:
        data = mutated_bytes(rng, rng.choice(self.samples), self.samples)

        def act() -> None:
            (self.folder / "identity.pem").write_bytes(data)
            assert len(Identity.load(self.folder).id) == 16

        return data, act


class Secrets(OnDisk):
    """A swarm's secret, as a text and as a file."""

    name, share, declared = "secrets", 0.02, (IdentityError,)

    def prepare(self, rng: Random) -> Input:
        text = mutated_text(rng, "gossip-secret-1:" + "A" * 43, ("gossip-", "-", "_", "=="))
        if rng.random() < 0.7:
            return text, lambda: len(parse_secret(text))
        data = mutated_bytes(rng, text.encode("utf-8", "replace"))

        def act() -> None:
            (self.folder / "secret").write_bytes(data)
            assert len(read_secret(self.folder / "secret")) == 32

        return data, act


class Invites(Target):
    """An invite's text, and the msgpack in it."""

    name, share, declared = "invites", 0.05, (IdentityError,)

    def prepare(self, rng: Random) -> Input:
        address = ["10.0.0.1", 7_700]
        value: Any = [b"s" * 32, [address, ["node.example", 1]][: rng.randrange(1, 3)], b"i" * 16]
        if rng.random() < 0.6:
            packed = repacked(mutated_value(rng, value, [address]))
        else:
            packed = mutated_bytes(rng, repacked(value), most=4_000)
        text = "gossip-invite-1:" + text_of(packed)
        if rng.random() < 0.4:
            text = mutated_text(rng, text, ("gossip-invite-1:", "=", "-", "_", " ", *EDGE_TEXTS))

        def act() -> None:
            invite = parse_invite(text)
            assert parse_invite(invite.text) == invite

        return text, act


def text_of(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode("ascii")


class Checkpoints(OnDisk):
    """The bytes of a checkpoint's weights or of its optimizer's state, and the JSON in their headers.

    A refused checkpoint changes nothing. After a checkpoint is loaded, the optimizer can step.
    """

    name, share, life, declared = "checkpoints", 0.04, 256, (CheckpointError,)

    def __init__(self, rng: Random) -> None:
        super().__init__(rng)
        self.weights = self.folder / "a.safetensors"
        self.make()
        self.archive.save(self.weights, {"run_id": "67" * 16, "version": 3.0, "swarm_samples": 64})
        self.path = rng.choice((self.weights, self.folder / "a.optimizer"))
        self.sample = self.path.read_bytes()
        size = struct.unpack("<Q", self.sample[:8])[0]
        self.header = json.loads(self.sample[8 : 8 + size])
        self.header["__metadata__"]["gossip"] = json.loads(self.header["__metadata__"]["gossip"])
        self.rest = self.sample[8 + size :]

    def make(self) -> None:
        """Make a model that has taken a step."""
        self.model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), amsgrad=True)
        self.step()
        optimizers = Optimizers(self.optimizer)
        self.archive = Archive(ModelState(self.model, optimizers), optimizers)

    def step(self) -> None:
        self.model(torch.ones(4, 3) * torch.arange(4.0)[:, None]).square().sum().backward()
        self.optimizer.step()

    def content(self) -> list[Any]:
        """Return all that a checkpoint may change."""
        tensors = [*self.model.state_dict().values()]
        tensors += [value for state in self.optimizer.state.values() for value in state.values()]
        settings = [{**group, "params": 0} for group in self.optimizer.param_groups]
        return [*(tensor.tolist() for tensor in tensors), settings]

    def prepare(self, rng: Random) -> Input:
        flat = rng.random() < 0.4
        data = mutated_bytes(rng, self.sample) if flat else self.framed(mutated_value(rng, self.header))

        def act() -> None:
            self.path.write_bytes(data)
            before = self.content()
            try:
                self.archive.restore(self.archive.load(self.weights), self.weights)
            except CheckpointError:
                assert repr(self.content()) == repr(before), "something has changed"
                raise
            self.step()
            self.make()

        return data, act

    def framed(self, header: Any) -> bytes:
        """Return a file with this header; values that JSON cannot hold are replaced by their ``repr``."""
        try:
            if isinstance(header, dict) and isinstance(inner := header.get("__metadata__"), dict) and "gossip" in inner:
                header = header | {"__metadata__": inner | {"gossip": json.dumps(inner["gossip"], default=repr)}}
            text = json.dumps(header, default=repr).encode("utf-8", "surrogatepass")
        except (RecursionError, ValueError, TypeError):
            text = b"[" * 2_000
        return struct.pack("<Q", len(text)) + text + self.rest


class Timelines(OnDisk):
    """A damaged timeline and a valid one: merging both gives a readable timeline, or refuses the damaged one."""

    name, share, declared = "timelines", 0.02, (ConfigError,)

    def __init__(self, rng: Random) -> None:
        super().__init__(rng)
        self.paths = [self.folder / "one.json", self.folder / "two.json"]
        streams = {"name": "streams", "ph": "X", "pid": 1, "tid": 2, "ts": 5.0, "dur": 2.5, "args": {"exchange": "ab"}}
        self.events = [{"name": "process_name", "ph": "M", "pid": 1, "args": {"name": "node"}}, streams]
        self.paths[0].write_text(self.text(self.events))

    def text(self, events: Any) -> str:
        rows = events if isinstance(events, list) else [events]
        return "[\n" + ",\n".join(json.dumps(event, default=repr) for event in rows) + "\n]\n"

    def prepare(self, rng: Random) -> Input:
        try:
            data = self.text(mutated_value(rng, self.events)).encode("utf-8", "surrogatepass")
        except (RecursionError, ValueError, TypeError):
            data = b"[\n" + b"[" * 100_000 + b"\n]\n"
        if rng.random() < 0.4:
            data = mutated_bytes(rng, data)

        def act() -> None:
            self.paths[1].write_bytes(data)
            merged = merge(self.paths, self.folder / "merged.json")
            events = json.loads((self.folder / "merged.json").read_text())
            assert len(events) == merged.events
            assert all(math.isfinite(event.get("ts", 0.0)) for event in events)

        return data, act
