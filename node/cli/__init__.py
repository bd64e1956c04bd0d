"""The commands that start nodes."""
