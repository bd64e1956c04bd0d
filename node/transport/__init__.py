"""Transport between two hosts: TCP, TLS, sealed records, shared memory, and the look-up of seeds."""
