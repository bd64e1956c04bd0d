"""Discovery: the way into the swarm, and links to members that nobody can dial."""
