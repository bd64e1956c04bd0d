"""Vectors on their way between the model and the network."""
