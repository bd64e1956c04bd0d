"""Access to a node's page: without a token on loopback, and with the swarm's token elsewhere."""

from http import HTTPStatus

import pytest

from gossip.errors import ConfigError
from gossip.ids import Address
from node.observe.page.guard import Guard, token_of
from node.options import NodeOptions
from node.settings import Settings

SECRET = b"s" * 32
HERE, AWAY = Address("127.0.0.1", 7780), Address("192.0.2.7", 7780)


@pytest.mark.parametrize("host", ["127.0.0.1:7780", "localhost:7780", "localhost", "[::1]:7780", "[::1]", "127.0.0.1"])
def test_on_loopback_requests_for_loopback_are_admitted(host):
    guard = Guard.of(HERE, SECRET)
    assert guard.refusal("/", "", {"host": host}) is None
    assert guard.link(HERE) == "http://127.0.0.1:7780/"


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:7780", "", "127.0.0.1.evil.example:7780", "::1]", "a:b:c"]
)
def test_another_name_that_leads_to_loopback_reads_nothing(host):
    status, sentence = Guard.of(HERE, None).refusal("/events", "", {"host": host})
    assert status is HTTPStatus.FORBIDDEN
    assert host not in sentence or not host


def test_off_loopback_only_the_swarms_token_opens_the_page_as_link_header_or_cookie():
    guard, token = Guard.of(AWAY, SECRET), token_of(SECRET)
    assert guard.link(AWAY) == f"http://192.0.2.7:7780/?token={token}"
    assert guard.refusal("/", f"token={token}", {"host": "any"}) is None
    assert guard.refusal("/metrics", "", {"host": "any", "authorization": f"Bearer {token}"}) is None
    assert guard.refusal("/events", "", {"host": "any", "cookie": f"other=1; gossip_page={token}"}) is None
    wrong = token_of(b"t" * 32)
    for query, bearer, cookie in (
        ("", "", ""), (f"token={wrong}", "", ""), ("", f"Bearer {wrong}", ""), ("", "Bearer ", ""), ("token=", "", ""),
        ("", "", f"gossip_page={wrong}"), ("", "", "gossip_page="), ("token=\xff", "\xff", "\xff"),
    ):  # fmt: skip
        headers = {"host": "127.0.0.1", "authorization": bearer, "cookie": cookie}
        assert guard.refusal("/", query, headers)[0] is HTTPStatus.UNAUTHORIZED
    assert guard.refusal("/healthz", "", {"host": "any"}) is None, "launchers send no token, and it says little"


def test_a_token_follows_from_the_secret_and_is_no_part_of_it():
    assert token_of(SECRET) == token_of(SECRET) != token_of(b"t" * 32)
    assert token_of(SECRET) not in SECRET.hex()
    assert len(token_of(SECRET)) == 32


def gathered(page, **environment):
    pytest.importorskip("h11", reason="the page needs gossip-trainer[page]")
    pytest.importorskip("prometheus_client", reason="the page needs gossip-trainer[page]")
    return Settings.gather(NodeOptions(page=page), environment)


@pytest.mark.parametrize("environment", [{}, {"GOSSIP_INSECURE": "1"}])
def test_off_loopback_there_is_no_page_without_a_secret(environment):
    with pytest.raises(ConfigError, match=r"The page on 0\.0\.0\.0:7780 could be read by anybody"):
        gathered("0.0.0.0:7780", **environment)


def test_the_address_of_the_page_comes_from_the_argument_or_the_environment():
    assert gathered("127.0.0.1:1", GOSSIP_PAGE="127.0.0.1:2").page == ("127.0.0.1", 1)
    assert gathered(None, GOSSIP_PAGE="127.0.0.1:2").page == ("127.0.0.1", 2)
    assert gathered(None).page is None
    with pytest.raises(ConfigError, match="write host:port"):
        gathered("7780")


def test_a_sentence_says_what_to_install_where_the_page_lacks_it(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'gossip-trainer\[page\]'"):
        Settings.gather(NodeOptions(), {"GOSSIP_PAGE": "127.0.0.1:0"})


@pytest.mark.parametrize("path", ["/", "/events", "/metrics"])
@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_a_page_of_another_origin_loads_nothing_but_may_link_here(path, site):
    token = token_of(SECRET)
    for guard, headers in (
        (Guard.of(HERE, None), {"host": str(HERE)}),
        (Guard.of(AWAY, SECRET), {"host": str(AWAY), "cookie": f"gossip_page={token}"}),
    ):
        for mode in ("cors", "no-cors", "websocket", None):
            fetched = {"sec-fetch-site": site} | ({"sec-fetch-mode": mode} if mode else {})
            assert guard.refusal(path, "", headers | fetched)[0] is HTTPStatus.FORBIDDEN
        assert guard.refusal(path, "", headers | {"sec-fetch-site": site, "sec-fetch-mode": "navigate"}) is None
        for own in ("same-origin", "none"):
            assert guard.refusal(path, "", headers | {"sec-fetch-site": own, "sec-fetch-mode": "cors"}) is None
