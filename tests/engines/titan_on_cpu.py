"""Run ``torchtitan.train`` with gloo and a small model on processors, which torchtitan itself does not support."""

from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torchtitan.tools import utils

ON_CPU = {
    "current_device": lambda: 0,
    "empty_cache": lambda: None,
    "get_device_name": lambda device: "CPU",
    "get_device_properties": lambda device: SimpleNamespace(total_memory=1 << 30),
    "memory_stats": lambda device: {},
    "reset_peak_memory_stats": lambda: None,
}
# Before the other modules of torchtitan copy them.
utils.device_type, utils.device_module = "cpu", SimpleNamespace(**vars(torch.cpu) | ON_CPU)
utils.get_local_device = lambda: torch.device("cpu")
if not hasattr(dist, "set_timeout"):  # torch 2.13 has it under another name.
    dist.set_timeout = dist.distributed_c10d._set_pg_timeout
set_factor = FSDPModule.set_gradient_divide_factor


def set_factor_for_gloo(module, factor):
    set_factor(module, factor)
    module.set_force_sum_reduction_for_comms(True)  # NCCL alone multiplies while it reduces.


FSDPModule.set_gradient_divide_factor = set_factor_for_gloo


def small():
    """Return the example's configuration for two layers, without attention kernels that need a GPU."""
    from torchtitan.models.common.attention import ScaledDotProductAttention

    from examples.engines.titan import llama3_debugmodel

    config = llama3_debugmodel()
    del config.model_spec.model.layers[2:]
    for layer in config.model_spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    config.parallelism.spmd_backend = "partial_dtensor"  # The default needs a torch after 2.13.
    config.training.disable_cuda_graphs = True
    config.training.mixed_precision_param = "float32"
    config.training.seq_len, config.training.local_batch_size = 32, 4
    return config


if __name__ == "__main__":
    from torchtitan.train import main

    main()
