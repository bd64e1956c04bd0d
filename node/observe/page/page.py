"""The page of one node: it looks at the swarm each second, queries members while it is open, and answers requests."""

import json
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import fields, replace
from http import HTTPStatus
from pathlib import Path
from typing import Any, Protocol

import trio

from gossip.config import Config
from gossip.effects import MemberState
from gossip.errors import LocalError, RemoteError
from gossip.ids import Address, PeerId, parse_address
from gossip.peer import Peer
from node.faults import Faults
from node.links.connector import Connector
from node.observe.events import ExchangeEvent, NodeEvent
from node.observe.figures import Source, status_reading
from node.observe.page.exposition import CONTENT_TYPE, Exposition
from node.observe.page.guard import OPEN_PATH, Guard
from node.observe.page.picture import SwarmPicture
from node.observe.page.web import Answer, PageRequest, WebServer
from node.observe.status import AFTER_ALL, query_node

UPDATE_PERIOD_S = 1.0  # Seconds between two updates of the picture.
# Pause after an update, as a multiple of its duration: it walks the table of members, 16 ms for 10,000 of them.
PAUSE_TIMES = 100.0
MAX_STREAMS = 16  # Concurrent event streams, of 20 kB a second each.
MAX_QUERIES = 8  # Members queried per second while a page is open: 32 take four seconds.
QUERY_S = 2.0  # Time limit for a member's answer, a third of the age at which its row is old.
MAX_SENTENCES = 50  # Recent sentences that a page begins with.
MAX_CHARACTERS = 400  # Characters of each sentence.
# A node is healthy while it has been without a step boundary for less than the larger of these two limits:
HEALTHY_S = 30.0  # Seconds; an evaluation may take this long.
HEALTHY_TIMES = 3.0  # A multiple of the longest time between two boundaries so far.
STATIC = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
    "/uPlot.iife.min.js": ("uPlot.iife.min.js", "text/javascript; charset=utf-8"),
    "/uPlot.min.css": ("uPlot.min.css", "text/css; charset=utf-8"),
}


class WatchedNode(Protocol):
    """The network side of a node, as its page sees it."""

    @property
    def peer(self) -> Peer: ...
    @property
    def connector(self) -> Connector: ...
    @property
    def faults(self) -> Faults: ...
    @property
    def failure(self) -> BaseException | None:
        """The fault that ends this network side."""

    @property
    def now(self) -> float:
        """The time by the network's clock."""


class Page:
    """The page of one node, which runs in the network thread."""

    def __init__(self, listen: Address, secret: bytes | None, config: Config) -> None:
        """Load the page's files. Raises ConfigError if nothing would protect it."""
        self.guard, self.secret, self.config = Guard.of(listen, secret), secret, config
        self.server = WebServer(listen, self.answer, lambda error: self.contain(error))
        folder = Path(__file__).with_name("static")
        self.static = {path: ((folder / name).read_bytes(), kind) for path, (name, kind) in STATIC.items()}
        self.exposition = Exposition()
        self.runtime: Callable[[], WatchedNode] | None = None  # Returns the current runtime, which a fault may replace.
        self.picture: SwarmPicture | None = None  # None, as runtime and source, before :meth:`serve`.
        self.source: Callable[[], Source] | None = None
        self.contain: Callable[[Exception], None] = lambda error: None
        self.sentences: list[dict[str, Any]] = []
        self.sentence_count = 0  # Number of sentences so far, which numbers the next one.
        self.open_streams = 0
        self.state = b""  # The event of the last update, which all streams send; empty before the first.
        self.updated = trio.Event()
        self.query_limiter = trio.CapacityLimiter(MAX_QUERIES)
        self.longest_s = 0.0  # The longest time without a boundary that an update has seen.

    async def serve(self, runtime: Callable[[], WatchedNode], source: Callable[[], Source]) -> None:
        """Serve until cancelled."""
        self.runtime, self.source = runtime, source
        self.picture = SwarmPicture(runtime().peer.membership.me.id)
        self.contain = lambda error: runtime().faults.contain(error, "The page", "it stays up")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.server.serve)
            while True:
                began = time.perf_counter()
                try:
                    self.update(runtime(), source, self.picture, nursery)
                except Exception as error:
                    self.contain(error)
                await trio.sleep(max(UPDATE_PERIOD_S, PAUSE_TIMES * (time.perf_counter() - began)))

    def update(
        self, runtime: WatchedNode, source: Callable[[], Source], picture: SwarmPicture, nursery: trio.Nursery
    ) -> None:
        """Update the picture, query members if a page is open, and wake the event streams."""
        peer, now = runtime.peer, time.monotonic()
        source_now = source()
        stall_s = runtime.now - peer.view.boundary_at
        if peer.view.ready and stall_s < self.stall_limit_s:  # A stall must not raise its own limit.
            self.longest_s = max(self.longest_s, stall_s)
        picture.update(
            [(peer.membership.me, MemberState.ALIVE), *peer.membership.members()],
            status_reading(source_now), now, source_now.run, source_now.links.path_of,
        )  # fmt: skip
        if self.open_streams:
            for member, address in picture.take_next_queries(MAX_QUERIES, now):
                nursery.start_soon(self.query_member, runtime.connector, picture, member, address)
            self.state = self.state_of(picture)
        ended, self.updated = self.updated, trio.Event()  # A trio.Event can be set only once.
        ended.set()

    def state_of(self, picture: SwarmPicture) -> bytes:
        """Return the event that open pages get once a second."""
        status, reason = self.health()
        return event_of("state", {**picture.state(), "health": reason, "healthy": status is HTTPStatus.OK})

    async def query_member(self, connector: Connector, picture: SwarmPicture, member: PeerId, dial_at: str) -> None:
        """Query one member for its own figures, within the dial budget; its row stays if it does not answer."""
        if self.query_limiter.available_tokens < 1:
            return
        async with self.query_limiter:
            try:
                address = parse_address(dial_at)
                limits = connector.limits(address)
                answer = await query_node(address, self.secret, QUERY_S, AFTER_ALL, limits)
                if answer["id"] == member.hex():
                    connector.budget.mark_proven(address)
                    picture.on_answer(member, answer["metrics"], time.monotonic())
            except (OSError, RemoteError, LocalError, trio.TooSlowError):
                pass
            except Exception as error:
                self.contain(error)

    def on_event(self, event: NodeEvent) -> None:
        """Record an event of this node."""
        if isinstance(event, ExchangeEvent):
            self.exposition.on_exchange(event)
        else:
            self.sentence_count += 1
            row = {"number": self.sentence_count, "at": round(event.at_s, 1), "text": str(event)[:MAX_CHARACTERS]}
            self.sentences.append(row)
            del self.sentences[:-MAX_SENTENCES]

    # -- answers ---------------------------------------------------------------------------------------------------
    async def answer(self, request: PageRequest) -> Answer:
        """Answer a request, if the guard admits it."""
        path = request.path
        refusal = self.guard.refusal(path, request.query, request.headers)
        if refusal is not None:
            status, sentence = refusal
            return Answer(f"{sentence}\n".encode(), status=status)
        return replace(await self.route(request), admitted=path != OPEN_PATH)

    async def route(self, request: PageRequest) -> Answer:
        """Answer a request that the guard admits."""
        path = request.path
        if path == "/" and self.guard.brings_token(request.query):
            return Answer(
                b"", status=HTTPStatus.SEE_OTHER, headers=(("Location", "/"), ("Set-Cookie", self.guard.cookie()))
            )
        if path in self.static:
            body, kind = self.static[path]
            return Answer(body, kind)
        if self.runtime is None or self.source is None or self.picture is None:
            return Answer(b"This node is starting.\n", status=HTTPStatus.SERVICE_UNAVAILABLE)
        match path:
            case "/healthz":
                status, sentence = self.health()
                return Answer(f"{sentence}\n".encode(), status=status)
            case "/metrics":
                return Answer(self.exposition.render(self.source()), CONTENT_TYPE)
            case "/events":
                if self.open_streams >= MAX_STREAMS:
                    sentence = f"{MAX_STREAMS} pages of this node are open already: close one."
                    return Answer(f"{sentence}\n".encode(), status=HTTPStatus.SERVICE_UNAVAILABLE)
                return Answer(b"", "text/event-stream", stream=self.events(self.picture))
        return Answer(b"There is no such page.\n", status=HTTPStatus.NOT_FOUND)

    async def events(self, picture: SwarmPicture) -> AsyncGenerator[bytes, None]:
        """Yield the initial event and then one per update. Nothing is queued: a slow reader gets fewer events."""
        self.open_streams += 1
        try:
            yield event_of(
                "begin", {"settings": settings_of(self.config), "swarm": self.config.swarm, **picture.history()}
            )
            last_sent, state = 0, self.state_of(picture)  # The number of the last sentence that was sent.
            while True:
                new = [sentence for sentence in self.sentences if sentence["number"] > last_sent]
                if new:
                    last_sent = new[-1]["number"]
                    yield event_of("sentences", new)
                yield state
                await self.updated.wait()
                state = self.state
        finally:
            self.open_streams -= 1

    @property
    def stall_limit_s(self) -> float:
        """Return the seconds without a step boundary after which this node counts as unhealthy."""
        return max(HEALTHY_S, HEALTHY_TIMES * self.longest_s)

    def health(self) -> tuple[HTTPStatus, str]:
        """Return OK if steps advance, else an error status, and a sentence with the reason."""
        assert self.runtime is not None
        runtime = self.runtime()
        peer, stall_s = runtime.peer, runtime.now - runtime.peer.view.boundary_at
        if not peer.view.ready:
            return HTTPStatus.SERVICE_UNAVAILABLE, "This node holds no weights of a run yet: it joins."
        if peer.view.finished:
            return HTTPStatus.OK, "This node's run is finished."
        if stall_s >= self.stall_limit_s:
            sentence = f"The training loop has reached no step boundary for {stall_s:.0f} s."
            return HTTPStatus.SERVICE_UNAVAILABLE, sentence
        if runtime.failure is not None:
            return HTTPStatus.OK, "Steps advance, alone: the network side restarts after a fault of this library."
        return HTTPStatus.OK, "Steps advance."


def event_of(name: str, data: Any) -> bytes:
    """Return a server-sent event. JSON escapes newlines in texts, so no text can start another event."""
    return f"event: {name}\ndata: {json.dumps(data, separators=(',', ':'), allow_nan=False)}\n\n".encode()


def settings_of(config: Config) -> dict[str, str]:
    """Return every key whose value is not the default, with the value as text."""
    plain = Config()
    values = {field.name: (getattr(config, field.name), getattr(plain, field.name)) for field in fields(config)}
    return {name: str(value)[:MAX_CHARACTERS] for name, (value, default) in values.items() if value != default}
