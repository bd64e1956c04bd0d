"""One node of ``benchmarks/wan.py`` that hears of nobody: what its own quarter of the images teaches."""

import torch
from wan_job import Job

job = Job("nothing")
job.train(job.model, torch.optim.SGD(job.model.parameters(), lr=job.said.rate))
