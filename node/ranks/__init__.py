"""One node of several ranks: the first speaks to the swarm, and all make the same change at the same step."""
