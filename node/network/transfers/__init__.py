"""The transfer of vectors between the model and the network."""
