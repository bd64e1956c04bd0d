"""Decisions and arithmetic of decentralised training: no socket, file, clock, thread or global random generator."""
