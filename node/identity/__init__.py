"""Keys, secrets, invites, and what a node keeps on disk about itself."""
