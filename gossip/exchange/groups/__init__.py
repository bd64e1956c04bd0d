"""Exchanges of more than two: who takes part, and what one is."""
