"""Two nodes that mix, with helpers that cause faults in the first one."""

import contextlib
import time

import numpy as np
import trio

from tests.node.conftest import Trainee, until

AGAIN_S = 20.0  # The next network side has to start within this time; the long pause is 60 s.
ELEMENTS = 512


class Pair:
    """Two nodes that mix; a test causes faults in the first."""

    def __init__(self, **options):
        model = {"x": np.zeros(ELEMENTS, np.float32)}
        self.trainees = [Trainee(model, **options)]
        self.begin(self.trainees[0])
        self.trainees.append(Trainee({"x": np.ones(ELEMENTS, np.float32)}, seeds=[self.node.address]))
        self.begin(self.trainees[1])
        until(self.mixes)
        self.known_as = self.node.id

    @staticmethod
    def begin(trainee):
        trainee.start()
        assert trainee.running.wait(30)
        assert trainee.error is None, trainee.error

    @property
    def node(self):
        return self.trainees[0].node

    @property
    def side(self):
        return self.trainees[0].side

    @property
    def service(self):
        return self.side.service

    def mixes(self):
        return self.side.network.peer.exchanges.done_count > 0

    def call(self, function):
        self.side.network.call(function)

    def forgive(self):
        """Forget the past restarts, so that the next fault causes no back-off."""
        self.service.faults._restarted_at.clear()

    @contextlib.contextmanager
    def books_of_next_peers(self):
        """Collect the address book that each next peer of the first node is made with, before it has any link."""
        books, make_peer = [], self.service.make_peer

        def make(*arguments):
            peer = make_peer(*arguments)
            books.append(book_of(peer))
            return peer

        self.service.make_peer = make
        try:
            yield books
        finally:
            del self.service.make_peer

    def begins_anew(self, fault):
        """Cause a fault of the network side. Assert that another one soon takes over, while the loop trains on."""
        self.forgive()
        old, restarts = self.side.network.runtime, self.service.faults.restarts
        steps, samples, run = self.side.run.steps, self.node.swarm_samples, self.side.network.peer.view.run_id
        book, outer = book_of(old.peer), self.side.live.outer
        began = time.monotonic()
        with self.books_of_next_peers() as books:
            fault()
            until(lambda: self.side.network.runtime is not old, AGAIN_S)
        assert books == [book] != [set()]
        assert self.side.live.outer is outer
        until(lambda: self.mixes() and len(self.side.network.runtime.links))
        assert time.monotonic() - began < 2 * AGAIN_S
        assert self.service.faults.restarts == restarts + 1
        until(lambda: self.side.run.steps > steps + 5)
        assert self.side.network.peer.id.hex() == self.node.id == self.known_as
        assert self.side.network.peer.view.run_id == run
        assert self.node.swarm_samples >= samples
        assert self.trainees[0].error is None


def book_of(peer):
    return {(record.id, record.address) for record in peer.membership.book()}


def raises():
    raise ZeroDivisionError


def crash():
    """Raise in a system task of trio, which ends trio's loop."""

    async def task():
        raises()

    trio.lowlevel.spawn_system_task(task)
