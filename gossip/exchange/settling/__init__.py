"""How members that settle come to the same weights: exact pairs, and when they join."""
