"""Filters: what a peer accepts of others' vectors, and how much of it. Each filter is one small class."""
