"""Keys, secrets, invites, and a node's state on disk."""
