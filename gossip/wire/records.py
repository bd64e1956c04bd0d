"""Signed member records: the signed bytes, the order of two records, and the checks of a record."""

import dataclasses
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

import msgpack

from gossip.errors import RemoteError
from gossip.ids import Address, MemberRecord, peer_id_of

Sign = Callable[[bytes], bytes]
"""Sign a payload with our own key and return the signature."""
Verify = Callable[[bytes, bytes, bytes], bool]
"""Return True if the public key signed the payload: (public key, payload, signature).

It must refuse invalid keys, including an empty one.
"""

DOMAIN = "gossip member record 1"  # Domain separation: nothing else signed by the same key can pass as a record.
MAX_COUNT = 2**53  # Every count is below this, so that it is exact in a double: every language reads the same number.
MAX_HOMES = 3
COUNTS = frozenset({"incarnation", "sequence", "steps", "samples", "progress"})  # The fields that are counts.
RECORD_FIELDS = tuple(field.name for field in dataclasses.fields(MemberRecord))
PLAIN_TYPES = (bool, int, float, str, bytes)  # The types of extra values, besides None.
MAX_EXTRA = 16  # Number of extra values, which newer versions add: nearly as many as a record has fields now.
MAX_EXTRA_BYTES = 384  # Packed size of these values: a key and a few numbers. With them a record has at most 924 bytes.


def payload(record: MemberRecord) -> bytes:
    """Return the signed bytes of a record: msgpack of the domain and of every field but the signature, in order.

    Fields that a newer version also signs stand at the end. So a member of this version can check and relay them.
    """
    packed: bytes = msgpack.packb(
        (
            DOMAIN,
            record.id,
            record.public_key,
            record.incarnation,
            record.sequence,
            record.left,
            None if record.address is None else (record.address.host, record.address.port),
            record.homes,
            record.ready,
            record.run_id,
            record.steps,
            record.samples,
            record.progress,
            None if record.loss is None else float(record.loss),
            float(record.version),  # 0 and 0.0 must give the same bytes.
            record.finished,
            *record.extra,
        ),
        use_bin_type=True,
    )
    return packed


def signed(record: MemberRecord, sign: Sign) -> MemberRecord:
    """Return the record with a new signature."""
    return dataclasses.replace(record, signature=sign(payload(record)))


def is_newer(record: MemberRecord, other: MemberRecord) -> bool:
    """Return True if the record replaces the other one of its id.

    A higher incarnation wins, then ``left``, then a higher sequence.
    """
    if record.incarnation != other.incarnation:
        return record.incarnation > other.incarnation
    if record.left != other.left:
        return record.left
    return record.sequence > other.sequence


def is_progress_only(record: MemberRecord, other: MemberRecord) -> bool:
    """Return True if two records of one id differ only in steps, samples, progress, loss, version or figures."""
    return (
        record.incarnation == other.incarnation
        and record.ready is other.ready
        and record.run_id == other.run_id
        and record.address == other.address
        and record.homes == other.homes
        and record.left is other.left
        and record.finished is other.finished
        and extra_without_figures(record) == extra_without_figures(other)
    )


def extra_without_figures(record: MemberRecord) -> tuple[Any, ...]:
    """Return the extra values of a record without its owner's figures, which come first and are bytes."""
    extra = record.extra
    return extra[1:] if extra and type(extra[0]) is bytes else extra


def is_keepable(values: Sequence[Any]) -> bool:
    """Return True if a record may hold these extra values: few and plain, so that repacking gives the same bytes."""
    if len(values) > MAX_EXTRA or not all(value is None or type(value) in PLAIN_TYPES for value in values):
        return False
    if any(type(value) is float and not math.isfinite(value) for value in values):
        return False
    try:
        return len(msgpack.packb(values, use_bin_type=True)) <= MAX_EXTRA_BYTES
    except (OverflowError, ValueError):  # An integer beyond 64 bits, or a lone surrogate.
        return False


def claims_more(record: MemberRecord, other: MemberRecord) -> bool:
    """Return True if the owner that signed ``other`` does not know ``record``: it is newer or counts more steps.

    Samples do not count, since each life counts them anew.
    """
    return is_newer(record, other) or record.steps > other.steps


def check(record: MemberRecord, verify: Verify) -> None:
    """Check that the owner could have signed this record.

    The id must be the hash of the public key. An empty key has no such hash, so that only ``verify`` decides on it. A
    ``verify`` for real keys refuses an empty key; one for a simulation or a test may accept it.

    Raises:
        RemoteError: The record is not acceptable (code "record").
    """
    if not (
        0 <= record.incarnation < MAX_COUNT
        and 0 <= record.sequence < MAX_COUNT
        and 0 <= record.steps < MAX_COUNT
        and 0 <= record.samples < MAX_COUNT
        and 0 <= record.progress < MAX_COUNT
    ):
        raise RemoteError("record", "A member record holds a number outside 0 to 2**53.")
    if not 0 <= record.version < MAX_COUNT or (record.loss is not None and not math.isfinite(record.loss)):
        raise RemoteError("record", "A member record holds a loss or a version that cannot be.")
    if len(record.homes) > MAX_HOMES:
        raise RemoteError("record", f"A member record names more than {MAX_HOMES} homes.")
    if len(record.id) != 16 or len(record.run_id) not in (0, 16):
        raise RemoteError("record", "A member record holds an id or a run id that is not 16 bytes.")
    if record.address is not None and not (record.address.host and 0 < record.address.port < 65536):
        raise RemoteError("record", "A member record holds an address that no peer can dial.")
    if record.extra and not is_keepable(record.extra):
        raise RemoteError("record", "A member record holds extra values that this version could not relay.")
    if record.public_key and record.id != peer_id_of(record.public_key):
        raise RemoteError("record", "A member record's id is not the hash of its public key.")
    if verify is not trusting and not verify(record.public_key, payload(record), record.signature):
        raise RemoteError("record", "A member record is not signed by its owner.")


# -- bounds of the fields ---------------------------------------------------------------------------------------------
def clamp_field(name: str, value: Any) -> Any:
    """Return the nearest value of a field that :func:`check` and the readers of a frame accept.

    All members cut off a member whose record they refuse, for as long as it signs such records. Therefore every number
    is clamped before it enters a record, whatever caused it.
    """
    if name in COUNTS:
        return value if type(value) is int and 0 <= value < MAX_COUNT else clamp_count(value, MAX_COUNT - 1)
    if name == "version":
        return min(max(clamp_float(value), 0.0), MAX_COUNT - 1.0)
    if name == "loss":
        return None if value is None or abs(clamp_float(value, math.inf)) >= sys.float_info.max else float(value)
    if name == "address":
        return value if value is None or is_dialable(value) else None
    if name == "homes":
        return tuple(value)[:MAX_HOMES]
    if name == "run_id":
        return value if len(value) in (0, 16) else b""
    if name == "extra":
        return value if is_keepable(value) else ()
    return bool(value) if name in ("left", "ready", "finished") else value


def clamped_record(record: MemberRecord) -> MemberRecord:
    """Return the record with every field :func:`clamp_field` its bounds, or the same object if nothing changes."""
    changes = {}
    for field in RECORD_FIELDS:
        value = getattr(record, field)
        clamped = clamp_field(field, value)
        if clamped is not value:
            changes[field] = clamped
    return dataclasses.replace(record, **changes) if changes else record


def clamp_count(value: Any, bound: int) -> int:
    """Return the nearest integer from 0 to ``bound``; 0 if the value is not a number."""
    try:
        return max(0, min(int(value), bound))
    except OverflowError:  # The value is infinite.
        return bound if value > 0 else 0
    except (ValueError, TypeError):
        return 0


def clamp_float(value: Any, substitute: float = 0.0) -> float:
    """Return the nearest finite number; ``substitute`` if there is none, as for NaN."""
    try:
        number = float(value)
    except OverflowError:
        number = math.inf if value > 0 else -math.inf
    except (ValueError, TypeError):
        return substitute
    return substitute if math.isnan(number) else max(-sys.float_info.max, min(number, sys.float_info.max))


def is_dialable(address: Address) -> bool:
    """Return True if other peers accept this address as dialable."""
    host, port = address
    return bool(host) and len(host) <= 255 and host.isprintable() and 0 < port < 65536 and is_host_name(host)


def is_host_name(host: str) -> bool:
    """Return True if a resolver accepts this name."""
    try:
        host.encode("idna")
    except UnicodeError:
        return False
    return host.isascii()


def unsigned(_payload: bytes) -> bytes:
    """Return an empty signature: a :data:`Sign` for simulations, where records cannot be forged."""
    return b""


def trusting(_public_key: bytes, _payload: bytes, _signature: bytes) -> bool:
    """Accept every signature: a :data:`Verify` for simulations. :func:`check` builds no payload for it (2 us each)."""
    return True
