"""What all tests of the simulator share."""

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread():
    """Small models gain nothing from a second thread, and lose much where the cores are busy."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
