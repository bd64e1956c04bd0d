"""The costs of exchanges on this machine, measured once in a process."""

import functools
import os
import time

import numpy as np

from gossip.codecs import Machine, get_codec

ELEMENTS = 1 << 16  # Of a vector in cache: codecs take some 0.1 ms in C for its 256 KiB, and 1 ms in numpy.
COPIED_ELEMENTS = 1 << 22  # Of a vector too long for the caches of a core: a copy of its 16 MiB takes some 2 ms.
ROUNDS = 3  # The fastest round counts: other processes can only slow one down.
CODECS = ("fp32", "bf16", "int8")  # The codecs that "auto" chooses among.


@functools.cache
def measure_machine(implementation: str) -> Machine:
    """Return the CPU costs of codecs and of copies on this machine.

    ``implementation`` is :func:`gossip.kernel.implementation`. It only keys the cache, because the costs depend on it.
    """
    values = np.random.default_rng(0).standard_normal(ELEMENTS, np.float32)
    gigabytes = 1e-9 * values.nbytes
    seconds_per_gb = {name: min(coding_s(name, values) for _ in range(ROUNDS)) / gigabytes for name in CODECS}
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    # The cost of a codec is what it takes beyond sending floats as they are.
    beyond = {name: max(0.0, seconds_per_gb[name] - seconds_per_gb["fp32"]) for name in CODECS}
    return Machine(beyond, max(cores, 1), copy_s_per_gb())


def copy_s_per_gb() -> float:
    """Return the CPU seconds that this thread takes to copy a GB in memory."""
    source, copy = np.ones(COPIED_ELEMENTS, np.float32), np.ones(COPIED_ELEMENTS, np.float32)

    def copy_s() -> float:
        began = time.thread_time()
        copy[:] = source
        return time.thread_time() - began

    return min(copy_s() for _ in range(ROUNDS)) / (1e-9 * copy.nbytes)


def coding_s(name: str, values: np.ndarray) -> float:
    """Return the CPU seconds that this thread takes to encode a vector and to subtract the partner's."""
    codec = get_codec(name)
    data, out, own = bytearray(codec.encoded_bytes(values.size)), np.empty_like(values), np.empty_like(values)
    codec.encode(values, data, 1)
    began = time.thread_time()
    if not codec.is_raw:  # A raw vector is sent unencoded.
        codec.encode(values, data, 1)
    codec.subtract(data, values, out, own, 1)
    return time.thread_time() - began
