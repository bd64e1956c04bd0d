"""All messages on the wire, one frozen dataclass each.

A field's metadata names its type and bounds. :mod:`gossip.wire.frames` encodes and decodes by this metadata, so nothing
else is accepted.
"""

from collections.abc import Callable
from dataclasses import MISSING, dataclass, field
from typing import Any, TypeVar, dataclass_transform

from gossip.ids import UNSTATED, Claim, MemberRecord, PeerId

VERSION_MIN, VERSION_MAX = 1, 1  # Protocol versions that we speak. Two peers work together if their ranges overlap.
MAX_UPDATES = 32  # Updates in one frame: about 270 B each, at most 924 B, so at most 29 of the header's 64 KiB.
MAX_RECORDS = 120  # Entries in one Records message, 540 B each without additions of newer versions.
# Senders keep to this too: long host names or a newer version's values must not overflow the header of another peer.
MAX_RECORDS_BYTES = 63 << 10
MIN_CHUNK_ELEMENTS = 1 << 10  # All chunks but the last: one costs its receiver some 50 us however small it is.
MAX_CHUNK_ELEMENTS = 1 << 20  # 4 MiB of float32, which a receiver may have to hold.
MAX_GROUP = 16  # Members of a group average: each streams to each.
MAX_CONNECTIONS = 64  # Connections that share a vector.
MAX_ADDRESS = 64  # Characters of a numeric address with its port.
MAX_BUCKETS = 256  # Parts of a member table, by the first byte of the members' ids.

AnyMessage = TypeVar("AnyMessage")
REQUIRED = object()  # The default of a field that must be present.
MESSAGES: dict[str, type] = {}
"""Message class by wire tag."""
TAGS: dict[type, str] = {}
"""Wire tag by message class."""


@dataclass(frozen=True, slots=True)
class Kind:
    """The wire type of a field: ``form`` and its bound (bytes, characters, items, or the largest integer)."""

    form: str  # int, float, bool, text, bytes, id, ids, record?, updates, names, scalars, claim, any
    bound: int = 0
    default: Any = REQUIRED  # The value if the field is absent; without it the field is required.


def integer(bound: int = 2**63 - 1) -> Any:
    """Declare a required field of an integer from 0 to ``bound``."""
    return field(metadata={"kind": Kind("int", bound)})


def wire_field(form: str, bound: int = 0, default: Any = MISSING) -> Any:
    """Declare a required field. ``default`` serves only the constructor: on the wire the field is present."""
    return field(metadata={"kind": Kind(form, bound)}, default=default)


def added_field(form: str, bound: int = 0, *, default: Any) -> Any:
    """Declare a field that was added after the first version, with its ``default`` where it is absent.

    Peers that do not know the field ignore it. So two versions with overlapping ranges work together, and use only what
    both know.
    """
    return field(metadata={"kind": Kind(form, bound, default)}, default=default)


@dataclass_transform(frozen_default=True, field_specifiers=(integer, wire_field, added_field))
def message(tag: str) -> Callable[[type[AnyMessage]], type[AnyMessage]]:
    """Make a class a message with this wire tag."""

    def register(cls: type[AnyMessage]) -> type[AnyMessage]:
        built = dataclass(frozen=True, slots=True)(cls)
        MESSAGES[tag] = built
        TAGS[built] = tag
        return built

    return register


@dataclass(frozen=True, slots=True)
class Hint:
    """An accusation that the member ``peer`` does not answer, signed by its author ``by``.

    It says that the member is DEAD (``dead``) or SUSPECT. It is believed within rate limits.
    """

    peer: PeerId
    incarnation: int
    dead: bool
    by: PeerId
    signature: bytes = b""


Update = MemberRecord | Hint


@dataclass(frozen=True, slots=True)
class Unknown:
    """An unknown message of a peer whose Hello named a newer version. It is counted and skipped, and never sent."""

    tag: str


# -- the first and last frames of a link ------------------------------------------------------
@message("hello")
class Hello:
    """The first frame of both sides.

    ``record`` is None for an observer, which is no member: it reads the status, the layout and weights. ``share``, only
    in TLS, is the sender's randomness. If both sides send one, keys derived from them replace those of TLS.

    A link may have several connections, its *lanes*. ``lanes`` is the sender's name for this link, by which more
    connections can join it. ``joins``: this connection joins the link to which the other side gave this name, or the
    tunnel of this name. ``seen`` is the address at which the sender sees the other side.
    """

    version_min: int = integer(255)
    version_max: int = integer(255)
    swarm: str = wire_field("text", 64)
    fingerprint: str = wire_field("text", 64)
    capabilities: tuple[str, ...] = wire_field("names", 16)
    record: MemberRecord | None = wire_field("record?")
    share: bytes = added_field("bytes", 32, default=b"")
    lanes: bytes = added_field("bytes", 16, default=b"")
    joins: bytes = added_field("bytes", 16, default=b"")
    seen: str = added_field("text", MAX_ADDRESS, default="")


@message("close")
class Close:
    """The last frame of a link: a code and a plain sentence.

    With the code "layout" it also holds our layout, so that both sides can name the first difference.
    """

    code: str = wire_field("text", 32)
    sentence: str = wire_field("text", 400)
    layout: tuple[Any, ...] = wire_field("any", 49_152)


@message("widen")
class Widen:
    """A request to the dialler of a link to open more connections, as lanes of this link.

    Over a lane, it is the dialled side's confirmation that the lane belongs to the link, with the number of lanes.
    """

    connections: int = integer(MAX_CONNECTIONS)


# -- membership -------------------------------------------------------------------------------
@message("ping")
class Ping:
    """A direct probe; the answer is an Ack with this seq."""

    seq: int = integer()
    updates: tuple[Update, ...] = wire_field("updates", MAX_UPDATES)


@message("ack")
class Ack:
    """The answer to a probe."""

    seq: int = integer()
    updates: tuple[Update, ...] = wire_field("updates", MAX_UPDATES)


@message("ping-req")
class PingReq:
    """A request to probe ``target``. The answer is an Ack with this seq, or a Nack when that probe times out."""

    seq: int = integer()
    target: PeerId = wire_field("id")
    updates: tuple[Update, ...] = wire_field("updates", MAX_UPDATES)


@message("nack")
class Nack:
    """The answer to a PingReq whose target does not answer."""

    seq: int = integer()


@message("gossip")
class Gossip:
    """Records and hints that are new to the sender."""

    updates: tuple[Update, ...] = wire_field("updates", MAX_UPDATES)


@message("digest")
class Digest:
    """The digest of a table: one 8-byte hash for each of 256 buckets of ids (by their first byte).

    The receiver answers with the Records of buckets that differ. ``hashes`` has 2,048 bytes, or none to ask for
    everything.
    """

    hashes: bytes = wire_field("bytes", 8 * MAX_BUCKETS)


@message("records")
class Records:
    """Entries of the buckets that differ. ``want`` holds the numbers of the buckets that the sender wants in return."""

    records: tuple[Update, ...] = wire_field("updates", MAX_RECORDS)
    want: bytes = wire_field("bytes", MAX_BUCKETS)


@message("reach")
class Reach:
    """A request to dial the address in the sender's record. It shows a node behind NAT that it is unreachable."""


@message("reached")
class Reached:
    """The answer to a Reach: whether the address accepted a connection."""

    ok: bool = wire_field("bool")


@message("meet")
class Meet:
    """A word of ``origin`` to ``target``, which cannot dial each other. A common contact passes it on.

    ``stage`` is one of :data:`gossip.discovery.meetings.STAGES`. ``stated`` is the address at which others have told
    the origin that they see it, and ``inside`` its address in its own network, both signed by it for this target.
    ``seen`` is the address at which the contact sees the origin. ``name`` is that of a tunnel.
    """

    origin: PeerId = wire_field("id")
    target: PeerId = wire_field("id")
    stage: str = wire_field("text", 8)
    stated: str = wire_field("text", MAX_ADDRESS, default="")
    inside: str = wire_field("text", MAX_ADDRESS, default="")
    signature: bytes = wire_field("bytes", 64, default=b"")
    seen: str = wire_field("text", MAX_ADDRESS, default="")
    name: bytes = wire_field("bytes", 16, default=b"")


# -- exchange ---------------------------------------------------------------------------------
@message("offer")
class Offer:
    """An offer to average two models.

    ``version`` counts the mixing rounds behind the initiator's weights. ``weight`` is the largest share of the two
    models' difference by which either side may move. ``mixing`` is "pair" if both stream and both apply, and "ahead" if
    the pair is only reserved. With "push" only the initiator streams, and the partner takes its vector with its
    ``mass`` (push-sum; 1 for a vector that counts as one). ``part`` names the elements in the format of
    :class:`gossip.arithmetic.subsets.Subset`.
    """

    session: int = integer()
    fingerprint: str = wire_field("text", 64)
    run_id: bytes = wire_field("bytes", 16)
    version: float = wire_field("float")
    weight: float = wire_field("float")
    codec: str = wire_field("text", 16)
    mixing: str = wire_field("text", 16, default="pair")
    mass: float = wire_field("float", default=0.0)
    part: str = wire_field("text", 32, default="all")
    progress: Claim = added_field("claim", default=UNSTATED)
    trained: float = added_field("float", default=1.0)  # Intervals that the sender has trained since its last mix.


@message("accept")
class Accept:
    """The acceptance of an Offer: the streams begin. Weight and codec are final for both."""

    session: int = integer()
    version: float = wire_field("float")
    weight: float = wire_field("float")
    codec: str = wire_field("text", 16)
    progress: Claim = added_field("claim", default=UNSTATED)
    trained: float = added_field("float", default=1.0)  # Intervals that the sender has trained since its last mix.


@message("busy")
class Busy:
    """A refusal for now: the sender has no room, or backs off."""

    session: int = integer()


@message("refuse")
class Refuse:
    """A refusal for a reason that stays: the code names it."""

    session: int = integer()
    code: str = wire_field("text", 32)


@message("commit")
class Commit:
    """The sender received the whole stream and checked it. It applies as soon as the other side also commits."""

    session: int = integer()


@message("abort")
class Abort:
    """The end of a session without a result: the code names the reason."""

    session: int = integer()
    code: str = wire_field("text", 32)


@message("outcome")
class Outcome:
    """A question after the link broke between the Commits of the two sides: did the other side commit?"""

    session: int = integer()


@message("settled")
class Settled:
    """The answer to an Outcome; in a group the inviter's decision."""

    session: int = integer()
    committed: bool = wire_field("bool")


@message("invite")
class Invite:
    """An invitation to average as a group with ``members``, all that are invited.

    ``version`` is as in an Offer. Each member gives and takes a whole vector, by slices.
    """

    session: int = integer()
    fingerprint: str = wire_field("text", 64)
    run_id: bytes = wire_field("bytes", 16)
    version: float = wire_field("float")
    codec: str = wire_field("text", 16)
    members: tuple[PeerId, ...] = wire_field("ids", MAX_GROUP, default=())


@message("joined")
class Joined:
    """The acceptance of an Invite, sent after the snapshot."""

    session: int = integer()
    version: float = wire_field("float")
    codec: str = wire_field("text", 16)
    progress: Claim = added_field("claim", default=UNSTATED)


@message("begin")
class Begin:
    """The start of a group average. ``members`` take part, in this order: the i-th member averages slice i.

    ``version`` and the samples of ``progress`` are means over the members.
    """

    session: int = integer()
    members: tuple[PeerId, ...] = wire_field("ids", MAX_GROUP)
    version: float = wire_field("float")
    codec: str = wire_field("text", 16)
    progress: Claim = added_field("claim", default=UNSTATED)


@message("chunk")
class Chunk:
    """Elements [start, start + elements) of a stream, in order. The body, which only a Chunk has, is their encoding.

    The sender chooses the size, within MAX_CHUNK_ELEMENTS: the two sides may be configured differently.
    """

    session: int = integer()
    start: int = integer(2**48)
    elements: int = integer(MAX_CHUNK_ELEMENTS)
    checksum: int = integer(2**64 - 1)  # xxh3-64 of the body


# -- joining ----------------------------------------------------------------------------------
@message("fetch")
class Fetch:
    """A request for elements [start, stop) of a donor's state; start == stop only surveys it.

    With ``moments``, the roles of the ``optimizer_keys`` (:class:`gossip.arithmetic.moments.MomentForm`), a member asks
    for these elements of each of its partner's moments, to mix them.
    """

    session: int = integer()
    optimizer_keys: tuple[str, ...] = wire_field("names", 4)
    start: int = integer()
    stop: int = integer()
    moments: str = added_field("text", 4, default="")


@message("serving")
class Serving:
    """A description of a donor's state. Chunks follow if a range was requested."""

    session: int = integer()
    version: float = wire_field("float")
    run_id: bytes = wire_field("bytes", 16)
    optimizer_keys: tuple[str, ...] = wire_field("names", 4)
    optimizer_scalars: tuple[tuple[str, float], ...] = wire_field("scalars", 16)
    swarm_samples: int = added_field("int", 2**53 - 1, default=0)  # Samples behind the run, as far as the donor knows.
    finished: bool = added_field("bool", default=False)  # The run has ended.
    frozen_hash: bytes = added_field("bytes", 32, default=b"")  # Of the frozen weights; empty while unknown.


# -- status -----------------------------------------------------------------------------------
@message("status?")
class StatusQuery:
    """A request for one page of the status."""

    after: bytes = wire_field("bytes", 16)  # Only members with larger ids; empty for the first page.


@message("status")
class StatusReply:
    """One page: the node's metrics, and members as (id, address, state, steps, samples, loss, ready, rtt_s, mb_s)."""

    metrics: tuple[Any, ...] = wire_field("any", 4_096)
    members: tuple[Any, ...] = wire_field("any", 49_152)
    more: bool = wire_field("bool")


@message("layout?")
class LayoutQuery:
    """A reader's request for the tensors of the model, from number ``first`` on."""

    first: int = integer(2**32 - 1)


@message("layout")
class LayoutReply:
    """One page: a layout's summary as in a Close, but its tensors begin with the one that was asked for."""

    layout: tuple[Any, ...] = wire_field("any", 49_152)


Message = (
    Hello | Close | Ping | Ack | PingReq | Nack | Gossip | Digest | Records | Reach | Reached | Meet | Offer | Accept
    | Busy | Refuse | Commit | Abort | Outcome | Settled | Invite | Joined | Begin | Chunk | Fetch | Serving
    | StatusQuery | StatusReply | LayoutQuery | LayoutReply | Widen | Unknown
)  # fmt: skip
