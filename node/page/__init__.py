"""What people and monitors see of a running node in a browser: its page, its metrics, its health."""
