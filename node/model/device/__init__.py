"""Copies between live tensors on a CUDA device and host vectors, which wait for nothing.

All of it is tested on the simulated device of ``tests/device``. None of it has run on a GPU.
"""
