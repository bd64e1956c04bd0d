"""Count the lying partners of eight honest nodes, in a swarm with four members that do all to be their partners.

The liars name only themselves, accuse honest members of being dead, and ask each honest node for an exchange 30
times a second; they exchange the vectors that they receive. Newcomers come after a quarter of the time: through an
honest node, through a liar, and through both. Prints the share of finished exchanges that were with liars.
"""

from __future__ import annotations

import random
import time

import trio
from foe import Foe, Member, Target
from fortress import Fortress
from swarm_lab import Patient

from gossip.membership.accusations import accusation
from gossip.wire.messages import Gossip

HONEST, LIARS = 8, 4
ASK_EVERY_S = 1 / 30
ACCUSE_EVERY_S = 1.0
JOIN_S = 60.0


def lie(target: Target) -> None:
    """Be the liars."""

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            for _ in range(LIARS):
                foe = Foe(target, nursery)
                member = await foe.member(mixes=True)
                foe.seed(member)
                nursery.start_soon(member.offer_for_ever, ASK_EVERY_S)
                nursery.start_soon(accuse, member)
            await trio.sleep_forever()

    trio.run(main)


async def accuse(member: Member) -> None:
    """Say of a random honest member that it is dead, again and again."""
    while True:
        await trio.sleep(ACCUSE_EVERY_S)
        records = [record for peer, record in member.known.items() if peer != member.record.id]
        if records:
            victim = random.choice(records)
            hint = accusation(victim.id, victim.incarnation, True, member.record.id, member.identity.sign)
            await member.tell(Gossip((hint,)))


def share(nodes: list[Patient], liars: set[str], after: float) -> tuple[float, float]:
    """Return the share of exchanges with liars, and the exchanges of a node, after this time."""
    partners = [partner for node in nodes for row in node.looks for at, partner in row["mixes"] if at > after]
    return sum(partner in liars for partner in partners) / max(1, len(partners)), len(partners) / len(nodes)


def play(seconds: float) -> None:
    """Let the liars lie for so long, and print the table."""
    with Fortress({}) as fortress:
        honest = fortress.raise_nodes(HONEST)
        calm_from = time.monotonic()
        time.sleep(seconds / 4)
        calm = share(honest, set(), calm_from)[1] / (seconds / 4)
        target = fortress.target(honest)
        began = time.monotonic()
        fortress.besieger(lambda: lie(target))
        fortress.until(lambda: all(node.now["alive"] >= HONEST + LIARS for node in honest), JOIN_S, "the liars")
        time.sleep(seconds / 4)
        liar_seed = target.seeds.read_text().split()[0]
        seeds = {"an honest seed": [honest[0].address], "a liar": [liar_seed], "both": [liar_seed, honest[1].address]}
        newcomers = {name: fortress.start(list(addresses)) for name, addresses in seeds.items()}
        time.sleep(3 * seconds / 4)
        liars = set(target.identities.read_text().split())
        print("| node | partners that lie | times their share of members | exchanges of a node, a second |")
        print("|---|---|---|---|")
        print(f"| calm | 0 | 0 | {calm:.1f} |")
        members = LIARS / (HONEST + LIARS)
        rows = {"old": honest} | {f"new, through {name}": [node] for name, node in newcomers.items()}
        for name, nodes in rows.items():
            lying, exchanges = share(nodes, liars, began)
            if not exchanges:  # Liars give it no weights, and it has not begun a run of its own yet.
                print(f"| {name} | - | - | 0 |", flush=True)
                continue
            lasted = time.monotonic() - (began if name == "old" else min(node.rows[0]["t"] for node in nodes))
            print(f"| {name} | {lying:.0%} | {lying / members:.2f} | {exchanges / lasted:.1f} |", flush=True)
