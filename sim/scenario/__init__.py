"""Scenarios: the description of a simulation in tables; :class:`sim.scenario.scenario.Scenario` is the whole."""
