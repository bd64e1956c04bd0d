"""What is simulated, as a person writes it down."""

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
