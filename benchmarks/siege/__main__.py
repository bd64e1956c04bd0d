"""Attacks on live nodes that train digits, by a member that holds the swarm's secret or by a stranger without it.

    python benchmarks/siege [NAME...] [--siege-s 8] [--json]
    python benchmarks/siege --eclipse 60      how many partners lie (eclipse.py)
    python benchmarks/siege --joins 40        how many newcomers take noise (joins.py)

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
import eclipse
import floods
import groups
import joins
import mixings
import pieces
import samples
import stalls
import strangers
import trio
from attack import ATTACKS, Attack
from foe import Foe, Target
from fortress import Fortress
from swarm_lab import Patient, taken
from verdict import (
    BUDGET_MB,
    JOINS_S,
    WELL_S,
    Verdict,
    accuracy,
    contacts,
    mixing,
    mixing_share,
    names,
    progressed,
    resident,
)

__all__ = ["claims", "floods", "groups", "mixings", "pieces", "samples", "stalls", "strangers"]

NODES = 4
CALM_S, SIEGE_S = 4.0, 8.0
GRACE_S = 0.5  # time for the attacker to open its links
WINDOW_S = 2.0  # window over which the mixing rate is measured during the recovery


def besiege(attack: Attack, target: Target) -> None:
    """Run an attack in a process of its own, until it is killed."""

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            await attack.run(Foe(target, nursery))
            await trio.sleep_forever()

    trio.run(main)


def play(attack: Attack, siege_s: float) -> Verdict:
    """Play one attack against a fresh swarm. Times are readings of the monotonic clock, like those in the diaries."""
    verdict, calm_s, siege_s = Verdict(attack), max(CALM_S, attack.least_s), max(siege_s, attack.least_s)
    with Fortress(dict(attack.config)) as fortress:
        nodes = fortress.raise_nodes(NODES)
        time.sleep(1.0 + calm_s)
        calm_began, calm_ended = time.monotonic() - calm_s, time.monotonic()
        calm_mixing = mixing(nodes, calm_began, calm_ended)
        calm_accuracy = accuracy(nodes, calm_began, calm_ended)
        calm_memory_mb = resident(nodes, calm_began, calm_ended)
        calm_along = [node.now["along"] for node in nodes]
        besieger = fortress.besieger(lambda: besiege(attack, fortress.target(nodes)))
        time.sleep(GRACE_S)
        newcomer, newcomer_began = None, time.monotonic()
        if attack.newcomer:
            lying_seeds: list[str] = []
            while len(lying_seeds) < attack.seeds:
                time.sleep(0.05)
                lying_seeds = (fortress.folder / "seeds").read_text().split()
            newcomer_began = time.monotonic()
            first_seeds = lying_seeds or [nodes[1].address]
            newcomer = fortress.start([*first_seeds, nodes[0].address])
        time.sleep(siege_s)
        if besieger.poll() is not None:
            log = (fortress.folder / "besieger.log").read_text(errors="replace")
            raise RuntimeError(f"The attacker of {attack.name} ended by itself:\n{log[-3000:]}")
        besieger.kill()
        began, ended = calm_ended, time.monotonic()  # The beginning and the end of the attack.
        share = (NODES - 1) / (NODES - 1 + attack.partners)  # What a fair attacker leaves of the honest mixes.
        figures = mixing_share(nodes, (calm_began, calm_ended), (began + GRACE_S, ended), newcomer)
        verdict.mixing, verdict.mixing_error = (figure / share for figure in figures)
        memory_mb = resident(nodes, began, ended)
        verdict.memory_mb = max(now - then for now, then in zip(memory_mb, calm_memory_mb, strict=True))
        verdict.pause_s = max((row["inside"] for node in nodes for row in node.looks if row["t"] > began), default=0)
        verdict.moved = max(
            abs(node.now["along"] - then) / node.now["norm"] for node, then in zip(nodes, calm_along, strict=True)
        )
        expected = taken(nodes, calm_began, began) / calm_s * (ended - began)
        verdict.steps = taken(nodes, began, ended) / expected
        if verdict.steps < 0.5:
            verdict.faults.append(f"steps at {100 * verdict.steps:.0f} %")
        verdict.progress = progressed(nodes, began + GRACE_S, ended, digits_node.BATCH)
        verdict.usual = contacts(nodes, began + GRACE_S, ended) / NODES
        verdict.well_s = well_after(nodes, ended, calm_mixing, newcomer)
        now = time.monotonic()
        verdict.accuracy = accuracy(nodes, now - 1.0, now) - calm_accuracy
        if newcomer is not None:
            judge_newcomer(verdict, newcomer, nodes[0], newcomer_began, calm_accuracy)
        judge_logs(verdict, fortress, nodes)
    verdict.judge()
    return verdict


def judge_logs(verdict: Verdict, fortress: Fortress, nodes: list[Patient]) -> None:
    """Find faults in the nodes' ends and logs, and the line that names the attacker."""
    stopped = [node for node in nodes if node.process.poll() is not None]
    if stopped:
        log = stopped[0].errors.read_text(errors="replace")
        last_line = [line for line in log.strip().splitlines() if line.strip()][-1:]
        verdict.faults.append(f"{len(stopped)} of {NODES} nodes ended: {' '.join(last_line)[:160]}")
    if any(node.now["finished"] for node in nodes):
        verdict.faults.append("nodes hold the run to be finished")
    if "READ" in (fortress.folder / "besieger.log").read_text(errors="replace"):  # The attack other-secret prints it.
        verdict.faults.append("a node spoke to a stranger")
    identities = (fortress.folder / "identities").read_text().split()
    logs = [node.errors for node in fortress.patients]
    verdict.named = names(logs, identities, verdict.attack.named == "address")
    honest = [node.id for node in fortress.patients if node.event("joined")]
    if wrongly := names(logs, honest, False):
        verdict.faults.append(f"an honest node was named: {wrongly}")


def well_after(nodes: list[Patient], ended: float, calm_mixing: float, newcomer: Patient | None) -> float | None:
    """Return the seconds until all honest nodes share one run and mix as in the calm, or None if they do not."""
    while time.monotonic() < ended + WELL_S + 1.0:
        time.sleep(0.25)
        now = time.monotonic()
        if now < ended + WINDOW_S:
            continue
        if any(node.process.poll() is not None for node in nodes):
            return None
        rows = [node.now for node in nodes]
        share_run = len({row["run_id"] for row in rows}) == 1 and all(row["ready"] for row in rows)
        see_all = all(row["alive"] >= len(nodes) for row in rows)
        if share_run and see_all and mixing(nodes, now - WINDOW_S, now, newcomer) >= 0.9 * calm_mixing:
            return now - ended - WINDOW_S
    return None


def judge_newcomer(verdict: Verdict, newcomer: Patient, member: Patient, began: float, calm_accuracy: float) -> None:
    joined = newcomer.event("joined")
    rows = newcomer.looks
    if joined is None or not rows:
        verdict.newcomer = "never joined"
    elif rows[0]["run_id"] != member.now["run_id"]:
        verdict.newcomer = "began a run of its own"
    elif joined["t"] - began > JOINS_S:
        verdict.newcomer = f"joined after {joined['t'] - began:.1f} s"
    elif max(row["accuracy"] for row in rows[:4]) < calm_accuracy - 0.05:
        verdict.newcomer = f"began at {100 * rows[0]['accuracy']:.0f} %"
    if verdict.newcomer:
        verdict.faults.append(f"newcomer {verdict.newcomer}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(ATTACKS)}; all without any")
    parser.add_argument(
        "--siege-s", type=float, default=SIEGE_S, help="how long each attack lasts; on groups 20 s at least"
    )
    parser.add_argument("--json", action="store_true", help="one object instead of a table")
    parser.add_argument("--eclipse", type=float, metavar="SECONDS", help="count the partners that lie, for so long")
    parser.add_argument("--joins", type=int, metavar="COUNT", help="let so many newcomers join among liars")
    arguments = parser.parse_args()
    chosen = [name for text in arguments.names for name in text.split(",")] or list(ATTACKS)
    unknown = [name for name in chosen if name not in ATTACKS]
    if unknown:
        parser.error(f"unknown attack {unknown[0]}: take some of {', '.join(ATTACKS)}")
    digits_node.warm_up()
    if arguments.eclipse or arguments.joins:
        eclipse.play(arguments.eclipse) if arguments.eclipse else joins.play(arguments.joins)
        return
    started, verdicts = time.monotonic(), []
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
                "mixing": v.mixing, "mixing_error": v.mixing_error, "steps": v.steps, "accuracy": v.accuracy,
                "memory_mb": v.memory_mb,
                "pause_s": v.pause_s, "moved": v.moved, "progress": v.progress, "usual": v.usual, "well_s": v.well_s,
                "named": v.named, "faults": v.faults,
            }
            for v in verdicts
        }  # fmt: skip
        print(json.dumps(figures, indent=2))
    else:
        took = time.monotonic() - started
        print(f"\n{kept} of {len(verdicts)} kept; memory budget {BUDGET_MB:.0f} MB; {took:.0f} s.")
    sys.exit(0 if kept == len(verdicts) else 1)


if __name__ == "__main__":
    main()
