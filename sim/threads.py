"""Threads of arithmetic."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from threadpoolctl import threadpool_limits

__all__ = ["one_thread"]


@contextmanager
def one_thread() -> Iterator[None]:
    """torch computes in this thread meanwhile, and numpy's BLAS too: a second thread costs batches of small models more
    than it does, and BLAS' spins for tens of milliseconds after each product. Results are those of any machine with
    these libraries, whatever cores it has."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with threadpool_limits(1, "blas"):
            yield
    finally:
        torch.set_num_threads(threads)
