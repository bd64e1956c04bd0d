"""The state of a model's optimizers, and the moments in it that members mix."""
