"""The reports of a node: figures, events, logs and the status page."""
