"""The division of a dataset among the nodes."""
