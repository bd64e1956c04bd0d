"""What two members agree on before anything is streamed: model, run, codec, version, and an optimizer's keys."""

from __future__ import annotations

from gossip.codecs import CODECS
from gossip.config import Config
from gossip.exchange import MAX_VERSION, Local
from gossip.messages import Accept, Begin, Invite, Joined, Offer
from gossip.parts import ALL, Part

__all__ = ["agreed_keys", "answers", "bounds", "own_keys", "refusal"]


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


def answers(answer: Accept | Joined | Begin, keys: tuple[str, ...], spread: bool) -> bool:
    """Whether this can be the answer to what was asked with these of the optimizer's keys: all of them, or none."""
    return usable(answer.codec, spread) and 0 <= answer.version < MAX_VERSION and answer.optimizer_keys in ((), keys)


def usable(codec: str, spread: bool) -> bool:
    return codec in CODECS and (spread or not CODECS[codec].needs_spread)


def bounds(part: Part, keys: tuple[str, ...]) -> bool:
    """Whether an exchange of this part, with these of the optimizer's keys, shows how far apart the weights are, and
    may rely on it: bounds are those of blocks of the weights, all of them and nothing else."""
    return part is ALL and not keys


def own_keys(local: Local, config: Config) -> tuple[str, ...]:
    """Of the optimizer's state, what we offer to mix."""
    return local.optimizer_keys if config.average_optimizer else ()


def agreed_keys(local: Local, config: Config, offered: tuple[str, ...]) -> tuple[str, ...]:
    """What is mixed of what another offers: all, where we keep and offer the same, or nothing."""
    return own_keys(local, config) if offered == local.optimizer_keys else ()
