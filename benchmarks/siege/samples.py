"""Attacks by false numbers in signed records and exchanges: runs, progress, rates, and runs declared finished."""

from __future__ import annotations

import itertools
import random

import trio
import trio.lowlevel
from attack import attack
from claims import spread, sybils
from foe import MAX, Foe, Member
from line import Line

from gossip.ids import Claim
from gossip.wire.messages import Gossip, Invite, Joined

RUNS = 66  # two more than a node remembers
HUGE = 2**50
EXTREMES = (5e-324, 2.0**-1074 * 3, 1e-310, float(MAX), 0.0)  # values that the wire format accepts
BEYOND = (float("inf"), float("-inf"), float("nan"), 1e308, -1.0)  # values that the wire format refuses
SILENT_S = 3.0
MIXED_S = 3.0  # time for two exchanges with each node, where a member then has a vote
HUGE_CLAIM = Claim(HUGE, HUGE, HUGE, HUGE)


@attack(
    "66 records of nobody, each of a run of its own with 2^50 samples, and its own of one run after another",
    named="",
)
async def new_runs(foe: Foe) -> None:
    member = await foe.member()
    while True:
        made = [sybils(foe, 1, run_id=random.randbytes(16), samples=HUGE, progress=HUGE)[0] for _ in range(RUNS)]
        await spread(member, made)
        for _ in range(RUNS):
            await member.tell(Gossip((member.update(run_id=random.randbytes(16), samples=HUGE, progress=HUGE),)))
        await trio.sleep(0.5)


@attack("as many linked members as there are nodes, each signing denormals, the largest and infinite numbers by turns")
async def extremes(foe: Foe) -> None:
    members = [await foe.member() for _ in foe.target.nodes]
    values = itertools.cycle([*EXTREMES, *BEYOND])
    while True:
        for member in members:
            value = next(values)
            whole = random.choice([0, 1, MAX])
            changes = {"version": value, "loss": value, "samples": whole, "progress": MAX - whole, "steps": whole}
            if value in BEYOND or value != value:  # sign a copy, as a refused record must not stay
                record = member.sign(member.record, sequence=member.record.sequence + 1, **changes)
            else:
                record = member.update(**changes)
            await member.tell(Gossip((record,)))
        await trio.sleep(0.05)


def claim_more(member: Member) -> None:
    """State huge progress in every message that begins an exchange."""

    async def invited(line: Line, invite: Invite, _body: bytes) -> None:
        await line.send(Joined(invite.session, invite.version, invite.codec, HUGE_CLAIM))

    member.claim, member.handlers[Invite] = HUGE_CLAIM, invited


@attack(
    "says nothing at first, and then states 2^50 samples, with as high a limit, in every exchange",
    partners=1,
    named="",
)
async def sleeper(foe: Foe) -> None:
    member = await foe.member(mixes=True)
    await trio.sleep(SILENT_S)
    claim_more(member)
    await member.offer_for_ever(0.05)


@attack(
    "as many linked members as there are nodes, all of which state 2^50 samples in every exchange",
    partners=4,
    named="",
)
async def liars(foe: Foe) -> None:
    async with trio.open_nursery() as nursery:
        for _ in foe.target.nodes:
            member = await foe.member(mixes=True)
            claim_more(member)
            nursery.start_soon(member.offer_for_ever, 0.2)


@attack(
    "identities that join, finish exchanges, say that the run is finished, and leave, one after another",
    partners=1,
    named="",
)
async def finishers(foe: Foe) -> None:
    while True:
        async with trio.open_nursery() as nursery:  # Members that have left stay linked until all four have left.
            for _ in range(4):
                member = await Foe(foe.target, nursery).member(listen=False, mixes=True)
                nursery.start_soon(member.offer_for_ever, 0.2)
                with trio.move_on_after(MIXED_S):
                    while member.mixed < 2 * len(foe.target.nodes):  # noqa: ASYNC110 - an attack has time
                        await trio.sleep(0.02)
                await member.tell(Gossip((member.update(finished=True),)))
                await trio.sleep(0.5)
                await member.tell(Gossip((member.update(left=True),)))
            nursery.cancel_scope.cancel()
