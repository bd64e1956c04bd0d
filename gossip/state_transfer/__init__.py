"""State transfer: a newcomer fetches the weights of a run, and one run merges into another."""
