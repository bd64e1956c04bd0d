"""Nodes for the training loops of other frameworks."""
