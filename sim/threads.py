"""Control of the threads that torch and BLAS compute with."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from threadpoolctl import threadpool_limits


@contextmanager
def one_thread() -> Iterator[None]:
    """Limit torch and numpy's BLAS to the calling thread inside the ``with`` block.

    For batches of small models a second thread costs more than it computes. BLAS threads also spin for tens of
    milliseconds after each product. With one thread, results do not depend on the machine's number of cores.
    """
    usual_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with threadpool_limits(1, "blas"):
            yield
    finally:
        torch.set_num_threads(usual_threads)
