"""Who may see a node's page: on its machine whoever asks it by its own name, elsewhere who has the swarm's link."""

from __future__ import annotations

import hashlib
import hmac
import re
from dataclasses import dataclass
from http import HTTPStatus

from gossip.ids import Address
from node.transport.tcp import is_loopback

__all__ = ["OPEN", "Guard", "token_of"]

TOKEN_DIGITS = 32  # hexadecimal: 128 bits, which nobody guesses
OPEN = "/healthz"  # says nothing but whether this node trains, to launchers that can send no token


def token_of(secret: bytes) -> str:
    """What opens the pages of a swarm. It follows from the swarm's secret and does not lead back to it: who reads it
    on a wire that is not encrypted sees pages, and joins nothing."""
    return hmac.new(secret, b"gossip page", hashlib.sha256).hexdigest()[:TOKEN_DIGITS]


@dataclass(frozen=True, slots=True)
class Guard:
    """``token`` None: the page is on loopback. There a name that only leads here, as a page elsewhere on the web may
    have one made (DNS rebinding), would let that page read ours through the browser of whoever works here; so the name
    that is asked for has to be loopback's own."""

    token: str | None

    @classmethod
    def of(cls, where: Address, secret: bytes | None) -> Guard:
        """``secret`` is None on loopback alone: the settings refuse it elsewhere."""
        if is_loopback(where.host):
            return cls(None)
        assert secret is not None
        return cls(token_of(secret))

    def link(self, shown: Address) -> str:
        """What a person opens."""
        return f"http://{shown}/" + (f"?token={self.token}" if self.token else "")

    def refuses(
        self, path: str, query: str, host: str, authorization: str, cookie: str
    ) -> tuple[HTTPStatus, str] | None:
        """Why a request is not answered; None where it is. Texts are as the visitor sent them."""
        if path == OPEN:
            return None
        if self.token is None:
            if is_own_name(host):
                return None
            return HTTPStatus.FORBIDDEN, "This page answers on its machine alone: open it as http://127.0.0.1:PORT/."
        if self.brings_token(query) or self.same(authorization.removeprefix("Bearer ")):
            return None
        if any(self.same(part.strip().removeprefix("gossip_page=")) for part in cookie.split(";")[:32]):
            return None
        sentence = "This page is its swarm's: open the link that the node printed at its start, or send its token."
        return HTTPStatus.UNAUTHORIZED, sentence

    def brings_token(self, query: str) -> bool:
        """Whether it stands in the address: it is kept in a cookie from then on, and out of the address."""
        return any(self.same(part.removeprefix("token=")) for part in query.split("&")[:32])

    def cookie(self) -> str:
        # Lax and not Strict: whoever opens the link out of a message is to arrive. There is nothing to change here.
        return f"gossip_page={self.token}; Path=/; HttpOnly; SameSite=Lax; Max-Age=604800"

    def same(self, text: str) -> bool:
        return self.token is not None and hmac.compare_digest(text.encode(errors="replace"), self.token.encode())


def is_own_name(host: str) -> bool:
    """Whether a Host header, with its port or without, names loopback."""
    found = re.fullmatch(r"(?:\[([^\[\]]*)\]|([^:\[\]]*))(?::\d*)?", host)
    return found is not None and is_loopback(found[1] or found[2] or "")
