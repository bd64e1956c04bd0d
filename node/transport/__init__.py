"""Links to other members: TCP, TLS, handshakes, who is dialled and let in."""
