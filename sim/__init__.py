"""The simulator: thousands of real training nodes in virtual time. Use ``from sim import Scenario, simulate``."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sim.report.result import Result, compare
    from sim.scenario.scenario import Scenario
    from sim.simulation import simulate

__all__ = ["Result", "Scenario", "compare", "simulate"]

HOMES = {
    "Result": "sim.report.result",
    "Scenario": "sim.scenario.scenario",
    "compare": "sim.report.result",
    "simulate": "sim.simulation",
}


def __getattr__(name: str) -> Any:
    """Import a public name on first use (PEP 562), so that the command line starts without importing torch."""
    if name not in HOMES:
        raise AttributeError(f"module 'sim' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(HOMES[name]), name)
