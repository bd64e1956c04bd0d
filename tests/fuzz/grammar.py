"""Generators of messages and records: each field has its declared type, and a plausible or an extreme value."""

from dataclasses import dataclass, field, fields
from random import Random
from typing import Any

from gossip.ids import MOST_SAMPLES, Address, Claim, MemberRecord, PeerId, peer_id_of
from gossip.wire.messages import MESSAGES, Hint
from tests.fuzz.mutations import EDGE_FLOATS, EDGE_INTS

FINITE = tuple(number for number in EDGE_FLOATS if abs(number) < float("inf"))
WHOLE = tuple(number for number in EDGE_INTS if number >= 0)
CODECS = ("fp32", "bf16", "fp16", "int8", "int4", "moniqua8", "moniqua4", "auto", "", "zip")
PARTS = (
    "all", "mask 0.005", "mask 1", "mask 1e-06", "top 0.01", "top 1", "fragment 0/8", "fragment 7/8",
    "fragment 255/256", "fragment 8/8", "mask 0", "fragments 8", "top nan", "",
)  # fmt: skip
CODES = ("busy", "late", "terms", "layout", "run_id", "checksum", "norm", "overflow", "broken", "", "x" * 32)


def key_of(number: int) -> bytes:
    """Return a public key without a private one; use it only where records are not verified."""
    return bytes([number % 256]) * 32


@dataclass
class World:
    """The identifiers and sizes that a receiver knows, from which some of the values are drawn."""

    ids: list[PeerId] = field(default_factory=lambda: [peer_id_of(key_of(n)) for n in range(8)])
    sessions: list[int] = field(default_factory=lambda: [1])
    run_id: bytes = b"g" * 16
    fingerprint: str = "f"
    elements: int = 1_000
    keys: tuple[str, ...] = ("exp_avg", "exp_avg_sq")


def member(number: int, **changes: Any) -> MemberRecord:
    """Return a plausible record of a member of the world's run."""
    key = key_of(number)
    return MemberRecord(
        peer_id_of(key), key, 1, address=Address("10.0.0.2", 1 + number), ready=True, run_id=World.run_id, steps=8,
        samples=64, progress=100, **changes,
    )  # fmt: skip


def make_message(rng: Random, world: World, tag: str | None = None) -> Any:
    """Return a message of a random type, with every field within the bounds of the wire format."""
    cls = MESSAGES[tag if tag is not None else rng.choice(list(MESSAGES))]
    values = {}
    for one in fields(cls):
        kind = one.metadata["kind"]
        values[one.name] = make(rng, world, kind.form, kind.bound, one.name)
    return cls(**values)


def make(rng: Random, world: World, form: str, bound: int, name: str) -> Any:
    match form:
        case "int":
            return number(rng, world, bound, name)
        case "float":
            return rng.choice((0.5, 0.25, 1.0, 0.0, 8.0, rng.random(), rng.choice(FINITE)))
        case "bool":
            return rng.random() < 0.5
        case "text":
            return text(rng, world, name)[:bound]
        case "bytes":
            return octets(rng, world, name)[:bound]
        case "id":
            return identity(rng, world)
        case "ids":
            return tuple(identity(rng, world) for _ in range(rng.choice((0, 1, 2, 3, 4, bound))))
        case "record?":
            return None if rng.random() < 0.2 else make_record(rng, world)
        case "updates":
            return tuple(
                make_update(rng, world) for _ in range(rng.choice((0, 0, 1, 2, 5, bound if rng.random() < 0.1 else 3)))
            )
        case "names":
            kept = rng.choice(((), world.keys, world.keys[:1], ("momentum_buffer",), ("x" * 64, "")))
            return kept[:bound]
        case "scalars":
            return tuple((rng.choice((*world.keys, "step")), rng.choice(FINITE)) for _ in range(rng.randrange(3)))
        case "claim":
            return Claim(*[number(rng, world, MOST_SAMPLES, "") for _ in range(4)])
        case "any":
            return rng.choice(
                (
                    (),
                    (1, "a", None, (b"x", 0.5)),
                    (world.fingerprint, world.elements, 1, (("w", (2, 3), "float32", False),)),
                )
            )
    raise AssertionError(f"no values are known for the form {form!r} of {name}: add some")


def number(rng: Random, world: World, bound: int, name: str) -> int:
    if name == "session" and rng.random() < 0.8:
        return min(bound, rng.choice(world.sessions))
    if name in ("start", "stop", "elements") and rng.random() < 0.7:
        return min(bound, rng.choice((0, 1, 256, world.elements - 1, world.elements, world.elements + 1)))
    return min(bound, rng.choice((0, 1, rng.randrange(1_000), rng.choice(WHOLE))))


def text(rng: Random, world: World, name: str) -> str:
    if rng.random() < 0.05:
        return rng.choice(("", "x" * 500, "\u00e9", "none"))
    match name:
        case "fingerprint":
            return world.fingerprint
        case "codec":
            return rng.choice(CODECS[: rng.choice((3, 8, len(CODECS)))])
        case "part":
            return rng.choice(PARTS[: rng.choice((1, 9, len(PARTS)))])
        case "mixing":
            return rng.choice(("pair", "pair", "push", "group", ""))
        case "swarm":
            return "default"
    return rng.choice(CODES)


def octets(rng: Random, world: World, name: str) -> bytes:
    match name:
        case "run_id":
            return rng.choice((world.run_id, world.run_id, world.run_id, b"", b"h" * 16, b"\xff" * 16, b"g"))
        case "hashes":
            return rng.choice((b"", rng.randbytes(2_048), bytes(2_048), rng.randbytes(2_047), rng.randbytes(8)))
        case "want":
            return rng.choice((b"", bytes(range(256)), rng.randbytes(3), bytes(256)))
    return rng.randbytes(rng.choice((0, 1, 16)))


def identity(rng: Random, world: World) -> PeerId:
    return rng.choice(world.ids) if rng.random() < 0.9 else PeerId(rng.randbytes(16))


def make_update(rng: Random, world: World) -> Hint | MemberRecord:
    if rng.random() < 0.4:
        return Hint(
            identity(rng, world),
            rng.choice((0, 1, 2, rng.choice(WHOLE[:-1]))) % 2**63,
            rng.random() < 0.5,
            identity(rng, world),
        )
    return make_record(rng, world)


def make_record(rng: Random, world: World) -> MemberRecord:
    """Return a record that the wire format allows, of a known or an unknown peer, with likely or extreme numbers."""

    def count() -> int:
        return rng.choice((0, 1, rng.randrange(10_000), rng.choice(WHOLE[:-1]))) % 2**63

    key = key_of(rng.choice((*range(8), rng.randrange(256))))
    where = rng.choice((None, Address("10.0.0.1", 7_700), Address("h" * 60, 65_535), Address("::1", 1), Address("", 0)))
    return MemberRecord(
        id=peer_id_of(key) if rng.random() < 0.95 else PeerId(rng.randbytes(16)),
        public_key=rng.choice((key, key, key, b"")), incarnation=rng.choice((1, 1, 2, count())), sequence=count(),
        left=rng.random() < 0.1, address=where,
        homes=tuple(identity(rng, world) for _ in range(rng.choice((0, 0, 1, 3)))),
        ready=rng.random() < 0.8, run_id=rng.choice((world.run_id, world.run_id, b"", b"h" * 16, b"\xff" * 16)),
        steps=count(), samples=count(), progress=rng.choice((0, 0, count())),
        loss=rng.choice((None, 0.5, rng.choice(FINITE))), version=rng.choice((0.0, 1.0, abs(rng.choice(FINITE)))),
        signature=rng.choice((b"", b"s" * 64)),
    )  # fmt: skip
