"""One rank of DistributedDataParallel over gloo in ``benchmarks/wan.py``. Its route has the congestion control."""

import datetime
import os

os.environ["GLOO_SOCKET_IFNAME"] = "eth0"

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel
from wan_job import Job

LONGEST = datetime.timedelta(minutes=30)  # to connect, or for one step: the benchmark ends the run

job = Job("DistributedDataParallel over gloo")
distributed.init_process_group("gloo", f"tcp://{job.options.first}:7700", LONGEST, job.options.ranks, job.options.rank)
model = DistributedDataParallel(job.model)
job.train(model, torch.optim.SGD(job.model.parameters(), lr=job.options.rate))
