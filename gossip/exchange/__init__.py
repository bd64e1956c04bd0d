"""Exchanges of pairs, pushes and groups: whether they happen."""
