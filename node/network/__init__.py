"""The network thread: effects performed on real streams, and what comes over them told to the peer."""
