"""A node's page over real HTTP: its contents, and its bounds whatever visitors do."""

import contextlib
import http.client
import json
import re
import socket
import time
from pathlib import Path

import pytest

pytest.importorskip("h11", reason="the page needs gossip-trainer[page]")
prometheus_parser = pytest.importorskip("prometheus_client.parser", reason="the page needs gossip-trainer[page]")

from gossip.errors import LocalError  # noqa: E402
from node import Node  # noqa: E402
from node.identity.keys import read_secret  # noqa: E402
from node.observe.figures import FIGURES  # noqa: E402
from node.observe.page import page, web  # noqa: E402
from node.observe.page.guard import token_of  # noqa: E402
from tests.node.trainees import linear  # noqa: E402

PAGE = {"page": "127.0.0.1:0"}


def port_of(trainee):
    return trainee.side.service.page.server.sock.getsockname()[1]


def get(port, target="/", headers=None, method="GET"):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request(method, target, headers=headers or {})
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read()
    finally:
        connection.close()


class Stream:
    """A reader of an event stream, as in a browser."""

    def __init__(self, port):
        self.connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
        self.connection.request("GET", "/events")
        self.answer = self.connection.getresponse()

    def next(self, wanted):
        while True:
            name = self.answer.readline().decode().removeprefix("event: ").strip()
            data = json.loads(self.answer.readline().decode().removeprefix("data: "))
            assert self.answer.readline() == b"\n"
            if name == wanted:
                return data

    def rows(self, wanted):
        """Return the rows by member once ``wanted(rows)`` is true."""
        for _ in range(20):
            rows = {row["id"]: row for row in self.next("state")["members"]}
            if wanted(rows):
                return rows
        raise AssertionError(f"in vain: {rows}")

    def close(self):
        self.answer.close()
        self.connection.close()


@pytest.fixture
def stream():
    """``stream(port)`` opens an event stream."""
    with contextlib.ExitStack() as stack:
        yield lambda port: stack.enter_context(contextlib.closing(Stream(port)))


@pytest.mark.parametrize("is_secret", [False, True], ids=["open", "secret"])
def test_one_nodes_page_shows_the_whole_swarm_who_mixed_with_whom_and_who_left(train, until, stream, secret, is_secret):
    options = {"secret": secret} if is_secret else {}
    first = train(linear(), work=lambda: 0.5, **PAGE, **options)
    second = train(linear(), work=lambda: 0.25, seeds=[first.node.address], **options)
    events = stream(port_of(first))
    begin = events.next("begin")
    assert begin["swarm"] == "default"
    assert begin["settings"]["mix_every_steps"] == "2"
    assert events.next("sentences")[0]["text"].startswith("The page of this node: http://127.0.0.1:")
    until(lambda: first.node.metrics().exchanges_done > 3)
    ids = first.node.id, second.node.id
    rows = events.rows(lambda rows: rows.keys() == set(ids) and rows[ids[1]].get("mixed"))
    mine, others = (rows[each] for each in ids)
    assert (mine["self"], others["self"]) == (True, False)
    assert (mine["loss"], others["loss"]) == (0.5, 0.25)
    assert others["mixed"][-1][0] == first.node.id
    assert others["exchanges_done"] > 0
    assert mine["mb_s_sent"] is not None
    assert others["version"] == mine["version"] != ""
    second.stop()
    rows = events.rows(lambda rows: rows.get(ids[1], {}).get("state") == "left")
    assert rows[ids[1]]["loss"] == 0.25, "a member that has left keeps its row"


def test_every_metric_is_there_by_the_conventions(train, until):
    node = train(linear(), work=lambda: 0.5, **PAGE)
    until(lambda: node.node.metrics().loss is not None)
    status, headers, body = get(port_of(node), "/metrics")
    families = {family.name: family for family in prometheus_parser.text_string_to_metric_families(body.decode())}
    assert status == 200
    assert headers["Content-Type"].startswith("text/plain; version=")
    known = {figure.metric.removesuffix("_total") for figure in FIGURES if figure.metric}
    known |= {"gossip_exchange_seconds", "gossip_exchanges_failed", "gossip_members", "gossip_links", "gossip_build"}
    assert known - {"gossip_consensus_distance"} <= {name.removesuffix("_info") for name in families}
    assert all(family.documentation and re.fullmatch(r"gossip_[a-z_]+", name) for name, family in families.items())
    for name in ("gossip_steps", "gossip_sent_bytes"):
        assert families[name].type == "counter"
    assert families["gossip_loss"].samples[0].value == 0.5
    assert {sample.labels["state"]: sample.value for sample in families["gossip_members"].samples}["alive"] == 1


def test_a_node_is_healthy_while_its_steps_advance(train, until, monkeypatch):
    node = train(linear(), work=lambda: 0.5, **PAGE)
    port = port_of(node)
    assert get(port, "/healthz")[::2] == (200, b"Steps advance.\n")
    monkeypatch.setattr(page, "HEALTHY_S", 0.2)
    monkeypatch.setattr(page, "HEALTHY_TIMES", 0.0)

    def stands(_):
        until(lambda: get(port, "/healthz")[0] == 503)
        return get(port, "/healthz")[2]

    assert re.fullmatch(rb"The training loop has reached no step boundary for \d+ s\.\n", node.do(stands))
    until(lambda: get(port, "/healthz")[0] == 200)


def test_files_come_with_a_policy_that_lets_no_other_script_run(train):
    port = port_of(train(linear(), **PAGE))
    for target, kind in (("/", "text/html"), ("/page.js", "text/javascript"), ("/uPlot.min.css", "text/css")):
        status, headers, body = get(port, target)
        assert status == 200
        assert headers["Content-Type"].startswith(kind)
        assert "default-src 'none'; script-src 'self'" in headers["Content-Security-Policy"]
        assert len(body) == int(headers["Content-Length"]) > 500
    assert get(port, "/", method="HEAD")[2] == b""
    assert get(port, "/../secret")[0] == get(port, "/page.py")[0] == 404
    assert get(port, "/", method="POST")[0] == 405
    assert get(port, "/", {"Host": "evil.example"})[0] == 403


def test_the_page_needs_no_other_server_and_makes_no_markup_of_its_data():
    folder = Path(page.__file__).with_name("static")
    for name in ("index.html", "page.js", "page.css"):
        source = folder.joinpath(name).read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
        assert "//" not in re.sub(r"^ *//.*|[ ;]// .*", "", source, flags=re.M), name
        for way in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "Function(", "onclick"):
            assert way not in source
    assert "<script>" not in folder.joinpath("index.html").read_text(encoding="utf-8")


# Access and limits ---------------------------------------------------------------------------------------------------
@pytest.fixture
def guarded(train, secret):
    """Return a node whose page wants a token, the port of that page, and the header with the token."""
    node = train(linear(), secret=secret, page="0.0.0.0:0", listen="127.0.0.1:0")
    return node, port_of(node), {"Authorization": f"Bearer {token_of(read_secret(secret))}"}


def test_off_loopback_the_link_opens_the_page_and_leaves_the_address_bar(guarded, secret):
    node, port, header = guarded
    token = token_of(read_secret(secret))
    assert get(port)[0] == get(port, "/metrics")[0] == get(port, "/?token=0")[0] == 401
    assert get(port, "/healthz")[0] == 200
    status, headers, _ = get(port, f"/?token={token}")
    assert (status, headers["Location"]) == (303, "/")
    assert get(port, "/", {"Cookie": headers["Set-Cookie"].partition(";")[0]})[0] == 200
    assert get(port, "/metrics", header)[0] == 200
    (said,) = [str(event) for event in node.node.history() if event.kind == "page"]
    assert re.fullmatch(rf"The page of this node: http://[\d.]+:{port}/\?token={token}", said)


def test_idle_sockets_keep_no_monitor_out(guarded, until, monkeypatch):
    monkeypatch.setattr(web, "REQUEST_S", 60.0)  # Longer than ``get`` waits: no idle socket goes by itself.
    node, port, token = guarded
    server = node.side.service.page.server
    with contextlib.ExitStack() as stack:
        for number in range(200):
            one = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
            if number % 2:
                one.sendall(b"GET /healthz HTTP/1.1\r\nHost: ")  # This request never ends.
        until(lambda: server.waiting)
        for target in ("/healthz", "/metrics"):
            assert get(port, target, token)[0] == 200
        assert len(server.waiting) + len(server.admitted) <= web.MAX_WAITING


def test_a_stream_outlasts_any_number_of_idle_sockets(train, until, stream):
    node = train(linear(), **PAGE)
    port, server = port_of(node), node.side.service.page.server
    events = stream(port)
    events.next("state")
    with contextlib.ExitStack() as stack:
        for _ in range(2 * web.MAX_WAITING):
            stack.enter_context(socket.create_connection(("127.0.0.1", port)))
        until(lambda: len(server.waiting) == web.MAX_WAITING)
        events.next("state")
        events.next("state")
        assert len(server.admitted) == 1


def test_admitted_visitors_are_bounded_and_strangers_still_learn_the_health(guarded, until, monkeypatch):
    monkeypatch.setattr(web, "MAX_ADMITTED", 1)
    node, port, token = guarded
    server = node.side.service.page.server
    with socket.create_connection(("127.0.0.1", port)) as watching:
        watching.sendall(f"GET /events HTTP/1.1\r\nHost: a\r\nAuthorization: {token['Authorization']}\r\n\r\n".encode())
        until(lambda: node.side.service.page.open_streams == 1)
        assert get(port, "/metrics", token)[0] == 503
        assert get(port, "/healthz")[0] == 200
    until(lambda: not (server.waiting or server.admitted))
    assert get(port, "/metrics", token)[0] == 200


def test_a_visitor_that_asks_nothing_or_reads_nothing_is_dropped(train, until, monkeypatch):
    monkeypatch.setattr(web, "REQUEST_S", 0.2)
    monkeypatch.setattr(web, "SEND_S", 0.2)
    monkeypatch.setattr(page, "UPDATE_PERIOD_S", 0.001)
    monkeypatch.setattr(page, "PAUSE_TIMES", 1.0)
    node = train(linear(), **PAGE)
    where, page_of_node = ("127.0.0.1", port_of(node)), node.side.service.page
    server = page_of_node.server
    with socket.create_connection(where), socket.socket() as deaf:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        deaf.connect(where)
        deaf.sendall(b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        until(lambda: page_of_node.open_streams == 1)
        until(lambda: not (server.waiting or server.admitted), 60.0)
        assert page_of_node.open_streams == 0


@pytest.mark.parametrize(
    "sent",
    [
        b"GET /" + b"a" * 100_000, b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 20_000, b"\x16\x03\x01\x02\x00\x01",
        b"\r\n" * 50,
        b"GET / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999\r\n\r\n" + b"x" * 50_000,
        b"GET / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nffffff\r\n",
        b"GET //[::1 HTTP/1.1\r\nHost: localhost\r\n\r\n", b"GET http://[a HTTP/1.1\r\nHost: [[\r\n\r\n",
        b"GET /?token=%ff%fe HTTP/1.1\r\nHost: \xff\r\nCookie: \xfe\r\n\r\n",
    ],
)  # fmt: skip
def test_whatever_is_sent_is_answered_with_a_sentence_or_closed_and_is_no_fault_of_ours(train, sent):
    node = train(linear(), **PAGE)
    with socket.create_connection(("127.0.0.1", port_of(node)), timeout=10) as other:
        try:
            other.sendall(sent)
            other.shutdown(socket.SHUT_WR)
            answer = other.recv(4096)
        except OSError:  # The server closed while we sent.
            answer = b""
    assert answer == b"" or re.match(rb"HTTP/1\.1 4\d\d ", answer)
    assert get(port_of(node), "/healthz")[0] == 200
    assert [str(event) for event in node.node.history() if event.kind == "fault"] == []


def test_no_more_than_so_many_streams_are_open(train, until, stream, monkeypatch):
    monkeypatch.setattr(page, "MAX_STREAMS", 2)
    node = train(linear(), **PAGE)
    opened = [stream(port_of(node)) for _ in range(2)]
    for one in opened:
        one.next("state")
    assert get(port_of(node), "/events")[0] == 503
    opened[0].close()
    until(lambda: node.side.service.page.open_streams < 2)
    assert get(port_of(node), "/healthz")[0] == 200


def test_a_node_leaves_as_quickly_with_a_page_open(train, stream):
    node = train(linear(), **PAGE)
    events = stream(port_of(node))
    events.next("state")
    began = time.monotonic()
    node.stop()
    assert time.monotonic() - began < 8
    assert not node.side.network.thread.is_alive()


def test_a_page_whose_port_is_taken_says_so_in_a_sentence():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        where = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(LocalError, match=rf"The page cannot listen on {where}: address already in use"):
            Node(linear(), page=where).start()


def test_a_fault_of_the_page_is_told_and_the_node_trains_on(train, until, monkeypatch):
    node = train(linear(), **PAGE)
    monkeypatch.setattr(page.SwarmPicture, "update", lambda *_: 1 / 0)
    until(lambda: [event for event in node.node.history() if event.kind == "fault"])
    (fault,) = [str(event) for event in node.node.history() if event.kind == "fault"]
    assert fault.startswith("The page raised ZeroDivisionError in ")
    steps = node.node.metrics().steps
    until(lambda: node.node.metrics().steps > steps + 3)
