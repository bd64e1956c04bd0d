"""Partner selection: rules that choose partners, and back-off after failures."""
