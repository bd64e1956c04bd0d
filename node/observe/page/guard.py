"""Access to a node's page: on loopback by its own name, elsewhere with the swarm's link."""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus

from gossip.ids import Address
from node.transport.tcp import is_loopback

TOKEN_DIGITS = 32  # Hexadecimal digits: 128 bits, which cannot be guessed.
MAX_PARTS = 32  # Cookies, or parts of a query, that are looked at.
OPEN_PATH = "/healthz"  # Open to launchers that can send no token: it only says whether this node trains.


def token_of(secret: bytes) -> str:
    """Return the token of a swarm's pages, a one-way function of the swarm's secret.

    An eavesdropper on an unencrypted connection can see pages with it, but cannot join.
    """
    return hmac.new(secret, b"gossip page", hashlib.sha256).hexdigest()[:TOKEN_DIGITS]


@dataclass(frozen=True, slots=True)
class Guard:
    """The access check. ``token`` is None for a page on loopback.

    By DNS rebinding, another web page could use a name that leads to loopback, and read this page through the user's
    browser. So on loopback the requested name must be loopback's own.
    """

    token: str | None

    @classmethod
    def of(cls, listen: Address, secret: bytes | None) -> Guard:
        """Create the check. ``secret`` is None on loopback only, which the settings ensure."""
        if is_loopback(listen.host):
            return cls(None)
        assert secret is not None
        return cls(token_of(secret))

    def link(self, shown: Address) -> str:
        """Return the link that a user opens."""
        return f"http://{shown}/" + (f"?token={self.token}" if self.token else "")

    def refusal(self, path: str, query: str, headers: Mapping[str, str]) -> tuple[HTTPStatus, str] | None:
        """Return the status and sentence of a refusal, or None to admit. Texts are as the visitor sent them.

        A page of another origin may lead here by a link, and not load or hold anything from here: its streams would
        take the places of the user's.
        """
        if path == OPEN_PATH:
            return None
        is_other_origin = headers.get("sec-fetch-site", "none") not in ("same-origin", "none")
        if is_other_origin and headers.get("sec-fetch-mode") != "navigate":
            return HTTPStatus.FORBIDDEN, "This page answers no other page: open it in a tab of its own."
        if self.token is None:
            if is_own_name(headers.get("host", "")):
                return None
            return HTTPStatus.FORBIDDEN, "This page answers on its machine alone: open it as http://127.0.0.1:PORT/."
        if self.brings_token(query) or self.is_token(headers.get("authorization", "").removeprefix("Bearer ")):
            return None
        cookie = headers.get("cookie", "")
        if any(self.is_token(part.strip().removeprefix("gossip_page=")) for part in cookie.split(";")[:MAX_PARTS]):
            return None
        sentence = "This page is its swarm's: open the link that the node printed at its start, or send its token."
        return HTTPStatus.UNAUTHORIZED, sentence

    def brings_token(self, query: str) -> bool:
        """Return True if the token is in the address. It is then moved from there to a cookie."""
        return any(self.is_token(part.removeprefix("token=")) for part in query.split("&")[:MAX_PARTS])

    def cookie(self) -> str:
        """Return the cookie that holds the token for a week."""
        # Lax and not Strict, so that the link works from a message. The page offers nothing to change.
        return f"gossip_page={self.token}; Path=/; HttpOnly; SameSite=Lax; Max-Age=604800"

    def is_token(self, text: str) -> bool:
        return self.token is not None and hmac.compare_digest(text.encode(errors="replace"), self.token.encode())


def is_own_name(host: str) -> bool:
    """Return True if a Host header, with or without a port, names loopback."""
    match = re.fullmatch(r"(?:\[([^\[\]]*)\]|([^:\[\]]*))(?::\d*)?", host)
    return match is not None and is_loopback(match[1] or match[2] or "")
