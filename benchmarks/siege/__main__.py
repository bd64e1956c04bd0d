"""Attacks on live nodes that train digits, by a member that holds the swarm's secret or by a stranger without it.

    python benchmarks/siege [NAME...] [--siege-s 8] [--json]

Each attack meets a fresh swarm of four nodes with TLS. A run has some seconds of calm, then the attack, then the
recovery. The results are compared with the calm of the same run. Exchanges with honest partners per step must reach
90 % of the calm; if the attacker finishes exchanges as a member may, its fair share is deducted. Accuracy may fall by
one point and memory may grow by 64 MB. Sample counts may grow 1.2 times as fast as by their rule, under which a step
counts for every member in contact. The swarm must recover within 10 s after the attack, and one line of a log must name
the attacker. Prints the table of docs/results/sieges.md.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # set before numpy and torch are imported; nodes are forked from this process
os.environ["OPENBLAS_NUM_THREADS"] = "1"

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import claims
import digits_node
import floods
import pieces
import samples
import stalls
import strangers
import trio
from attack import ATTACKS, Attack
from foe import Foe, Target
from fortress import Fortress
from swarm_lab import Patient
from verdict import BUDGET_MB, Verdict, accuracy, contacts, mixing, names, progressed, resident
from verdict import steps as steps_of

__all__ = ["claims", "floods", "pieces", "samples", "stalls", "strangers"]

NODES = 4
CALM_S, SIEGE_S = 4.0, 8.0
GRACE_S = 0.5  # time for the attacker to open its links
WINDOW_S = 2.0  # window over which the mixing rate is measured during the recovery
WELL_S = 10.0


def besiege(attack: Attack, target: Target) -> None:
    """Run an attack in a process of its own, until it is killed."""

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            await attack.run(Foe(target, nursery))

    trio.run(main)


def play(attack: Attack, siege_s: float) -> Verdict:
    verdict = Verdict(attack)
    with Fortress(dict(attack.config)) as fortress:
        nodes = fortress.raised(NODES)
        time.sleep(1.0 + CALM_S)
        calm = time.monotonic() - CALM_S
        began = time.monotonic()
        before = mixing(nodes, calm, began)
        usual, was = accuracy(nodes, calm, began), resident(nodes, calm, began)
        length = [node.now["along"] for node in nodes]
        besieger = fortress.besieger(lambda: besiege(attack, fortress.target(nodes)))
        time.sleep(GRACE_S)
        newcomer, came = None, time.monotonic()
        if attack.newcomer:
            liars: list[str] = []
            while len(liars) < attack.seeds:
                time.sleep(0.05)
                liars = (fortress.folder / "seeds").read_text().split()
            came = time.monotonic()
            newcomer = fortress.start([*liars, nodes[0].address] if liars else [nodes[1].address, nodes[0].address])
        time.sleep(siege_s)
        if besieger.poll() is not None:
            log = (fortress.folder / "besieger.log").read_text(errors="replace")
            raise RuntimeError(f"The attacker of {attack.name} ended by itself:\n{log[-3000:]}")
        besieger.kill()
        gone = time.monotonic()
        share = (NODES - 1) / (NODES - 1 + attack.partners)
        verdict.mixing = mixing(nodes, began + GRACE_S, gone, newcomer) / max(before, 1e-9) / share
        verdict.memory_mb = max(now - then for now, then in zip(resident(nodes, began, gone), was, strict=True))
        verdict.pause_s = max((row["inside"] for node in nodes for row in node.looks if row["t"] > began), default=0)
        verdict.moved = max(
            abs(node.now["along"] - then) / node.now["norm"] for node, then in zip(nodes, length, strict=True)
        )
        expected = steps_of(nodes, calm, began) / CALM_S * (gone - began)
        if steps_of(nodes, began, gone) < 0.5 * expected:
            verdict.faults.append(f"steps at {100 * steps_of(nodes, began, gone) / expected:.0f} %")
        verdict.progress = progressed(nodes, began + GRACE_S, gone, digits_node.BATCH)
        verdict.usual = contacts(nodes, began + GRACE_S, gone) / NODES
        verdict.well_s = well_after(nodes, gone, before, newcomer)
        end = time.monotonic()
        verdict.accuracy = accuracy(nodes, end - 1.0, end) - usual
        if newcomer is not None:
            judge_newcomer(verdict, newcomer, nodes[0], came, gone, usual)
        stopped = [node.name for node in nodes if node.process.poll() is not None]
        if stopped:
            log = next(node for node in nodes if node.name == stopped[0]).errors.read_text(errors="replace")
            last = [line for line in log.strip().splitlines() if line.strip()][-1:]
            verdict.faults.append(f"{len(stopped)} of {NODES} nodes ended: {' '.join(last)[:160]}")
        if any(node.now["finished"] for node in nodes):
            verdict.faults.append("nodes hold the run to be finished")
        read = (fortress.folder / "besieger.log").read_text(errors="replace")
        if "READ" in read:
            verdict.faults.append("a node spoke to a stranger")
        identities = (fortress.folder / "identities").read_text().split()
        logs = [node.errors for node in fortress.nodes]
        verdict.named = names(logs, identities, attack.named == "address")
        honest = [node.id for node in fortress.nodes if node.event("joined")]
        if wrongly := names(logs, honest, False):
            verdict.faults.append(f"an honest node was named: {wrongly}")
    verdict.judge()
    return verdict


def well_after(nodes: list[Patient], gone: float, before: float, newcomer: Patient | None) -> float | None:
    """Return the seconds until all honest nodes share one run and mix as in the calm, or None if they do not."""
    while time.monotonic() < gone + WELL_S + 1.0:
        time.sleep(0.25)
        now = time.monotonic()
        if now < gone + WINDOW_S:
            continue
        if any(node.process.poll() is not None for node in nodes):
            return None
        rows = [node.now for node in nodes]
        one_run = len({row["run_id"] for row in rows}) == 1 and all(row["ready"] for row in rows)
        enough = all(row["alive"] >= len(nodes) for row in rows)
        if one_run and enough and mixing(nodes, now - WINDOW_S, now, newcomer) >= 0.9 * before:
            return now - gone - WINDOW_S
    return None


def judge_newcomer(
    verdict: Verdict, newcomer: Patient, member: Patient, came: float, gone: float, usual: float
) -> None:
    joined = newcomer.event("joined")
    rows = newcomer.looks
    if joined is None or not rows:
        verdict.newcomer = "never joined"
    elif rows[0]["run_id"] != member.now["run_id"]:
        verdict.newcomer = "began a run of its own"
    elif joined["t"] - came > 10.0:
        verdict.newcomer = f"joined after {joined['t'] - came:.1f} s"
    elif max(row["accuracy"] for row in rows[:4]) < usual - 0.05:
        verdict.newcomer = f"began at {100 * rows[0]['accuracy']:.0f} %"
    if verdict.newcomer:
        verdict.faults.append(f"newcomer {verdict.newcomer}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(ATTACKS)}; all without any")
    parser.add_argument("--siege-s", type=float, default=SIEGE_S, help="how long each attack lasts")
    parser.add_argument("--json", action="store_true", help="one object instead of a table")
    arguments = parser.parse_args()
    chosen = [name for text in arguments.names for name in text.split(",")] or list(ATTACKS)
    unknown = [name for name in chosen if name not in ATTACKS]
    if unknown:
        parser.error(f"unknown attack {unknown[0]}: take some of {', '.join(ATTACKS)}")
    digits_node.warm_up()
    began, verdicts = time.monotonic(), []
    if not arguments.json:
        print(Verdict.HEAD, flush=True)
    for name in chosen:
        verdict = play(ATTACKS[name], arguments.siege_s)
        verdicts.append(verdict)
        if not arguments.json:
            print(verdict.row, flush=True)
    kept = sum(not verdict.faults for verdict in verdicts)
    if arguments.json:
        figures = {
            v.attack.name: {
                "mixing": v.mixing, "accuracy": v.accuracy, "memory_mb": v.memory_mb, "pause_s": v.pause_s,
                "moved": v.moved, "progress": v.progress, "usual": v.usual, "well_s": v.well_s, "named": v.named,
                "faults": v.faults,
            }
            for v in verdicts
        }  # fmt: skip
        print(json.dumps(figures, indent=2))
    else:
        took = time.monotonic() - began
        print(f"\n{kept} of {len(verdicts)} kept; memory budget {BUDGET_MB:.0f} MB; {took:.0f} s.")
    sys.exit(0 if kept == len(verdicts) else 1)


if __name__ == "__main__":
    main()
