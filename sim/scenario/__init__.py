"""Scenarios: the description of a simulation in tables."""

from sim.scenario.scenario import (
    AttackersSpec,
    ChurnSpec,
    Compute,
    Distribution,
    Latency,
    MembershipSpec,
    NetworkCut,
    NetworkSpec,
    Optimizer,
    Partition,
    Rate,
    ReportSpec,
    Scenario,
    Stragglers,
    Task,
)

__all__ = [
    "AttackersSpec",
    "ChurnSpec",
    "Compute",
    "Distribution",
    "Latency",
    "MembershipSpec",
    "NetworkCut",
    "NetworkSpec",
    "Optimizer",
    "Partition",
    "Rate",
    "ReportSpec",
    "Scenario",
    "Stragglers",
    "Task",
]
