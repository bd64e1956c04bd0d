"""Models, data and optimizers, many peers in one batch."""
