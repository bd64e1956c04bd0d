"""Helpers for tests of sealed links: two ends' shares, a key, and a plain implementation of keys and records."""

import hmac

from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

DIALLER, ACCEPTOR = bytes(range(32)), bytes(range(32, 64))  # Shares, as in docs/protocol.md.
ENDS = DIALLER + bytes(range(64, 80)), ACCEPTOR + bytes(range(80, 96))  # Each is a share and an id.
KEY = b"k" * 32


def slow_keys(dialler, acceptor):
    """RFC 5869 by hand."""
    seed = hmac.digest(bytes(32), dialler + acceptor, "sha256")
    first = hmac.digest(seed, b"gossip sealed 1" + b"\1", "sha256")
    return first, hmac.digest(seed, first + b"gossip sealed 1" + b"\2", "sha256")


def slow_next(key):
    return hmac.digest(key, b"gossip sealed next" + b"\1", "sha256")


def slow_record(key, number, data):
    """One record, by the cipher's parts."""
    prefix = (len(data) + 16).to_bytes(4, "big")
    cipher = Cipher(algorithms.AES(key), modes.GCM(number.to_bytes(12, "big"))).encryptor()
    cipher.authenticate_additional_data(prefix)
    return prefix + cipher.update(data) + cipher.finalize() + cipher.tag
