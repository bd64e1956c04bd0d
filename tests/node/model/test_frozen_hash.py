"""A newcomer fetches no byte of a base that it has. The hash of the base is computed without delaying a loop."""

from __future__ import annotations

import hashlib
import threading

import numpy as np
import torch
from torch import nn

from gossip.averaging import jobs
from gossip.config import Config
from gossip.effects import MemberState
from gossip.state_transfer.joining import Phase
from node.model.snapshot import ModelState
from node.model.state import State
from tests.node.vectors import vector_of

TRAINED, FROZEN = 1_000, (1 << 20) + 200_000  # elements: more than a network thread works on by itself
BASES = {}


class Based(nn.Module):
    """A frozen base that is equal for equal ``base``, and an adapter that differs."""

    def __init__(self, base, seed):
        super().__init__()
        random = torch.Generator().manual_seed(seed)
        self.base = nn.Parameter(base_of(base).clone(), requires_grad=False)
        self.adapter = nn.Parameter(torch.randn(TRAINED, generator=random))


def base_of(number):
    if number not in BASES:
        BASES[number] = torch.randn(FROZEN, generator=torch.Generator().manual_seed(number))
    return BASES[number]


def digest_of(base):
    return hashlib.blake2b(base_of(base).numpy().tobytes(), digest_size=32).digest()


def pulled(model, optimizer):
    """Return a training step that moves only the adapter."""

    def work():
        optimizer.zero_grad()
        loss = ((model.adapter - model.base[:TRAINED]) ** 2).sum()
        loss.backward()
        optimizer.step()
        return loss

    return work


def trainee(train, base, seed, **options):
    model = Based(base, seed)
    work = pulled(model, optimizer := torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9))
    return train(model, optimizer, work, **options)


def first_of(train, until, base=0):
    first = trainee(train, base, 0)
    until(lambda: first.side.network.peer.local.frozen_hash)
    until(lambda: first.side.network.peer.local.optimizer_keys)
    return first


def received(trained):
    """Return the bytes that this node's links have received so far."""
    return trained.do(lambda node: sum(link.bytes_received for link in node._training.network.runtime.links.all()))


def test_no_byte_of_the_same_base_travels_and_all_of_another(train, until):
    first = first_of(train, until)
    config = Config(mix_every_steps=1_000_000, join_timeout_s=3.0)
    same = trainee(train, 0, 1, seeds=[first.node.address], config=config)
    assert 8 * TRAINED <= received(same) < 8 * TRAINED + 100_000, "adapter, momentum, and some talk"
    other = trainee(train, 1, 1, seeds=[first.node.address], config=config)
    assert received(other) >= 4 * FROZEN
    for one in (same, other):
        assert torch.equal(one.at_entry["base"], base_of(0))
        assert torch.dist(one.at_entry["adapter"], first.model.adapter) < 5.0
        assert one.optimizer.state[one.model.adapter]["momentum_buffer"].norm() > 0
    peer = other.side.network.peer
    until(lambda: peer.local.frozen_hash == digest_of(0))
    assert same.side.network.peer.local.frozen_hash == digest_of(0)


def test_the_base_of_a_donor_that_states_no_hash_as_an_older_version_is_fetched(train, until):
    first = first_of(train, until)
    first.side.network.peer.donating.local.frozen_hash = b""
    second = trainee(train, 0, 1, seeds=[first.node.address])
    assert received(second) >= 4 * FROZEN
    assert torch.equal(second.at_entry["base"], base_of(0))


def test_the_hash_is_computed_in_blocks_by_no_thread_that_must_not_wait(train, until, monkeypatch):
    threads, sizes, read = [], [], ModelState.read_frozen

    def reading(self, out, start):
        threads.append(threading.current_thread())
        sizes.append(out.size)
        read(self, out, start)

    monkeypatch.setattr(ModelState, "read_frozen", reading)
    monkeypatch.setattr(jobs, "BLOCK_ELEMENTS", (1 << 20) + 1)
    first = first_of(train, until)
    assert first.side.network.peer.local.frozen_hash == digest_of(0)
    assert sizes == [(1 << 20) + 1, FROZEN - (1 << 20) - 1]
    assert not {first, threading.main_thread(), first.side.network.thread} & {*threads}


def test_a_newcomer_waits_for_its_own_hash_and_answers_probes_meanwhile(train, launch, until, monkeypatch):
    first = first_of(train, until)
    go_on, read = threading.Event(), ModelState.read_frozen

    def slowly(self, out, start):
        assert go_on.wait(20)
        read(self, out, start)

    monkeypatch.setattr(ModelState, "read_frozen", slowly)
    model = Based(0, 1)
    second = launch(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), seeds=[first.node.address])
    newcomer, donor = second.side.network.peer, first.side.network.peer
    until(lambda: newcomer.joining.phase is Phase.COLLECTING and newcomer.joining.frozen_hash)
    until(lambda: not (newcomer.joining.pieces or newcomer.joining.missing))  # All but the base has arrived.
    asked = donor.membership.deadline
    until(lambda: donor.membership.deadline > asked + 2.0)  # Several rounds of probes.
    assert donor.membership.state(newcomer.id) is MemberState.ALIVE
    assert not second.running.is_set()
    go_on.set()
    assert second.running.wait(20)
    assert torch.equal(second.at_entry["base"], base_of(0))
    assert received(second) < FROZEN


def test_a_hash_that_fails_costs_a_transfer(train, until, monkeypatch):
    first = first_of(train, until)

    def fails(self, out, start):
        raise RuntimeError("no device")

    first.side.live.state.read_frozen = first.side.live.state.read_frozen  # The donor keeps its working method.
    monkeypatch.setattr(ModelState, "read_frozen", fails)
    second = trainee(train, 0, 1, seeds=[first.node.address])
    assert received(second) >= 4 * FROZEN
    assert second.side.network.peer.local.frozen_hash == b""


# -- adopting the rest -----------------------------------------------------------------------------------------------
def test_what_is_adopted_without_the_base_leaves_it_whatever_the_vector_holds_there():
    model = Based(0, 0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    pulled(model, optimizer)()
    state = ModelState(model, optimizer)
    version = model.base._version
    vector = np.full(TRAINED + FROZEN + TRAINED, np.nan, np.float32)
    vector[:TRAINED], vector[-TRAINED:] = 0.5, 0.25
    state.adopt_exchanged(vector, ("momentum_buffer",), {})
    assert torch.all(model.adapter == 0.5)
    assert torch.all(optimizer.state[model.adapter]["momentum_buffer"] == 0.25)
    assert model.base._version == version, "not written to at all"
    assert state.holds(vector)
    vector[-1] = 1.0
    assert not state.holds(vector)
    state.adopt_exchanged(np.full(TRAINED + FROZEN, 2.0, np.float32), (), {})
    assert torch.all(model.adapter == 2.0)
    assert torch.equal(model.base, base_of(0))


def test_a_state_that_writes_only_whole_vectors_gets_its_own_base_in_them():
    class Whole(State):
        def __init__(self, inner):
            self.inner, self.layout = inner, inner.layout

        def read(self, out):
            self.inner.read(out)

        def add(self, shift):
            self.inner.add(shift)

        def write(self, vector):
            assert vector.size == self.layout.size
            self.inner.write(vector)

        def read_frozen(self, out, start):
            self.inner.read_frozen(out, start)

    model = Based(0, 0)
    Whole(ModelState(model)).adopt_exchanged(np.full(TRAINED + FROZEN, 0.5, np.float32), (), {})
    assert torch.all(model.adapter == 0.5)
    assert torch.equal(model.base, base_of(0))
    assert vector_of(ModelState(model)).size == TRAINED
