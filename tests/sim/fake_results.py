"""Fake results with plausible curves, without a simulation."""

import math

import numpy as np

from sim.report.result import COLUMNS, Result
from sim.scenario.fidelity import fidelity_of
from sim.scenario.scenario import Scenario

ROWS = 41


def fake_result(scenario: Scenario | None = None, *, mix_every_steps: int = 8, **changes) -> Result:
    """Return the result of a swarm that learns the digits; mixing more rarely keeps its members further apart."""
    made = scenario or Scenario.from_mapping(
        {"name": "fake", "seed": 7, "peers": 1000, "duration_s": 3600.0, "gossip": {"mix_every_steps": mix_every_steps}}
        | changes
    )
    rng = np.random.default_rng(made.seed)
    rarely = made.gossip.mix_every_steps or 8
    averaging = made.task.dataset == "averaging"
    history = []
    for number in range(ROWS):
        share = number / (ROWS - 1)
        spread = 0.25 * math.exp(-3 * share) + 0.004 * rarely * (1 - math.exp(-8 * share))
        loss = 0.18 + 0.012 * rarely + 2.1 * math.exp(-7 * share) + rng.normal(0, 0.005)
        accuracy = max(0.1, 0.955 - 0.0045 * rarely - 0.85 * math.exp(-7 * share) + rng.normal(0, 0.003))
        alive = made.peers if made.churn is None else made.peers * (0.7 + 0.3 * math.exp(-4 * share)) // 1
        row = dict.fromkeys(COLUMNS, math.nan) | {
            "virtual_s": (made.duration_s or 600.0) * share, "alive": alive,
            "ready": alive * (0.97 if made.churn else 1) // 1,
            "steps": 36_000 * share, "mixes": 36_000 * share / rarely,
            "loss_mean": loss, "loss_min": loss * (1 - spread), "loss_max": loss * (1 + 2 * spread),
            "loss_average_model": loss * (0.93 if number else 1),
            "consensus_distance": 0.2 * math.sqrt(rarely) * (1 - math.exp(-9 * share)) * (1 + rng.normal(0, 0.02)),
            "exchanges_done": 4e5 * share, "exchanges_failed": 3e3 * share, "bytes_sent": 8e9 * share / rarely * 8,
            "exchange_s_median": 0.4, "exchange_s_p95": 0.9, "events": 1e7 * share,
        }  # fmt: skip
        if not averaging:
            row |= {
                "accuracy_mean": accuracy, "accuracy_min": accuracy * (1 - spread),
                "accuracy_max": min(1.0, accuracy * (1 + spread / 3)),
                "accuracy_average_model": min(1.0, accuracy + 0.012),
            }  # fmt: skip
        history.append(row)
    last, fidelity = history[-1], fidelity_of(made)
    summary = {
        "name": made.name, "seed": made.seed, "peers": made.peers, "virtual_s": last["virtual_s"], "events": 10_000_000,
        "node_updates": 812_345, "steps": 36_000_000, "loss": last["loss_mean"],
        "accuracy": {key: last[f"accuracy_{key}"] for key in ("mean", "min", "max", "average_model")},
        "metric": {key: last[f"metric_{key}"] for key in ("mean", "min", "max", "average_model")},
        "consensus_distance": last["consensus_distance"], "exchanges_done": 400_000, "exchanges_failed": 3_000,
        "no_exchange": "", "bytes_sent": int(last["bytes_sent"]), "digest": "ab" * 32, "done": 1.0, "wall_s": 61.2,
        "cpu_s": 60.9, "setup_s": 1.0, "updates_per_cpu_s": 13_339.0, "peak_rss_mb": 812.3,
        "fidelity": fidelity.level, "fidelity_reason": fidelity.reason,
    }  # fmt: skip
    exchange_s = rng.lognormal(math.log(0.35), 0.5, 4000) + 0.05
    return Result(made, history, summary, exchange_s)
