"""The handshake: both sides exchange Hellos with identity and model, and check them before anything else.

``theirs`` is the Hello of the other side. An *observer* reads from a node and is no member.
"""

from dataclasses import dataclass

import trio

from gossip.arithmetic.layout import Layout
from gossip.errors import GossipError, ProtocolError, RefusedError, RemoteError
from gossip.ids import MemberRecord, PeerId, short
from gossip.wire.frames import encode
from gossip.wire.messages import VERSION_MAX, VERSION_MIN, Close, Hello
from gossip.wire.records import check
from node.identity.keys import verify
from node.links.frame_reader import FrameReader
from node.transport.byte_stream import BrokenLinkError, ByteStream
from node.transport.sealed import SHARE_BYTES
from node.transport.tls import TlsStream

LAST_WORDS_S = 1.0  # Time to send our Close and to read the other side's, which contains its layout.


@dataclass(frozen=True, slots=True)
class Greeter:
    """Our side of the handshake.

    Args:
        swarm: The swarm's name.
        layout: The layout of the model; None for an observer, which has no record and trains nothing.
        reads: True for a reader, an observer that knows the layout. It shows no record, and takes no lanes.
    """

    swarm: str
    layout: Layout | None
    reads: bool = False

    async def greet(
        self, stream: ByteStream, reader: FrameReader, record: MemberRecord | None, proven: PeerId | None,
        expected: PeerId | None, share: bytes = b"", lanes: bytes = b"", joins: bytes = b"", seen: str = "",
    ) -> Hello:  # fmt: skip
        """Exchange Hellos and check the other side's. The caller bounds the time.

        Args:
            stream: The connection.
            reader: Its frame reader.
            record: Our record; None for an observer.
            proven: The id that TLS proved; None without TLS.
            expected: The peer that was dialled, if any.
            share: Our key share for sealed records after TLS.
            lanes: Our name for this link, by which lanes join it.
            joins: The other side's name for the link that this connection joins as a lane, or the name of a tunnel.
            seen: The address at which we see the other side.

        Returns:
            The other side's Hello.

        Raises:
            RefusedError: The two nodes cannot work together; its text tells the user why.
        """
        fingerprint = self.layout.fingerprint if self.layout is not None else ""
        shown, name = (None, b"") if self.reads else (record, lanes)
        await stream.send_all(
            encode(Hello(VERSION_MIN, VERSION_MAX, self.swarm, fingerprint, (), shown, share, name, joins, seen))
        )
        try:
            reply = await reader.read_message()
        except BrokenLinkError:  # A node that expects TLS resets a plain connection.
            if reader.bytes_received:
                raise
            reply = None
        if reply is None:
            raise RefusedError(
                "closed", f"{stream.peer_host} closed the connection at once; is it a node of this swarm, and do both "
                "or neither use a secret?"
            )  # fmt: skip
        theirs, _ = reply
        if isinstance(theirs, Close):
            raise RefusedError(theirs.code, f"{stream.peer_host} refused: {theirs.sentence}")
        if not isinstance(theirs, Hello):
            raise ProtocolError(f"{stream.peer_host} did not begin with a Hello.")
        try:
            self.check(theirs, stream, record, proven, expected)
        except RefusedError as error:
            raise await self.refuse(stream, reader, theirs, error) from None
        except RemoteError as error:
            await self.refuse(stream, reader, theirs, error)
            raise
        reader.is_peer_newer = theirs.version_max > VERSION_MAX
        return theirs

    def check(
        self, theirs: Hello, stream: ByteStream, record: MemberRecord | None, proven: PeerId | None,
        expected: PeerId | None,
    ) -> None:  # fmt: skip
        """Raise a RemoteError if their Hello does not fit ours; see :meth:`greet` for the arguments."""
        host = stream.peer_host
        if theirs.version_min > VERSION_MAX or theirs.version_max < VERSION_MIN:
            raise RefusedError(
                "version",
                f"{host} speaks protocol {versions_text(theirs.version_min, theirs.version_max)}, this node "
                f"{versions_text(VERSION_MIN, VERSION_MAX)}: install releases that have one in common.",
            )
        if theirs.swarm != self.swarm and None not in (record, theirs.record):  # An observer belongs to no swarm.
            raise RefusedError("swarm", f"{host} belongs to another swarm than {self.swarm!r}: check Config.swarm.")
        # With another length one side would seal its records and the other would not.
        if len(theirs.share) not in (0, SHARE_BYTES):
            raise ProtocolError(f"{host} gives {len(theirs.share)} bytes for keys, where {SHARE_BYTES} belong.")
        if theirs.record is None:
            if expected is not None:
                raise RefusedError("identity", f"{host} shows no membership, where {short(expected)} is expected.")
            return  # It is an observer.
        check(theirs.record, verify)
        if proven is not None and theirs.record.id != proven:
            raise ProtocolError(f"{host} says it is another member than its certificate proves.")
        if expected is not None and theirs.record.id != expected:
            raise RefusedError(
                "identity", f"{host} is member {short(theirs.record.id)}, not the expected {short(expected)}."
            )
        if record is not None and theirs.record.id == record.id:
            if theirs.record.address == record.address:
                raise RefusedError("self", f"{host} is this node itself.")
            raise RefusedError(
                "twin",
                f"the node at {theirs.record.address or host} has this node's key: give each a state directory of its "
                "own, and not a copy of one.",
            )
        if self.layout is not None and theirs.fingerprint != self.layout.fingerprint:
            raise RefusedError("layout", "")  # :meth:`refuse` adds the text.

    async def refuse(self, stream: ByteStream, reader: FrameReader, theirs: Hello, error: RemoteError) -> RefusedError:
        """Send a Close with the reason, but never the exception's own text, and return the error for our user.

        If the layouts differ, the other side's Close contains its layout, and the error names the first difference.
        """
        layout = self.layout
        sentences = {
            "version": f"this node speaks protocol {versions_text(VERSION_MIN, VERSION_MAX)}, the other side "
            f"{versions_text(theirs.version_min, theirs.version_max)}: install releases that have one in common.",
            "swarm": "this node belongs to another swarm.",
            "layout": "this node trains another model.",
            "identity": "another member was expected at this address.",
            "self": "this is the same node.",
            "twin": "this node has the same key: its state directory is shared, or a copy.",
        }
        sentence = sentences.get(error.code, "the Hello was not acceptable.")
        summary = layout.summary() if layout is not None and error.code == "layout" else ()
        difference = ""
        with trio.move_on_after(LAST_WORDS_S):
            try:
                await stream.send_all(encode(Close(error.code, sentence, summary)))
                reply = await reader.read_message()
                if error.code == "layout" and layout is not None and reply is not None and isinstance(reply[0], Close):
                    difference = layout.difference(Layout.parse(reply[0].layout))
                # A side that has accepted our Hello leaves TLS, and then sends sealed records.
                if reply is None and isinstance(stream, TlsStream):
                    await stream.read_until_end()
            except GossipError:
                pass
        if error.code != "layout" or layout is None:
            return RefusedError(error.code, str(error))
        return RefusedError(
            "layout",
            f"{stream.peer_host} trains another model (its fingerprint {theirs.fingerprint[:12]}, ours "
            f"{layout.fingerprint[:12]})" + (f"; first difference: {difference}" if difference else "."),
        )


def versions_text(oldest: int, newest: int) -> str:
    """Return a range of versions in words."""
    return f"version {newest}" if oldest == newest else f"versions {oldest} to {newest}"
