"""Links between two nodes: how one begins, what it carries and in which order, and all of them together."""
