"""Models, data and optimizers; many peers train in one batched call."""
