"""The fast level of the simulator: an exchange is one event. :mod:`sim.engine` simulates every message instead."""
