"""A swarm played exchange by exchange: the fast level of the simulator, beside the whole one in sim.engine."""
