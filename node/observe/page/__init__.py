"""The web page of a running node: its view for people, its metrics, its health."""
