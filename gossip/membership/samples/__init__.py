"""How many samples are behind a run: what members state, what is believed of it, what they make between two records."""
