"""How a newcomer takes the weights of a run, and when one run takes another's."""
