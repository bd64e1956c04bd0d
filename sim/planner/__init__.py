"""Which settings suit these links: a few are played on them, and the cheapest that does is named."""
