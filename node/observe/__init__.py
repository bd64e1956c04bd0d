"""What a node tells people."""
