"""The swarm's encryption: certificates derived from its secret, and TLS 1.3 over any stream of bytes."""

import contextlib
import secrets
import ssl
import tempfile
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import trio
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from gossip.errors import ProtocolError, RefusedError
from gossip.ids import PeerId, peer_id_of
from node.identity.keys import Identity
from node.transport.byte_stream import BrokenLinkError, ByteStream

SLICE_BYTES = 262_144  # Bytes encrypted at a time: 16 records. Plaintext and ciphertext of a slice stay in cache.
LAST_WORDS_S = 1.0  # Time for an alert or a close_notify to leave: several round trips around the world.

# Members' clocks need not agree, and any holder of the secret could issue another certificate, so nothing expires. A
# clock without a battery begins in 1970, so OpenSSL must not check times when it admits a peer.
NO_CHECK_TIME = ssl.VerifyFlags(0x200000)  # X509_V_FLAG_NO_CHECK_TIME, for which the ssl module has no name.
VALID_FROM = datetime(2000, 1, 1, tzinfo=UTC)
VALID_UNTIL = datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC)  # RFC 5280 4.1.2.5: no well-defined expiration.
CA_NAME = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "gossip swarm")])


@dataclass(frozen=True, slots=True)
class Contexts:
    """TLS settings of one node in one swarm, for the links it dials and for those it accepts."""

    client_context: ssl.SSLContext
    server_context: ssl.SSLContext
    peer_id: PeerId  # The node's own id.


def swarm_contexts(identity: Identity, secret: bytes) -> Contexts:
    """Return TLS 1.3 contexts that require certificates of both ends, signed by the authority derived from ``secret``.

    ``secret`` has 32 bytes. Every holder derives the same authority and signs its own leaf, so no issuer is needed.
    """
    ca_key = Ed25519PrivateKey.from_private_bytes(
        HKDF(algorithm=hashes.SHA256(), length=32, salt=None, info=b"gossip swarm authority 1").derive(secret)
    )
    ca = _ca_certificate(ca_key)
    leaf = _leaf_certificate(identity, ca_key)
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False  # A member is identified by its key, at any address.
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.num_tickets = 0  # Links live long: resumption saves nothing, and would skip the certificates.
    for context in (client, server):
        context.verify_flags |= NO_CHECK_TIME
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(cadata=ca.public_bytes(serialization.Encoding.DER))
        _load_leaf(context, identity, leaf)
    return Contexts(client, server, identity.id)


def leaf_peer_id(der: bytes) -> PeerId:
    """Return the id of a certificate's owner. For a peer it is proved only by a finished handshake.

    Raises :class:`ProtocolError` where the key is not Ed25519.
    """
    try:
        key = x509.load_der_x509_certificate(der).public_key()
    except Exception as error:  # The parser's errors have no common base class, and these bytes come from a peer.
        raise ProtocolError("The other side's certificate cannot be read.") from error
    if not isinstance(key, Ed25519PublicKey):
        raise ProtocolError("The other side's certificate is not for an Ed25519 key.")
    return peer_id_of(key.public_bytes_raw())


class TlsStream:
    """TLS over another stream of bytes: a thin layer on ``ssl.MemoryBIO``.

    trio's own TLS encrypts all of a ``send_all`` in memory before it sends, and returns one record of 16 KiB per read.
    It reaches 0.85 GB/s over loopback, and slices of 256 KiB reach 1.77.

    Receiving never sends, so that it never waits behind a sender. A reply that TLS requires (a new key) leaves with the
    next ``send_all``, as RFC 8446 4.6.3 allows. An end without ``close_notify`` raises :class:`BrokenLinkError`,
    because anybody on the path can forge one; ``receive_into`` returns 0 only for a proper close.
    """

    def __init__(self, inner: ByteStream, contexts: Contexts, *, server_side: bool) -> None:
        self.inner, self.own_id, self.peer_host = inner, contexts.peer_id, inner.peer_host
        self._incoming = ssl.MemoryBIO()  # Received ciphertext that TLS has not taken.
        self._outgoing = ssl.MemoryBIO()  # Ciphertext to send.
        context = contexts.server_context if server_side else contexts.client_context
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=server_side)
        self._ciphertext = memoryview(bytearray(SLICE_BYTES))  # The buffer of one read.
        self._sending = trio.Lock()  # A task that takes ciphertext out sends it before another takes more.
        self._is_torn = False  # A send is in progress or was cut short in a record, after which the peer reads nothing.
        self._closed = False
        self._has_left = False  # close_notify was sent, and plain bytes may follow it.
        self._is_accepted = False  # The other side is known to have accepted us.
        self._peer_id: PeerId | None = None  # None until the handshake has proved it.

    @property
    def dialled(self) -> bool:
        """Return True if this side dialled."""
        return not self._tls.server_side

    @property
    def peer_id(self) -> PeerId:
        """Return the id that the other side proved; valid only after :meth:`handshake`."""
        if self._peer_id is None:
            raise RuntimeError("peer_id is known only after the handshake")
        return self._peer_id

    async def handshake(self) -> None:
        """Prove the secret and the key to each other. The caller bounds the time, and closes the stream on failure.

        Raises :class:`RefusedError` where the other side is not of this swarm. A client that is itself refused learns
        it at its first ``receive_into``, because TLS 1.3 lets it finish first.
        """
        while True:
            try:
                self._tls.do_handshake()
                break
            except ssl.SSLWantReadError:
                await self._flush()
                await self._fill()
            except ssl.SSLError as error:
                await self._send_alert()
                raise self._refused() from error
        certificate = self._tls.getpeercert(binary_form=True)
        assert certificate is not None  # Guaranteed by CERT_REQUIRED.
        self._peer_id = leaf_peer_id(certificate)
        self._is_accepted = self._tls.server_side  # A client speaks last, and only if it trusts the server.
        await self._flush()

    async def receive_into(self, buffer: memoryview) -> int:
        while True:
            filled = 0
            try:
                while filled < len(buffer):  # Each pass decrypts one record, of at most 16 KiB.
                    # typeshed knows only the form without a buffer, which returns bytes.
                    count: int = self._tls.read(len(buffer) - filled, buffer[filled:])  # type: ignore
                    if not count:
                        break  # This is close_notify. If there are bytes to return, the next call meets it again.
                    filled += count
            except ssl.SSLWantReadError:
                if not filled:
                    await self._fill()
                    continue
            except ssl.SSLZeroReturnError:
                pass  # This is close_notify too, after we have sent ours.
            except ssl.SSLError as error:
                if not filled:  # Otherwise the next call meets the error.
                    raise self._failed(error) from error
            else:
                await trio.lowlevel.checkpoint()  # Nothing above waited, and a fast sender must not starve other tasks.
            self._is_accepted = self._is_accepted or filled > 0
            return filled

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        view = memoryview(data).cast("B")
        for start in range(0, len(view), SLICE_BYTES):
            async with self._sending:
                if self._is_torn or self._closed or self._has_left:
                    raise self._broken()
                try:
                    self._tls.write(view[start : start + SLICE_BYTES])
                except ssl.SSLError as error:
                    raise self._failed(error) from error
                await self._send_outgoing()

    async def leave(self) -> None:
        """Send ``close_notify``, and leave TLS: later bytes go over ``inner`` directly.

        The other side's bytes belong to TLS up to its own ``close_notify``. There ``receive_into`` returns 0, and
        :meth:`bytes_after_end` has the rest.
        """
        # OpenSSL would look for the other side's close_notify in these bytes, and fail at any other data.
        read_ahead = self._incoming.read()
        try:
            self._tls.unwrap()
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLError as error:
            raise self._failed(error) from error
        self._incoming.write(read_ahead)
        self._has_left = True
        await self._flush()

    def bytes_after_end(self) -> bytes:
        """Return the bytes received after the other side's ``close_notify``."""
        return self._incoming.read()

    async def read_until_end(self) -> None:
        """Read and discard until the other side has closed, so that no reset overtakes our last bytes.

        The caller bounds the time.
        """
        while await self.inner.receive_into(self._ciphertext):
            pass

    async def aclose(self) -> None:
        """Send ``close_notify`` if that takes at most a second, and close without waiting for the other side's."""
        try:
            if self._peer_id is not None and not self._closed:
                self._closed = True
                with contextlib.suppress(ssl.SSLError):  # It always asks for the other side's close_notify.
                    self._tls.unwrap()
                with trio.move_on_after(LAST_WORDS_S), contextlib.suppress(BrokenLinkError):
                    await self._flush()
        except BaseException:
            self.close_now()
            raise
        await self.inner.aclose()

    def close_now(self) -> None:
        self._closed = True
        self.inner.close_now()

    async def _fill(self) -> None:
        """Wait for ciphertext. A cancelled wait loses none: there is no await between receiving and writing."""
        count = await self.inner.receive_into(self._ciphertext)
        if not count:
            raise self._broken()
        self._incoming.write(self._ciphertext[:count])

    async def _flush(self) -> None:
        """Send what TLS wants to send by itself, unless a record was cut short."""
        async with self._sending:
            if not self._is_torn:
                await self._send_outgoing()

    async def _send_outgoing(self) -> None:
        """Send the ciphertext that TLS has written. A cancelled call leaves the stream torn."""
        ciphertext = self._outgoing.read()
        if not ciphertext:
            return
        self._is_torn = True
        await self.inner.send_all(ciphertext)
        self._is_torn = False

    async def _send_alert(self) -> None:
        """Send the alert of a failed handshake, if there is one, then read until the other side has closed.

        Closing with its bytes unread would reset the connection, and a reset may overtake the alert. The other side
        would then see a broken link, and not learn that its secret is wrong.
        """
        if not self._outgoing.pending:  # The handshake failed because of the other side's own alert.
            return
        with trio.move_on_after(LAST_WORDS_S), contextlib.suppress(BrokenLinkError):
            await self._flush()
            await self.read_until_end()

    def _failed(self, error: ssl.SSLError) -> RefusedError | ProtocolError | BrokenLinkError:
        """Return the error for a failure of TLS, by whether this side has closed and the other has accepted it."""
        if self._closed:
            return self._broken()
        if not self._is_accepted:
            return self._refused()
        return ProtocolError(f"{self.peer_host} sent bytes that are not this link's TLS ({error.reason}).")

    def _refused(self) -> RefusedError:
        return RefusedError(
            "secret",
            f"{self.peer_host} does not hold this swarm's secret (or runs without one): start both nodes with the same"
            " secret file.",
        )

    def _broken(self) -> BrokenLinkError:
        return BrokenLinkError(f"The encrypted connection to {self.peer_host} broke.")


def _ca_certificate(key: Ed25519PrivateKey) -> x509.Certificate:
    """Return the swarm's certificate, the same on every node: all fields are fixed and Ed25519 is deterministic."""
    return (
        _certificate(CA_NAME, key.public_key(), serial=1)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(signs_certificates=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, None)
    )


def _leaf_certificate(identity: Identity, ca_key: Ed25519PrivateKey) -> x509.Certificate:
    """Return a certificate for this node's key. It is no authority, so it can admit no one else."""
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, identity.id.hex())])
    public_key = Ed25519PublicKey.from_public_bytes(identity.public_key)
    return (
        _certificate(name, public_key, serial=x509.random_serial_number())
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(signs_certificates=False), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public_key), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), critical=False)
        .sign(ca_key, None)
    )


def _certificate(name: x509.Name, public_key: Ed25519PublicKey, *, serial: int) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(CA_NAME)
        .public_key(public_key)
        .serial_number(serial)
        .not_valid_before(VALID_FROM)
        .not_valid_after(VALID_UNTIL)
    )


def _key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates, key_cert_sign=signs_certificates, content_commitment=False,
        key_encipherment=False, data_encipherment=False, key_agreement=False, crl_sign=False, encipher_only=False,
        decipher_only=False,
    )  # fmt: skip


def _load_leaf(context: ssl.SSLContext, identity: Identity, leaf: x509.Certificate) -> None:
    """Load a leaf into a context, from a file with a throwaway password, since ``ssl`` takes keys from files only."""
    password = secrets.token_bytes(32).hex()
    with tempfile.TemporaryDirectory(prefix="gossip-") as folder:  # Created with mode 0700.
        path = Path(folder, "leaf.pem")
        path.write_bytes(leaf.public_bytes(serialization.Encoding.PEM) + identity.pem(password.encode("ascii")))
        context.load_cert_chain(path, password=password)
