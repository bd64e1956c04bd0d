"""Exchanges of pairs, pushes and groups: the decisions whether they begin and whether they commit."""
