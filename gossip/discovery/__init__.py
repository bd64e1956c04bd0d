"""Discovery: the way into the swarm, and links between undialable members."""
