"""What two members agree on before anything is streamed: model, run, codec and version."""

from __future__ import annotations

from gossip.codecs import CODECS
from gossip.exchange.session import MAX_VERSION, Local
from gossip.wire.messages import Accept, Begin, Invite, Joined, Offer

__all__ = ["answers", "refusal"]


def refusal(local: Local, asked: Offer | Invite, alike: bool, spread: bool) -> str | None:
    """The reason to refuse what is asked, whatever this node is doing at the moment. ``alike``: they mix as we do;
    ``spread``: a codec may be one that must know the distance to others."""
    if asked.fingerprint != local.fingerprint:
        return "layout"
    if asked.genesis != local.genesis or not local.ready:
        return "genesis"
    if not alike:
        return "mixing"
    if not usable(asked.codec, spread):
        return "codec"
    return None if 0 <= asked.version < MAX_VERSION else "version"


def answers(answer: Accept | Joined | Begin, spread: bool) -> bool:
    """Whether this can be the answer to what was asked."""
    return usable(answer.codec, spread) and 0 <= answer.version < MAX_VERSION


def usable(codec: str, spread: bool) -> bool:
    return codec in CODECS and (spread or not CODECS[codec].needs_spread)
