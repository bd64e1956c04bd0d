"""One node of several ranks: rank 0 talks to the swarm, and all ranks make the same change at the same step."""
