"""Replays of scenarios: real processes and real TCP on emulated links, next to the simulator's prediction."""
