"""Bytes between two hosts: TCP, TLS, sealed records, shared memory, and where seeds are found."""
