"""The network thread: it performs effects on real streams and passes received data to the peer."""
