"""What two members agree on before anything is streamed: model, run, codec and version."""

from __future__ import annotations

from gossip.codecs import AUTO, CODECS, Machine, fastest, leaner
from gossip.exchange.session import MAX_VERSION, Local
from gossip.ids import PeerId
from gossip.wire.messages import MAX_GROUP, Accept, Begin, Invite, Joined, Offer

__all__ = ["agreed_codec", "answers", "begins", "proposed_codec", "refusal"]

FALLBACK = "int8"  # in place of a codec that must know the distance to others, before that is known


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


def begins(begin: Begin, me: PeerId, inviter: PeerId) -> bool:
    """Whether a group can begin so."""
    members = begin.members
    several = 2 <= len(members) <= MAX_GROUP and list(members) == sorted(set(members))
    return several and me in members and inviter in members and answers(begin, spread=False)


def usable(codec: str, spread: bool) -> bool:
    return codec in CODECS and (spread or not CODECS[codec].needs_spread)


def proposed_codec(configured: str, spread: bool, rate: float | None, machine: Machine) -> str:
    """What we offer to one with whom exchanges have this rate in MB/s (None: not known; infinite: by memory that both
    share): with ``spread`` alone one that must know the distance to others. ``machine``: what codecs cost us."""
    if configured == AUTO:
        return fastest(rate, machine)
    return configured if spread or not CODECS[configured].needs_spread else FALLBACK


def agreed_codec(configured: str, proposed: str, offered: str) -> str:
    """Return the codec with fewer bytes, theirs or ours: a member that asks for few has a slow link, and the link is
    shared. A codec that must know the distance to others is taken where both know it for the part that is mixed.
    ``proposed``: what we would offer."""
    if offered == configured:
        return proposed
    return blind(offered) if configured == AUTO else leaner(blind(offered), blind(configured))


def blind(codec: str) -> str:
    """This one, or what takes the place of one that must know the distance to others."""
    return FALLBACK if CODECS[codec].needs_spread else codec
