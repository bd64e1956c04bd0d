"""Terms of an exchange: the layout, run, codec and version that both sides agree on before they stream."""

from gossip.codecs import AUTO, CODECS, Machine, fastest_codec, leaner
from gossip.exchange.session import MAX_VERSION, Local
from gossip.ids import PeerId
from gossip.wire.messages import MAX_GROUP, Accept, Begin, Invite, Joined, Offer

FALLBACK = "int8"  # Replaces a codec that needs a bound on the distance between members, until one is known.


def refusal(local: Local, offer: Offer | Invite, same_mixing: bool, bounded: bool) -> str | None:
    """Return the reason to refuse an offer or invitation even if this node is free, or None.

    Args:
        local: State of this node.
        offer: The offer or invitation.
        same_mixing: True if the sender mixes as we do.
        bounded: True if a codec that needs a bound on the distance between members is acceptable. Such codecs send
            values modulo that bound.
    """
    if offer.fingerprint != local.fingerprint:
        return "layout"
    if offer.run_id != local.run_id or not local.ready:
        return "run_id"
    if not same_mixing:
        return "mixing"
    if not is_usable(offer.codec, bounded):
        return "codec"
    return None if 0 <= offer.version < MAX_VERSION else "version"


def is_acceptable(answer: Accept | Joined | Begin, bounded: bool) -> bool:
    """Return True if the codec and version of this answer are acceptable; ``bounded`` as in :func:`refusal`."""
    return is_usable(answer.codec, bounded) and 0 <= answer.version < MAX_VERSION


def is_valid_begin(begin: Begin, me: PeerId, inviter: PeerId) -> bool:
    """Return True if this Begin describes a valid group that includes us and the inviter."""
    members = begin.members
    is_valid = 2 <= len(members) <= MAX_GROUP and list(members) == sorted(set(members))
    return is_valid and me in members and inviter in members and is_acceptable(begin, bounded=False)


def is_usable(codec: str, bounded: bool) -> bool:
    return codec in CODECS and (bounded or not CODECS[codec].needs_spread)


def proposed_codec(configured: str, bounded: bool, rate: float | None, machine: Machine) -> str:
    """Return the codec to offer to a partner.

    Args:
        configured: The codec in the configuration, or AUTO.
        bounded: True if a bound on the distance between members is known, which some codecs need.
        rate: Rate of exchanges with the partner in MB/s: None if unknown.
        machine: Cost of each codec on this machine.
    """
    if configured == AUTO:
        return fastest_codec(rate, machine)
    return configured if bounded or not CODECS[configured].needs_spread else FALLBACK


def agreed_codec(configured: str, proposed: str, offered: str) -> str:
    """Return the codec of an exchange that a partner offers: the one with fewer bytes, the partner's or ours.

    A member that asks for few bytes has a slow link, and both sides share that link. With AUTO we have no codec of our
    own, and take the partner's. A codec that needs a bound on the distance between members is chosen only if both sides
    are configured for it and know the bound for this part.

    Args:
        configured: The codec in our configuration, or AUTO.
        proposed: The codec that we would offer this partner.
        offered: The codec in the partner's Offer.
    """
    if offered == configured:
        return proposed
    if configured == AUTO:
        return unbounded_codec(offered)
    return leaner(unbounded_codec(offered), unbounded_codec(configured))


def unbounded_codec(codec: str) -> str:
    """Return ``codec``, or FALLBACK if it needs a bound on the distance between members."""
    return FALLBACK if CODECS[codec].needs_spread else codec
