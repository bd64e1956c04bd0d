"""The registry of attacks: what each does, and what is expected of the swarm meanwhile."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from foe import Foe


@dataclass(frozen=True)
class Attack:
    """An attack and what is expected of the swarm.

    Attributes:
        name: Its name on the command line.
        what: What it does, for the table.
        run: The coroutine function that attacks.
        partners: Number of the attacker's members that finish exchanges and so receive a fair share of all mixes.
        named: "member" if a log must name one of its identities, "address" if it never states an identity, "" if honest
            nodes cannot tell it from bad luck.
        newcomer: Whether an honest node joins during the attack.
        seeds: Number of the newcomer's seeds that belong to the attacker, next to one honest seed.
        config: Settings of the honest nodes.
        least_s: The least seconds of calm and of siege. Four nodes in groups make few mixes, all at the same times.
    """

    name: str
    what: str
    run: Callable[[Foe], Awaitable[None]]
    partners: int = 0
    named: str = "member"
    newcomer: bool = False
    seeds: int = 0
    config: tuple[tuple[str, Any], ...] = ()
    least_s: float = 0.0


ATTACKS: dict[str, Attack] = {}


def attack(
    what: str,
    *,
    partners: int = 0,
    named: str = "member",
    newcomer: bool = False,
    seeds: int = 0,
    least_s: float = 0.0,
    **config: Any,
) -> Callable[[Callable[[Foe], Awaitable[None]]], Callable[[Foe], Awaitable[None]]]:
    """Register a coroutine function that attacks; its nursery goes on until it is cancelled. See :class:`Attack`."""

    def register(run: Callable[[Foe], Awaitable[None]]) -> Callable[[Foe], Awaitable[None]]:
        name = run.__name__.replace("_", "-")
        ATTACKS[name] = Attack(name, what, run, partners, named, newcomer, seeds, tuple(config.items()), least_s)
        return run

    return register
