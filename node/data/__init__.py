"""Which samples are this node's."""
