"""The optimizers of all models at once, and the mixing of their moments."""
