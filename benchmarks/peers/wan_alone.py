"""One node of ``benchmarks/wan.py`` that averages with no other: it learns from its own quarter of the images alone."""

import torch
from wan_job import Job

job = Job("nothing")
job.train(job.model, torch.optim.SGD(job.model.parameters(), lr=job.options.rate))
