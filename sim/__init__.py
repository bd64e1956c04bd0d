"""Thousands of peers in virtual time."""
