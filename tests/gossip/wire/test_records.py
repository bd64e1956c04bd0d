"""A record is taken from its owner alone, and two of one owner are always ordered the same way."""

import dataclasses
import math

import pytest
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from hypothesis import given
from hypothesis import strategies as st

from gossip.errors import RemoteError
from gossip.ids import Address, MemberRecord, PeerId, peer_id_of
from gossip.wire.records import check, is_newer, payload, signed, trusting, unsigned

KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
PUBLIC = KEY.public_key().public_bytes_raw()
ME = MemberRecord(
    id=peer_id_of(PUBLIC), public_key=PUBLIC, incarnation=3, sequence=4, address=Address("10.0.0.5", 7700),
    homes=(PeerId(b"h" * 16),), run_id=b"g" * 16, steps=6, samples=7, progress=5, loss=0.5, version=1.5,
)  # fmt: skip


def verify(public_key: bytes, message: bytes, signature: bytes) -> bool:
    try:
        Ed25519PublicKey.from_public_bytes(public_key).verify(signature, message)
    except (ValueError, InvalidSignature):
        return False
    return True


@st.composite
def positions(draw):
    return dataclasses.replace(
        ME, incarnation=draw(st.integers(0, 2)), left=draw(st.booleans()), sequence=draw(st.integers(0, 2))
    )


def test_what_the_owner_signed_is_accepted():
    check(signed(ME, KEY.sign), verify)


CHANGES = [
    {"incarnation": 4}, {"sequence": 5}, {"left": True}, {"address": None}, {"address": Address("10.0.0.6", 7700)},
    {"address": Address("10.0.0.5", 7701)}, {"homes": ()}, {"ready": True}, {"run_id": b"x" * 16}, {"steps": 7},
    {"samples": 8}, {"progress": 6}, {"loss": None}, {"loss": 0.25}, {"version": 2.0}, {"finished": True},
    {"extra": (1,)}, {"extra": (None,)},
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_changing_any_field_breaks_the_signature(change):
    with pytest.raises(RemoteError, match="not signed"):
        check(dataclasses.replace(signed(ME, KEY.sign), **change), verify)


def test_every_field_is_signed():
    tried = {name for change in CHANGES for name in change}
    identity = {"id", "public_key", "signature"}  # fields of the tests below
    assert tried | identity == {field.name for field in dataclasses.fields(MemberRecord)}


def test_another_key_cannot_sign_for_an_id():
    other = Ed25519PrivateKey.from_private_bytes(bytes(32))
    forged = dataclasses.replace(ME, public_key=other.public_key().public_bytes_raw())
    with pytest.raises(RemoteError, match="hash of its public key"):
        check(signed(forged, other.sign), verify)


def test_leaving_the_key_out_does_not_help_against_real_keys():
    with pytest.raises(RemoteError, match="not signed"):
        check(signed(dataclasses.replace(ME, public_key=b""), KEY.sign), verify)


def test_a_simulation_may_do_without_keys():
    check(signed(dataclasses.replace(ME, public_key=b""), unsigned), trusting)


@pytest.mark.parametrize(
    "change",
    [
        *(
            {name: value}
            for name in ("incarnation", "sequence", "progress", "steps", "samples")
            for value in (-1, 2**53)
        ),
        *({"loss": value} for value in (math.nan, math.inf, -math.inf)),
        *({"version": value} for value in (math.nan, math.inf, -math.inf, -1.0)),
        {"homes": (PeerId(b"h" * 16),) * 4},
        {"run_id": b"short"},
        {"address": Address("", 7700)},
        {"address": Address("10.0.0.5", 0)},
        {"address": Address("10.0.0.5", 65_536)},
        {"extra": (1,) * 17},
        {"extra": (b"x" * 381,)},
        {"extra": (math.nan,)},
    ],
    ids=str,
)
def test_a_signed_record_out_of_bounds_is_refused(change):
    record = dataclasses.replace(ME, **change)
    if all(abs(n) < 2**63 for n in (record.incarnation, record.samples)):
        record = signed(record, KEY.sign)
    with pytest.raises(RemoteError) as error:
        check(record, verify)
    assert error.value.code == "record"
    assert "signed" not in str(error.value)


def test_the_largest_numbers_are_accepted():
    most = 2**53 - 1
    record = dataclasses.replace(ME, incarnation=most, sequence=most, progress=most, steps=most, samples=most)
    check(signed(record, KEY.sign), verify)


def test_the_payload_does_not_depend_on_how_a_number_is_written():
    whole = dataclasses.replace(ME, version=0, loss=1)
    assert payload(whole) == payload(dataclasses.replace(ME, version=0.0, loss=1.0))


@given(positions(), positions())
def test_newer_orders_by_incarnation_then_left_then_sequence(a, b):
    def place(r):
        return (r.incarnation, r.left, r.sequence)

    assert is_newer(a, b) == (place(a) > place(b))
