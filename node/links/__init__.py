"""Links between two nodes: the handshake, framing, send order, and the pool of all links."""
