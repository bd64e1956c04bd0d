"""The layout of vectors, and the arithmetic that combines them."""
