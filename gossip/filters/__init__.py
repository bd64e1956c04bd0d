"""What a peer accepts from others, and how much of it: one small class for each filter."""
