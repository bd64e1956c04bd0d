"""The hash of frozen weights, computed block by block."""

import hashlib

import numpy as np
import pytest

from gossip.averaging import jobs
from gossip.averaging.jobs import HashFrozenJob
from gossip.effects import HashFrozen

ELEMENTS, BLOCK = 10, 4


class Owner:
    """An averager, its driver, its model and its peer: jobs wait in a list, and reports are noted."""

    now = 0.0

    def __init__(self):
        self.boundary = self.model = self.driver = self.peer = self
        self.weights = np.arange(ELEMENTS, dtype="<f4")
        self.jobs, self.reported, self.hash_job = [], [], None

    def ask(self):
        self.hash_job = HashFrozenJob(self, HashFrozen(0, ELEMENTS))
        self.run_job(self.hash_job)

    def run_job(self, job):
        self.jobs.append(job)

    def read_frozen(self, into, start):
        into[:] = self.weights[start : start + into.size]

    def call_soon(self, report, *arguments):
        report(*arguments)

    def on_frozen_hashed(self, digest, now):
        self.reported.append(digest)
        return []

    def perform(self, effects):
        assert effects == []


@pytest.mark.parametrize("finished", [0, 1, 2], ids=["in the first block", "in the second", "in the last"])
def test_a_hash_of_weights_that_were_replaced_meanwhile_is_not_reported(finished, monkeypatch):
    monkeypatch.setattr(jobs, "BLOCK_ELEMENTS", BLOCK)
    owner = Owner()
    owner.ask()
    for _ in range(finished):
        job = owner.jobs.pop()
        job.run()
        job.finish()
    earlier = owner.jobs.pop()
    earlier.run()
    owner.weights = owner.weights + 1
    owner.ask()
    earlier.finish()
    while owner.jobs:
        job = owner.jobs.pop()
        job.run()
        job.finish()
    assert owner.reported == [hashlib.blake2b(owner.weights.tobytes(), digest_size=32).digest()]
