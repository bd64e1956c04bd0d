"""Scenarios on emulated links: real processes, real TCP, and the simulator's prediction beside what they did."""
