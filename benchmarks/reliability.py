"""Reliability scenarios with real processes: nodes die, stop, are partitioned, join and leave.

``make reliability`` (or ``python benchmarks/reliability.py [NAME...] [--json]``) runs them on this machine, over
loopback or network namespaces, in two to three minutes, and prints the figures of docs/results/chaos.md. Each scenario
is a function that returns figures; its docstring's first line is printed. tests/reliability checks the promised values.
"""

from __future__ import annotations

import argparse
import itertools
import json
import signal
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from swarm_lab import Cut, Lab, Patient, between, namespaces_missing

from gossip.ids import PeerId
from node.data.division import Sharers
from node.data.sampler import Samplers

Figures = dict[str, Any]


def killed_seed() -> Figures:
    """kill -9 of the node that everybody began from; then a newcomer joins through another."""
    with Lab() as lab:
        seed, *rest = lab.swarm(4)
        failed = sum_of(rest, "failed")
        at = seed.signal(signal.SIGKILL)
        noticed = lab.until(lambda: all(m.now["states"].get(seed.id) != "alive" for m in rest), 20, "a dead seed")
        newcomer = lab.start(seeds=[rest[0]])
        lab.joined([newcomer])
        whole = [*rest, newcomer]
        lab.until(lambda: all(m.now.get("alive") == 4 and m.now["done"] > 2 for m in whole), 20, "the newcomer to mix")
        time.sleep(2)
        mixed = {m.name: exchanges_after(m, at + 1.0) for m in rest}
        return {
            "no longer sampled after (s)": noticed - at,
            "exchanges lost by the others": sum_of(rest, "failed") - failed,
            "exchanges of each survivor since": min(mixed.values()),
            "newcomer trains after (s)": newcomer.joined["seconds"],
            "newcomer exchanges": newcomer.now["done"],
            "newcomer began from a trained swarm": newcomer.joined["ledger"] > 0,
            **pauses(rest, at),
        }


def killed_half() -> Figures:
    """kill -9 of 4 of 8 nodes at one moment, the seed among them."""
    with Lab(step_ms=20) as lab:
        members = lab.swarm(8)
        dead, rest = members[:4], members[4:]
        failed = sum_of(rest, "failed")
        at = max([victim.signal(signal.SIGKILL) for victim in dead])
        noticed = lab.until(lambda: all(m.now["alive"] == 4 for m in rest), 30, "the survivors to know")
        time.sleep(3)
        return {
            "no longer sampled after (s)": noticed - at,
            "exchanges lost by the others": sum_of(rest, "failed") - failed,
            "longest without an exchange (s)": longest_without(rest, at),
            "exchanges of each survivor in 3 s after": min(exchanges_after(m, noticed) for m in rest),
            **pauses(rest, at),
        }


def stopped(seconds: float = 30.0) -> Figures:
    """SIGSTOP of one node of 4 for 30 s, then SIGCONT."""
    with Lab() as lab:
        victim, *rest = lab.swarm(4)
        failed = sum_of(rest, "failed")
        at = victim.signal(signal.SIGSTOP)
        noticed = lab.until(lambda: all(m.now["states"][victim.id] != "alive" for m in rest), 30, "a missing node")
        time.sleep(max(0.0, at + seconds - time.monotonic()))
        lost = sum_of(rest, "failed") - failed
        done = victim.now["done"]
        back = victim.signal(signal.SIGCONT)
        lab.until(lambda: victim.now["done"] > done + 1, 60, "the stopped node to mix again")
        lab.until(lambda: all(m.now["alive"] == 4 for m in lab.patients), 60, "everybody to see everybody")
        time.sleep(2)
        return {
            "no longer sampled after (s)": noticed - at,
            "exchanges lost by the others": lost,
            "exchanges of each survivor meanwhile": min(exchanges_after(m, at, back) for m in rest),
            "longest without an exchange (s)": longest_without(rest, at),
            "mixes again after (s)": victim.first(back, lambda row: row["done"] > done),
            "alive to all again after (s)": max(
                m.first(back, lambda row: row["alive"] == 4) or 0.0 for m in lab.patients
            ),
            **pauses(rest, at),
        }


def partition(seconds: float = 20.0) -> Figures:
    """Two halves of two nodes each, cut off from each other for 20 s and healed. TLS, two network namespaces."""
    with Cut() as cable, Lab() as lab:
        lab.encrypt()
        options: dict[str, Any] = {"config": {"mix_every_steps": 4}}
        (left, here), (right, there) = cable.addresses.items()
        first = lab.start(namespace=left, listen=f"{here}:7700", target=1.0, **options)
        lab.joined([first])
        members = [
            first,
            lab.start(namespace=left, listen=f"{here}:7701", target=1.0, seeds=[first], **options),
            lab.start(namespace=right, listen=f"{there}:7700", target=-1.0, seeds=[first], **options),
            lab.start(namespace=right, listen=f"{there}:7701", target=-1.0, seeds=[first], **options),
        ]
        lab.joined(members)
        lab.until(lambda: all(m.now.get("alive") == 4 and m.now["done"] > 2 for m in members), 30, "a whole swarm")
        time.sleep(3)
        together = gap(members)
        at = cable.cut()
        time.sleep(seconds)
        apart = gap(members)
        halves = [m.now["alive"] for m in members]
        healed = cable.heal()
        whole = lab.until(lambda: all(m.now["alive"] == 4 for m in members), 90, "both halves to find each other")
        near = lab.until(lambda: gap(members) < together + 0.1 * (apart - together), 90, "the halves to agree")
        time.sleep(2)
        return {
            "distance of the halves before": together,
            "cut off": apart,
            "members alive, cut off": halves,
            "steps of each node, cut off": min(steps_at(m, healed) - steps_at(m, at) for m in members),
            "exchanges of each node, cut off": min(exchanges_after(m, at + 5, healed) for m in members),
            "longest without an exchange (s)": longest_without(members, at, healed),
            "views whole after healing (s)": whole - healed,
            "distance back within a tenth (s)": near - healed,
            "rejoined without taking weights over": not any(lab.notices(m, "Met a run") for m in members),
            **pauses(members, at),
        }  # fmt: skip


def grow_and_shrink() -> Figures:
    """2 -> 8 -> 3 nodes, nothing restarted: five of the eight leave.

    Mixes are plain means, and there is no filter: a side that shortens a difference moves less than its partner, and
    the ledger is no longer exact.
    """
    with Lab(step_ms=20, config={"filter": "none", "outer_momentum": 0.0, "outer_rate": 1.0}) as lab:
        survivors = lab.swarm(2)
        at = time.monotonic()
        newcomers = [lab.start(seeds=[survivors[k % 2]]) for k in range(6)]
        lab.joined(newcomers)
        everybody = [*survivors, *newcomers]
        full = lab.until(lambda: all(m.now.get("alive") == 8 and m.now["done"] > 2 for m in everybody), 60, "eight")
        time.sleep(5)
        *leavers, stays = newcomers
        lab.end(leavers)
        survivors.append(stays)
        lab.until(lambda: all(m.now["alive"] == 3 for m in survivors), 30, "three")
        time.sleep(5)
        lab.end(survivors)
        ends = [m.event("left") for m in everybody]
        gone = max(m.event("left")["t"] for m in leavers)  # type: ignore[index]
        steps = sum(end["steps"] for end in ends if end)
        credited = sum(end["ledger"] - end["began"] for end in ends if end)
        return {
            "eight mix after (s)": full - at,
            "of this a newcomer waits for weights at most (s)": max(m.joined["seconds"] for m in newcomers),
            "three know that they are three after (s)": max(
                m.first(gone, lambda row: row["alive"] == 3) or 0.0 for m in survivors
            ),
            "steps of all": steps,
            "steps in the ledger": credited,
            "steps of each survivor": [m.event("left")["steps"] for m in survivors],  # type: ignore[index]
            "counted by each survivor": [m.now["counted"] for m in survivors],
            "weights taken over by a survivor": sum(lab.notices(m, "Met a run") for m in survivors),
            "exchanges lost by the survivors": sum_of(survivors, "failed"),
            "longest leaving (s)": max(end["seconds"] for end in ends if end),
            **pauses(survivors, at),
        }


def dead_share_covered(number: signal.Signals) -> Figures:
    """Measure how soon the others train on the share of data of a dead (SIGKILL) or stopped (SIGSTOP) node of 4."""
    length = 160_000  # A pass over a quarter takes 50 s at 8 samples and 10 ms a step, longer than the run.
    with Lab(samples=length) as lab:
        victim, *rest = lab.swarm(4)
        ids = sorted(PeerId(bytes.fromhex(m.id)) for m in lab.patients)
        mine = PeerId(bytes.fromhex(victim.id))
        sharers = Sharers(lambda: mine, lambda: ids, lambda: 0, lambda: 0, lambda: 0)
        share = set(Samplers(sharers).make(length, shuffle=False))
        at = victim.signal(number)
        time.sleep(12)
        done = {index for row in victim.looks for index in row["given"]}
        taken = [m.first(at, lambda row: any(i in share for i in row["given"])) for m in rest]
        whole = [m.first(at, lambda row: row["alive"] == 3) for m in rest]
        return {
            "samples of its share": len(share),
            "of these not trained before": len(share - done),
            "every other node trains on some of them after (s)": max(taken, key=lambda t: t or 99.0),
            "its share is divided among the others after (s)": max(whole, key=lambda t: t or 99.0),
            **pauses(rest, at),
        }


def killed_share() -> Figures:
    """A dead node's share of the data is trained by the others: kill -9."""
    return dead_share_covered(signal.SIGKILL)


def stopped_share() -> Figures:
    """The same for a node that stopped without a word: SIGSTOP."""
    return dead_share_covered(signal.SIGSTOP)


def known(member: Patient) -> int:
    """Return how many members a node considers alive, including itself.

    Two nodes that cannot be dialled never connect, and know each other only through others.
    """
    return list(member.now.get("states", {}).values()).count("alive")


def dials_out() -> Figures:
    """A node that listens nowhere, and one whose advertised address nobody reaches, in a network of their own."""
    with Cut() as cable, Lab() as lab:
        lab.encrypt()
        (left, here), (right, there) = cable.addresses.items()
        first = lab.start(namespace=left, listen=f"{here}:7700")
        lab.joined([first])
        second = lab.start(namespace=left, listen=f"{here}:7701", seeds=[first])
        silent = lab.start(namespace=right, listen="none", seeds=[first])
        wrong = lab.start(namespace=right, listen=f"{there}:7700", advertise=f"{there}:9", seeds=[first])
        lab.joined(lab.patients)
        lab.until(lambda: all(known(m) == 4 and m.now["done"] > 2 for m in lab.patients), 30, "all four")
        at = time.monotonic()
        time.sleep(15)
        first.signal(signal.SIGKILL)  # their first home
        rest = [second, silent, wrong]
        lab.until(lambda: all(known(m) == 3 for m in rest), 30, "three")
        time.sleep(15)
        return {
            "exchanges of the node that listens nowhere": exchanges_after(silent, at),
            "exchanges of the node nobody reaches": exchanges_after(wrong, at),
            "it was told so": lab.notices(wrong, "takes part by dialling out") == 1,
            "still alive to the other after 15 s without their seed": [known(m) for m in rest],
            "exchanges lost": sum_of(rest, "failed"),
            **pauses(rest, at),
        }


SCENARIOS: dict[str, Callable[[], Figures]] = {
    function.__name__.replace("_", "-"): function
    for function in (
        killed_seed, killed_half, stopped, partition, grow_and_shrink, killed_share, stopped_share, dials_out
    )
}  # fmt: skip
NEED_NAMESPACES = ("partition", "dials-out")


def sum_of(members: Iterable[Patient], figure: str) -> int:
    return sum(member.now[figure] for member in members)


def steps_at(member: Patient, when: float) -> int:
    return max((row["steps"] for row in member.looks if row["t"] <= when), default=0)


def exchanges_after(member: Patient, after: float, before: float = float("inf")) -> int:
    counts = [row["done"] for row in between(member, after, before)]
    return counts[-1] - counts[0] if counts else 0


def longest_without(members: Iterable[Patient], after: float, before: float = float("inf")) -> float:
    """Return the longest time in which one of these nodes finished no exchange, in seconds."""
    longest = 0.0
    for member in members:
        rows = between(member, after, before)
        since = rows[0]["t"] if rows else after
        for earlier, later in itertools.pairwise(rows):
            if later["done"] > earlier["done"]:
                since = later["t"]
            longest = max(longest, later["t"] - since)
    return longest


def gap(members: list[Patient]) -> float:
    """Return the distance between the mean of the first two nodes' weights and that of the others."""
    values = [member.now["w"] for member in members]
    return float(abs(sum(values[:2]) / 2 - sum(values[2:]) / 2))


def pauses(members: list[Patient], after: float) -> Figures:
    """Return the longest step() and the longest pause of any of these nodes after a time."""
    steps_s, pauses_s = zip(*(member.pauses(after) for member in members), strict=True)
    return {"longest step() (s)": max(steps_s), "longest pause (s)": max(pauses_s)}


def show(scenario: str, figures: Figures) -> str:
    def text(value: Any) -> str:
        return f"{value:.3g}" if isinstance(value, float) and value < 1000 else str(value)

    lines = [f"  {name}: {text(value)}" for name, value in figures.items()]
    return "\n".join([f"{scenario}: {(SCENARIOS[scenario].__doc__ or '').splitlines()[0]}", *lines])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(SCENARIOS)}; all without any")
    parser.add_argument("--json", action="store_true", help="one object instead of text")
    arguments = parser.parse_args()
    unknown = [name for name in arguments.names if name not in SCENARIOS]
    if unknown:
        parser.error(f"unknown scenario {unknown[0]}: take some of {', '.join(SCENARIOS)}")
    missing = namespaces_missing()
    results: dict[str, Figures] = {}
    for name in arguments.names or SCENARIOS:
        if missing and name in NEED_NAMESPACES:
            print(f"{name}: skipped, {missing}.", file=sys.stderr)
            continue
        results[name] = SCENARIOS[name]()
        if not arguments.json:
            print(show(name, results[name]), flush=True)
    if arguments.json:
        print(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
