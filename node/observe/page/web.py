"""A small HTTP server: one request per connection, with bounds on number, size and time for all visitors."""

import contextlib
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus

import h11
import trio

from gossip.ids import Address
from node.links.handshake_pool import neighbourhood
from node.transport.forks import keep_from_children
from node.transport.tcp import bound

MAX_WAITING = 64  # Connections without an admitted request: a browser opens six. Beyond it see ``drop_oldest``.
MAX_ADMITTED = 64  # Connections whose request the guard has admitted: only event streams last.
REQUEST_BYTES = 16_384  # Limit on a request's line and headers; a body is refused.
REQUEST_S = 5.0  # Limit for a request to arrive.
SEND_S = 10.0  # Limit for sending a piece of an answer: a visitor that does not read is disconnected.
HEADERS = (
    # Names, losses and sentences on the page come from others. The page inserts them as text. Should that fail, this
    # policy lets no foreign script run and nothing be sent elsewhere.
    ("Content-Security-Policy", "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
     "img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"),
    ("X-Content-Type-Options", "nosniff"),
    ("Referrer-Policy", "no-referrer"),
    ("Cache-Control", "no-store"),
    ("Connection", "close"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class PageRequest:
    """A request: path and query as they were sent, and the headers with lower-case names."""

    path: str
    query: str
    headers: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Answer:
    """A response.

    ``stream`` yields pieces that follow the body. ``admitted`` means that the guard knows the visitor, so that the
    connection no longer counts among those of strangers.
    """

    body: bytes
    kind: str = "text/plain; charset=utf-8"
    status: HTTPStatus = HTTPStatus.OK
    headers: tuple[tuple[str, str], ...] = field(default=())
    stream: AsyncGenerator[bytes, None] | None = None
    admitted: bool = False


TOO_MANY = Answer(b"This page has too many visitors: try again.\n", status=HTTPStatus.SERVICE_UNAVAILABLE)


class WebServer:
    """The server. ``answer`` gives the responses, and ``contain`` gets its unexpected exceptions.

    Strangers and admitted visitors have separate places, so that idle sockets never keep a monitor out.
    """

    def __init__(
        self, listen: Address, answer: Callable[[PageRequest], Awaitable[Answer]], contain: Callable[[Exception], None]
    ) -> None:
        self.listen, self.answer, self.contain = listen, answer, contain
        self.sock: trio.socket.SocketType | None = None  # None before :meth:`bind`.
        # The visitor's range of addresses for each connection without an admitted request, the oldest first.
        self.waiting: dict[trio.socket.SocketType, str] = {}
        self.admitted: set[trio.socket.SocketType] = set()

    async def bind(self) -> Address:
        """Begin to listen; return the address with its real port. Raises LocalError: port in use, no such address."""
        self.sock, address = await bound(self.listen, "The page cannot", "--page")
        return address

    def close(self) -> None:
        if self.sock is not None:
            self.sock.close()

    async def serve(self) -> None:
        """Serve until cancelled. A failing connection affects no other."""
        assert self.sock is not None
        async with trio.open_nursery() as nursery:
            while True:
                try:
                    accepted, socket_address = await self.sock.accept()
                except OSError:  # Out of descriptors, or a connection that ended before it was accepted.
                    await trio.sleep(0.1)
                    continue
                keep_from_children(accepted)
                if len(self.waiting) >= MAX_WAITING:
                    self.drop_oldest()
                self.waiting[accepted] = neighbourhood(str(socket_address[0]))
                nursery.start_soon(self.handle_connection, accepted)

    def drop_oldest(self) -> None:
        """Close the oldest waiting connection from the range of addresses that has the most of them."""
        counts = Counter(self.waiting.values())
        largest = max(counts.values())
        oldest = next(sock for sock, host_range in self.waiting.items() if counts[host_range] == largest)
        del self.waiting[oldest]
        oldest.close()

    def admit(self, sock: trio.socket.SocketType) -> bool:
        """Count a connection among the admitted ones; return False if there are too many."""
        if sock not in self.waiting or len(self.admitted) >= MAX_ADMITTED:
            return False
        del self.waiting[sock]
        self.admitted.add(sock)
        return True

    async def handle_connection(self, sock: trio.socket.SocketType) -> None:
        """Answer the request of a connection, and close it."""
        try:
            await self.answer_request(trio.SocketStream(sock), h11.Connection(h11.SERVER, REQUEST_BYTES))
        except (OSError, trio.BrokenResourceError, trio.ClosedResourceError, trio.TooSlowError):
            pass  # The visitor is gone, too slow, or dropped.
        except Exception as error:
            self.contain(error)
        finally:
            self.waiting.pop(sock, None)
            self.admitted.discard(sock)
            sock.close()

    async def answer_request(self, stream: trio.SocketStream, http: h11.Connection) -> None:
        """Read the request of a connection, and send its answer."""
        try:
            with trio.fail_after(REQUEST_S):
                request = await self.read_request(stream, http)
        except h11.RemoteProtocolError:
            if http.our_state is h11.IDLE or http.our_state is h11.SEND_RESPONSE:
                answer = Answer(b"That is no request.\n", status=HTTPStatus.BAD_REQUEST)
                await self.send_response(stream, http, answer, False)
            return
        if request is None:
            return
        if request.method not in (b"GET", b"HEAD"):
            answer = Answer(b"There is nothing to change here.\n", status=HTTPStatus.METHOD_NOT_ALLOWED)
        else:
            headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in request.headers}
            path, _, query = request.target.decode("latin-1").partition("?")
            answer = await self.answer(PageRequest(path, query, headers))
            if answer.admitted and not self.admit(stream.socket):
                answer = TOO_MANY
        await self.send_response(stream, http, answer, request.method == b"HEAD")

    async def read_request(self, stream: trio.SocketStream, http: h11.Connection) -> h11.Request | None:
        """Return the complete request; None from a visitor that sends nothing. Raises RemoteProtocolError."""
        request: h11.Request | None = None
        while True:
            event = http.next_event()
            if event is h11.NEED_DATA:
                http.receive_data(await stream.receive_some(REQUEST_BYTES))
            elif isinstance(event, h11.Request):
                request = event
            elif isinstance(event, h11.EndOfMessage):
                return request
            elif isinstance(event, h11.Data):
                raise h11.RemoteProtocolError("a body")
            else:
                return None

    async def send_response(self, stream: trio.SocketStream, http: h11.Connection, answer: Answer, head: bool) -> None:
        """Send the head of an answer and, unless only the head was requested, its body and stream."""
        headers = [*HEADERS, *answer.headers, ("Content-Type", answer.kind)]
        if answer.stream is None:
            headers.append(("Content-Length", str(len(answer.body))))
        await self.send_piece(stream, http.send(h11.Response(
            status_code=answer.status.value, headers=headers, reason=answer.status.phrase.encode()
        )))  # fmt: skip
        if head:
            return
        await self.send_piece(stream, http.send(h11.Data(answer.body)))
        if answer.stream is not None:
            async with contextlib.aclosing(answer.stream) as pieces:
                async for piece in pieces:
                    await self.send_piece(stream, http.send(h11.Data(piece)))
        await self.send_piece(stream, http.send(h11.EndOfMessage()))

    async def send_piece(self, stream: trio.SocketStream, data: bytes | None) -> None:
        """Send bytes within ``SEND_S``. Raises trio.TooSlowError."""
        if data:
            with trio.fail_after(SEND_S):
                await stream.send_all(data)
