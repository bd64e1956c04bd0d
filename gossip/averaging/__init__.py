"""What becomes of vectors: one node's averaging, without I/O and without a word about whom it is with."""
