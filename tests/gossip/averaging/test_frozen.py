"""The hash of frozen weights, computed block by block."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import numpy as np

from gossip.averaging import jobs
from gossip.averaging.jobs import HashFrozenJob
from gossip.effects import HashFrozen

ELEMENTS, BLOCK = 10, 4


class Owner:
    """An averager, its driver, its model and its peer: jobs wait in a list, and reports are noted."""

    def __init__(self) -> None:
        self.boundary = self.model = self.driver = self.peer = self
        self.now = 0.0
        self.weights = np.arange(ELEMENTS, dtype="<f4")
        self.jobs: list[HashFrozenJob] = []
        self.reported: list[bytes] = []
        self.hash_job: HashFrozenJob | None = None

    def read_frozen(self, into: np.ndarray, start: int) -> None:
        into[:] = self.weights[start : start + into.size]

    def run_job(self, job: HashFrozenJob) -> None:
        self.jobs.append(job)

    def call_soon(self, report: Callable[..., None], *arguments: Any) -> None:
        report(*arguments)

    def perform(self, effects: list[Any]) -> None:
        assert effects == []

    def on_frozen_hashed(self, digest: bytes, now: float) -> list[Any]:
        self.reported.append(digest)
        return []

    def ask(self) -> None:
        self.hash_job = HashFrozenJob(self, HashFrozen(0, ELEMENTS))
        self.run_job(self.hash_job)

    def work(self, blocks: int = 100) -> None:
        while self.jobs and blocks:
            job, blocks = self.jobs.pop(0), blocks - 1
            job.run()
            job.finish()


def digest_of(weights: np.ndarray) -> bytes:
    return hashlib.blake2b(weights.tobytes(), digest_size=32).digest()


def test_blocks_give_the_hash_of_the_whole(monkeypatch):
    monkeypatch.setattr(jobs, "BLOCK_ELEMENTS", BLOCK)
    owner = Owner()
    owner.ask()
    owner.work()
    assert owner.reported == [digest_of(owner.weights)]


def test_a_hash_of_weights_that_were_replaced_meanwhile_is_not_reported(monkeypatch):
    monkeypatch.setattr(jobs, "BLOCK_ELEMENTS", BLOCK)
    for blocks in range(1, 4):  # One, two or all three blocks of the first request are done.
        owner = Owner()
        owner.ask()
        first = owner.jobs[0]
        owner.work(blocks - 1)
        first.run()
        owner.jobs.clear()
        owner.weights = owner.weights + 1
        owner.ask()
        first.finish()
        owner.work()
        assert owner.reported == [digest_of(owner.weights)], blocks


def test_weights_that_cannot_be_read_have_an_empty_hash():
    owner = Owner()
    owner.ask()
    owner.jobs.pop().fail()
    assert owner.reported == [b""]
