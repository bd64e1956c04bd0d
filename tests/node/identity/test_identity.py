import base64
import contextlib
import stat

import msgpack
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from gossip.errors import IdentityError
from gossip.ids import Address, PeerId
from node.identity.keys import (
    INVITE_PREFIX,
    INVITE_TEXT_MAX,
    Identity,
    InviteToken,
    is_invite,
    new_secret,
    parse_invite,
    parse_secret,
    read_secret,
    verify,
)

HOSTS = st.ip_addresses().map(str) | st.from_regex(r"[0-9a-z][0-9a-z.-]{0,60}", fullmatch=True)
ADDRESSES = st.builds(Address, HOSTS, st.integers(1, 65_535))
INVITES = st.builds(
    InviteToken,
    secret=st.binary(min_size=32, max_size=32),
    seeds=st.lists(ADDRESSES, min_size=1, max_size=8).map(tuple),
    seed_id=st.binary(min_size=16, max_size=16).map(PeerId),
)
INVITE = InviteToken(
    bytes(range(32)), (Address("10.0.0.5", 7700), Address("fe80::1", 7700)), PeerId(b"0123456789abcdef")
)


@given(st.binary(max_size=200))
def test_a_signature_holds_for_its_payload_and_key_alone(payload):
    identity = Identity.fresh()
    signature = identity.sign(payload)
    assert verify(identity.public_key, payload, signature)
    assert not verify(identity.public_key, payload + b"!", signature)
    assert not verify(Identity.fresh().public_key, payload, signature)


def test_only_the_owner_can_read_the_key(tmp_path):
    state_dir = tmp_path / "state"
    Identity.load(state_dir)
    assert stat.S_IMODE((state_dir / "identity.pem").stat().st_mode) == 0o600
    assert stat.S_IMODE(state_dir.stat().st_mode) == 0o700


def _x25519_pem():
    return X25519PrivateKey.generate().private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


@pytest.mark.parametrize(
    "content",
    [b"", b"\x00\xff junk", Identity.fresh().pem()[:60], Identity.fresh().pem(b"password"), _x25519_pem()],
    ids=["empty", "junk", "cut short", "under a password", "another kind of key"],
)
def test_a_corrupt_identity_is_reported_and_never_replaced(tmp_path, content):
    path = tmp_path / "identity.pem"
    path.write_bytes(content)
    with pytest.raises(IdentityError, match="restore it from a copy, or delete it") as caught:
        Identity.load(tmp_path)
    assert str(path) in str(caught.value)
    assert path.read_bytes() == content


def test_an_identity_that_cannot_be_read_is_reported(tmp_path):
    (tmp_path / "identity.pem").mkdir()
    with pytest.raises(IdentityError, match="another state directory"):
        Identity.load(tmp_path)


def test_an_identity_that_cannot_be_written_leaves_nothing_behind(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(IdentityError, match=r"No space left.*make the directory writable"):
        Identity.load(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_secret_round_trips_through_its_file(secret):
    text = secret.read_text()
    secret.write_text(text + "\n")
    assert read_secret(secret) == parse_secret(text)
    assert len(parse_secret(text)) == 32
    assert new_secret() != text


@pytest.mark.parametrize(
    "spoil",
    [
        lambda text: "",
        lambda text: text[:-1],
        lambda text: text + "A",
        lambda text: text.partition(":")[2],
        lambda text: text[:30] + "!" + text[30:],
        lambda text: text.replace("secret-1", "secret-2"),
        lambda text: text[:-1] + "é",
    ],
)
def test_what_is_not_a_secret_is_refused_without_repeating_it(secret, spoil):
    text = spoil(new_secret())
    with pytest.raises(IdentityError, match="gossip secret") as caught:
        parse_secret(text)
    secret.write_text(text, encoding="utf-8")
    with pytest.raises(IdentityError, match="does not hold a swarm secret") as caught_in_file:
        read_secret(secret)
    assert str(secret) in str(caught_in_file.value)
    if body := text.partition(":")[2] or text:
        assert body not in str(caught.value)
        assert body not in str(caught_in_file.value)


@pytest.mark.parametrize("mode", [0o644, 0o604, 0o602, 0o666])
def test_a_secret_or_a_key_that_everybody_may_read_is_refused(tmp_path, secret, mode):
    secret.chmod(mode)
    with pytest.raises(IdentityError, match="chmod 600"):
        read_secret(secret)
    secret.chmod(0o640)  # A group that was given it on purpose.
    assert len(read_secret(secret)) == 32
    Identity.load(tmp_path)
    (tmp_path / "identity.pem").chmod(mode)
    with pytest.raises(IdentityError, match="chmod 600"):
        Identity.load(tmp_path)


def test_a_missing_or_unreadable_secret_file_is_named(tmp_path):
    with pytest.raises(IdentityError, match=r"no swarm secret at .*absent"):
        read_secret(tmp_path / "absent")
    with pytest.raises(IdentityError, match="cannot be read"):
        read_secret(tmp_path)


@given(INVITES)
def test_an_invite_round_trips(invite):
    assert is_invite(invite.text)
    assert parse_invite(invite.text) == invite
    assert parse_invite(f"  {invite.text}\n") == invite


def test_the_limit_of_an_invites_text_leaves_room_for_the_largest_and_holds_whatever_the_text_is():
    seeds = tuple(Address("h" * 253, 65_535 - number) for number in range(8))
    invite = InviteToken(bytes(32), seeds, PeerId(bytes(16)))
    assert parse_invite(invite.text) == invite
    with pytest.raises(IdentityError, match="not a whole invite"):
        parse_invite(INVITE.text + " " * INVITE_TEXT_MAX)


@given(st.data())
def test_a_damaged_invite_is_refused_or_is_another_whole_one(data):
    text = INVITE.text
    at = data.draw(st.integers(0, len(text) - 1))
    damaged = text[:at] + data.draw(st.text(max_size=2)) + text[at + 1 :]
    with contextlib.suppress(IdentityError):
        assert parse_invite(damaged).text == damaged.strip()


SECRET, HOST, SEED_ID = b"s" * 32, ["host", 1], b"i" * 16
WRONG_ADDRESSES = [
    ["host", 0], ["host", 65_536], ["host", True], ["", 1], ["two words", 1], ["h" * 254, 1], ["host", 1, 2],
    [b"host", 1],
]  # fmt: skip


@pytest.mark.parametrize(
    "fields",
    [
        [SECRET[1:], [HOST], SEED_ID], ["s" * 32, [HOST], SEED_ID], [SECRET, [HOST], SEED_ID[1:]],
        [SECRET, [HOST], SEED_ID, None], [SECRET, [], SEED_ID], [SECRET, [HOST] * 9, SEED_ID],
        [SECRET, {"host": 1}, SEED_ID], *([SECRET, [address], SEED_ID] for address in WRONG_ADDRESSES),
    ],
)  # fmt: skip
def test_a_well_packed_invite_with_wrong_fields_is_refused(fields):
    text = INVITE_PREFIX + base64.urlsafe_b64encode(msgpack.packb(fields)).rstrip(b"=").decode()
    with pytest.raises(IdentityError, match="not a whole invite"):
        parse_invite(text)


def test_no_secret_shows_in_a_repr():
    assert "private" not in repr(Identity.fresh()).lower()
    assert "secret" not in repr(INVITE)
    assert repr(INVITE.secret) not in repr(INVITE)
