"""An attack by its name: what it does, and what is asked of the swarm while it lasts."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from foe import Foe

__all__ = ["ATTACKS", "Attack", "attack"]


@dataclass(frozen=True)
class Attack:
    """``partners``: members of its that finish exchanges, so that by rights a share of everybody's mixes is with them.
    ``named``: "member" where one of its identities must be named in a log, "address" for one that never says who it is,
    "" for one that honest nodes cannot tell from bad luck. ``newcomer``: an honest node joins while it lasts;
    ``seeds``: of its seeds so many are the attacker's, beside one honest node."""

    name: str
    what: str
    run: Callable[[Foe], Awaitable[None]]
    partners: int = 0
    named: str = "member"
    newcomer: bool = False
    seeds: int = 0
    config: tuple[tuple[str, Any], ...] = ()


ATTACKS: dict[str, Attack] = {}


def attack(
    what: str, *, partners: int = 0, named: str = "member", newcomer: bool = False, seeds: int = 0, **config: Any
) -> Callable[[Callable[[Foe], Awaitable[None]]], Callable[[Foe], Awaitable[None]]]:
    """Register a coroutine function that attacks until it is cancelled; ``config`` is the honest nodes'."""

    def register(run: Callable[[Foe], Awaitable[None]]) -> Callable[[Foe], Awaitable[None]]:
        name = run.__name__.replace("_", "-")
        ATTACKS[name] = Attack(name, what, run, partners, named, newcomer, seeds, tuple(config.items()))
        return run

    return register
