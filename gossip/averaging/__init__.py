"""The averaging of vectors: the computation of one node, without I/O and without the choice of partners."""
