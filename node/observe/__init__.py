"""What a node reports: figures, events, logs and the status page."""
