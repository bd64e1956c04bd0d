"""Every message that crosses the wire, one frozen dataclass each.

A field's metadata names its kind and bounds; :mod:`gossip.wire.frames` turns messages into bytes and back by it, so
that what is declared here is all that is accepted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, dataclass, field
from typing import Any, TypeVar, dataclass_transform

from gossip.ids import UNSTATED, Claim, MemberRecord, PeerId

__all__ = [
    "MAX_GROUP",
    "MESSAGES",
    "TAGS",
    "VERSION_MAX",
    "VERSION_MIN",
    "Abort",
    "Accept",
    "Ack",
    "Begin",
    "Busy",
    "Came",
    "Chunk",
    "Close",
    "Commit",
    "Digest",
    "Fetch",
    "Gossip",
    "Hello",
    "Hint",
    "Invite",
    "Joined",
    "Lent",
    "Meet",
    "Message",
    "Nack",
    "Offer",
    "Outcome",
    "Ping",
    "PingReq",
    "Reach",
    "Reached",
    "Read",
    "Records",
    "Refuse",
    "Serving",
    "Settled",
    "StatusQuery",
    "StatusReply",
    "Unknown",
    "Update",
    "Widen",
]  # fmt: skip

VERSION_MIN, VERSION_MAX = 1, 1  # of the protocol, spoken here; two peers work together where their ranges meet
MAX_UPDATES = 32  # of about 270 B each in one frame, 796 at the very most: 25 KiB of a header's 64
MAX_RECORDS = 120  # of 540 B without what newer versions add; whoever sends them keeps to MAX_RECORDS_BYTES too
MAX_RECORDS_BYTES = 63 << 10  # so that nobody's long host name, or newer version, bursts another's header
MIN_CHUNK_ELEMENTS = 1 << 10  # but for the last: a chunk costs its reader some 50 us however small it is
MAX_CHUNK_ELEMENTS = 1 << 20  # 4 MiB of float32, which is what a receiver may have to hold
MAX_GROUP = 16  # members that average together: everybody streams to everybody
MAX_CONNECTIONS = 64  # that share a vector
MAX_BUCKETS = 256  # by the first byte of an id

T = TypeVar("T")
REQUIRED = object()
MESSAGES: dict[str, type] = {}
"""Wire tag -> message class."""
TAGS: dict[type, str] = {}
"""Message class -> wire tag."""


@dataclass(frozen=True, slots=True)
class Kind:
    """How a field looks on the wire: ``form`` and its bound (bytes, characters, items, or the largest integer)."""

    form: str  # int, float, bool, text, bytes, id, ids, record?, updates, records, names, scalars, claim, any
    bound: int = 0
    default: Any = REQUIRED  # read where the field is absent; without one it must be there


def integer(bound: int = 2**63 - 1) -> Any:
    return field(metadata={"kind": Kind("int", bound)})


def of(form: str, bound: int = 0, default: Any = MISSING) -> Any:
    """``default`` is for who constructs the message: on the wire the field is there."""
    return field(metadata={"kind": Kind(form, bound)}, default=default)


def later(form: str, bound: int = 0, *, default: Any) -> Any:
    """A field that came after the first version: who does not know it ignores it, and where it is absent it is
    ``default``. So two versions whose ranges meet work together, and only what both know is in use between them."""
    return field(metadata={"kind": Kind(form, bound, default)}, default=default)


@dataclass_transform(frozen_default=True, field_specifiers=(integer, of, later))
def message(tag: str) -> Callable[[type[T]], type[T]]:
    def register(cls: type[T]) -> type[T]:
        built = dataclass(frozen=True, slots=True)(cls)
        MESSAGES[tag] = built
        TAGS[built] = tag
        return built

    return register


@dataclass(frozen=True, slots=True)
class Hint:
    """An accusation: SUSPECT, or DEAD. Signed by its author and believed within limits; only its subject is certain."""

    peer: PeerId
    incarnation: int
    dead: bool
    by: PeerId
    signature: bytes = b""


Update = MemberRecord | Hint


@dataclass(frozen=True, slots=True)
class Unknown:
    """A message of a newer version than ours, from a peer whose Hello said so: read past and counted. Never sent."""

    tag: str


# -- a link's first and last words ------------------------------------------------------------
@message("hello")
class Hello:
    """Both sides' first frame. ``record`` is None for an observer, which may only ask for the status. ``share``, in TLS
    alone, is of the sender's randomness, for keys that replace TLS's where both give one. ``lanes``: the name that the
    sender gives this link, for more connections that are to belong to it; ``joins``: this connection is one of those,
    and this the name that the other side gave its link."""

    version_min: int = integer(255)
    version_max: int = integer(255)
    swarm: str = of("text", 64)
    fingerprint: str = of("text", 64)
    capabilities: tuple[str, ...] = of("names", 16)
    record: MemberRecord | None = of("record?")
    share: bytes = later("bytes", 32, default=b"")
    lanes: bytes = later("bytes", 16, default=b"")
    joins: bytes = later("bytes", 16, default=b"")


@message("close")
class Close:
    """The last frame of a link: a code and a plain sentence; with code "layout" our layout, so that both can name the
    first difference."""

    code: str = of("text", 32)
    sentence: str = of("text", 400)
    layout: tuple[Any, ...] = of("any", 49_152)


@message("widen")
class Widen:
    """Over a link, to who dialled it: open so many more, as lanes of this one. Over a lane, from who was dialled: it is
    let in, and there are so many now."""

    connections: int = integer(MAX_CONNECTIONS)


# -- membership -------------------------------------------------------------------------------
@message("ping")
class Ping:
    seq: int = integer()
    updates: tuple[Update, ...] = of("updates", MAX_UPDATES)


@message("ack")
class Ack:
    seq: int = integer()
    updates: tuple[Update, ...] = of("updates", MAX_UPDATES)


@message("ping-req")
class PingReq:
    """Probe ``target`` for me; answer Ack with my seq, or Nack when your own probe times out."""

    seq: int = integer()
    target: PeerId = of("id")
    updates: tuple[Update, ...] = of("updates", MAX_UPDATES)


@message("nack")
class Nack:
    seq: int = integer()


@message("gossip")
class Gossip:
    updates: tuple[Update, ...] = of("updates", MAX_UPDATES)


@message("digest")
class Digest:
    """One 8-byte hash for each of 256 buckets of ids (the first byte): what differs is sent as Records.

    ``hashes`` is 2,048 bytes, or empty to ask for everything.
    """

    hashes: bytes = of("bytes", 8 * MAX_BUCKETS)


@message("records")
class Records:
    """Entries of the buckets that differ. ``want``: the numbers of buckets whose entries are asked for in return."""

    records: tuple[Update, ...] = of("records", MAX_RECORDS)
    want: bytes = of("bytes", MAX_BUCKETS)


@message("reach")
class Reach:
    """Can you open a connection to the address in my record? (A node behind NAT learns so that nobody can.)"""


@message("reached")
class Reached:
    ok: bool = of("bool")


# -- exchange ---------------------------------------------------------------------------------
@message("offer")
class Offer:
    """Average with me. ``version`` is the mixing rounds behind my weights, ``weight`` the largest I allow.

    ``mixing`` "pair": both stream, and both apply. "push": I alone stream, and you take my vector with its ``mass``
    (of push-sum; 1 for a vector that counts as one). ``part``: which elements, as
    :class:`gossip.arithmetic.subsets.Subset` writes it.
    """

    session: int = integer()
    fingerprint: str = of("text", 64)
    genesis: bytes = of("bytes", 16)
    version: float = of("float")
    weight: float = of("float")
    codec: str = of("text", 16)
    mixing: str = of("text", 16, default="pair")
    mass: float = of("float", default=0.0)
    part: str = of("text", 32, default="all")
    progress: Claim = later("claim", default=UNSTATED)
    trained: float = later("float", default=1.0)  # intervals that the sender has trained since its last mix


@message("accept")
class Accept:
    """Agreed: the streams begin. Weight and codec are what both will use."""

    session: int = integer()
    version: float = of("float")
    weight: float = of("float")
    codec: str = of("text", 16)
    progress: Claim = later("claim", default=UNSTATED)
    trained: float = later("float", default=1.0)  # intervals that the sender has trained since its last mix


@message("busy")
class Busy:
    session: int = integer()


@message("refuse")
class Refuse:
    session: int = integer()
    code: str = of("text", 32)


@message("commit")
class Commit:
    """All of yours arrived and passed every check; I apply as soon as you say the same."""

    session: int = integer()


@message("abort")
class Abort:
    session: int = integer()
    code: str = of("text", 32)


@message("outcome")
class Outcome:
    """Our link broke between my Commit and yours: did you commit?"""

    session: int = integer()


@message("settled")
class Settled:
    session: int = integer()
    committed: bool = of("bool")


@message("invite")
class Invite:
    """Let us average as a group with ``members``, all whom I invite; ``version`` as in an Offer. Everybody gives and
    takes a whole vector, by slices."""

    session: int = integer()
    fingerprint: str = of("text", 64)
    genesis: bytes = of("bytes", 16)
    version: float = of("float")
    codec: str = of("text", 16)
    members: tuple[PeerId, ...] = of("ids", MAX_GROUP, default=())


@message("joined")
class Joined:
    """I take part; my snapshot is taken."""

    session: int = integer()
    version: float = of("float")
    codec: str = of("text", 16)
    progress: Claim = later("claim", default=UNSTATED)


@message("begin")
class Begin:
    """These take part, in this order: slice i is the i-th member's to average. ``version`` is the mean of theirs, and
    so are the samples of ``progress``."""

    session: int = integer()
    members: tuple[PeerId, ...] = of("ids", MAX_GROUP)
    version: float = of("float")
    codec: str = of("text", 16)
    progress: Claim = later("claim", default=UNSTATED)


@message("chunk")
class Chunk:
    """Elements [start, start + elements) of a stream, in order; the body is their encoding, and nothing else carries a
    body. The sender chooses how many, within MAX_CHUNK_ELEMENTS: the two need not be configured alike."""

    session: int = integer()
    start: int = integer(2**48)
    elements: int = integer(MAX_CHUNK_ELEMENTS)
    checksum: int = integer(2**64 - 1)  # xxh3-64 of the body


# -- one host -------------------------------------------------------------------------------------------------
@message("meet")
class Meet:
    """We are on one host, as our Hellos say: connect to the abstract socket of this name and say the token there, so
    that we can pass each other memory."""

    name: bytes = of("bytes", 16)
    token: bytes = of("bytes", 16)


@message("came")
class Came:
    """I have, or could not."""

    ok: bool = of("bool")


@message("lent")
class Lent:
    """A whole stream, in the place of its chunks: so many elements as float32, where this many bytes begin of the
    memory that I have passed for the session. I leave it as it is until you have read it."""

    session: int = integer()
    offset: int = integer(2**53)  # bytes
    elements: int = integer(2**48)


@message("read")
class Read:
    """What you lent is read, or not wanted any more."""

    session: int = integer()


# -- joining ----------------------------------------------------------------------------------
@message("fetch")
class Fetch:
    """Send me elements [start, stop) of your state; start == stop asks only what there is."""

    session: int = integer()
    optimizer_keys: tuple[str, ...] = of("names", 4)
    start: int = integer()
    stop: int = integer()


@message("serving")
class Serving:
    """What a donor's state is; chunks follow when a range was asked for."""

    session: int = integer()
    version: float = of("float")
    genesis: bytes = of("bytes", 16)
    optimizer_keys: tuple[str, ...] = of("names", 4)
    optimizer_scalars: tuple[tuple[str, float], ...] = of("scalars", 16)
    swarm_samples: int = later("int", 2**53 - 1, default=0)  # behind the run, as far as the donor knows
    finished: bool = later("bool", default=False)  # nothing is trained any more


# -- status -----------------------------------------------------------------------------------
@message("status?")
class StatusQuery:
    after: bytes = of("bytes", 16)  # members with larger ids; empty for the first page


@message("status")
class StatusReply:
    """One page: the node's metrics, and members as (id, address, state, steps, samples, loss, ready, rtt_s, mb_s)."""

    metrics: tuple[Any, ...] = of("any", 4_096)
    members: tuple[Any, ...] = of("any", 49_152)
    more: bool = of("bool")


Message = (
    Hello | Close | Ping | Ack | PingReq | Nack | Gossip | Digest | Records | Reach | Reached | Offer | Accept | Busy
    | Refuse | Commit | Abort | Outcome | Settled | Invite | Joined | Begin | Chunk | Meet | Came | Lent | Read
    | Fetch | Serving | StatusQuery | StatusReply | Widen | Unknown
)  # fmt: skip
