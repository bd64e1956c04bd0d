"""If some parameters are frozen, only the trained ones travel; a newcomer gets the others once, unless it has them."""

import hashlib
import threading

import numpy as np
import pytest
import torch
from torch import nn

from gossip.averaging import jobs
from gossip.config import Config
from gossip.errors import LayoutError, LocalError
from node import Node
from node.model.inventory.items import Choices
from node.model.snapshot import ModelState
from tests.node.trainees import step_of
from tests.node.vectors import slow_vector, vector_of

FROZEN, TRAINED = 900, 100  # elements
LARGE = (1 << 20) + 200_000  # More elements than a network thread works on by itself.
BASES = {}


class Adapted(nn.Module):
    """A frozen base, and a small adapter that every node trains."""

    def __init__(self, seed, frozen=True):
        super().__init__()
        random = torch.Generator().manual_seed(seed)
        self.base = nn.Parameter(torch.randn(FROZEN, generator=random), requires_grad=not frozen)
        self.adapter = nn.Parameter(torch.randn(TRAINED - 1, generator=random))
        self.register_buffer("mean", torch.randn(1, generator=random))


def test_exchanges_carry_a_tenth_of_a_model_of_which_nine_tenths_are_frozen():
    model = Adapted(0)
    state = ModelState(model)
    assert [s.name for s in state.layout.segments] == ["adapter", "mean", "base"]
    assert (state.layout.parameters, state.size(), state.layout.size) == (TRAINED - 1, TRAINED, TRAINED + FROZEN)
    np.testing.assert_array_equal(vector_of(state), slow_vector([model.adapter, model.mean]))
    np.testing.assert_array_equal(vector_of(state, full=True), slow_vector([model.adapter, model.mean, model.base]))
    before = model.base.clone()
    state.add(np.ones(TRAINED, np.float32))
    state.merge(np.ones(TRAINED, np.float32), 0.5)
    state.add_at(np.ones(1, np.float32), np.array([TRAINED - 1]))
    assert torch.equal(model.base, before)
    state.adopt(np.full(TRAINED + FROZEN, 0.25, np.float32), (), {})
    assert torch.all(model.base == 0.25)


@pytest.mark.parametrize(
    "state",
    [
        ModelState(Adapted(0), choices=Choices(average="*")),
        ModelState(Adapted(0).requires_grad_(False)),  # Whatever changes these weights, it is not a gradient.
        ModelState(dict(Adapted(0).named_parameters()) | {"mean": torch.zeros(1)}),
    ],
    ids=["asked for", "nothing is trained by gradients", "a mapping"],
)
def test_everything_travels_where_it_is_asked_for_or_nothing_says_what_is_trained(state):
    assert state.size() == state.layout.size == state.layout.exchanged == TRAINED + FROZEN


def test_a_parameter_that_is_trained_after_all_is_told_and_one_that_no_longer_is_goes_on_as_before():
    model = Adapted(0)
    state = ModelState(model)
    model.adapter.requires_grad_(False)
    assert vector_of(state).size == TRAINED
    model.base.requires_grad_(True)
    with pytest.raises(LayoutError, match=r"'base' was frozen when the Node was made and is trained now"):
        vector_of(state)


def pulled(model, optimizer):
    """Return a training step that moves only the trained parameters."""
    return step_of(lambda: ((model.adapter - model.base[: TRAINED - 1]) ** 2).sum(), optimizer)


def trainee(train, model, rate=0.01, **options):
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    return train(model, optimizer, pulled(model, optimizer), **options)


def test_a_newcomer_takes_the_frozen_base_and_the_optimizers_state_and_then_exchanges_what_is_trained(train, until):
    first = trainee(train, Adapted(0))
    until(lambda: first.node._training.network.peer.local.optimizer_keys)
    second = trainee(train, Adapted(1), seeds=[first.node.address])
    base = Adapted(0).base
    assert torch.equal(second.at_entry["base"], base)
    assert second.optimizer.state[second.model.adapter]["momentum_buffer"].norm() > 0
    until(lambda: second.node.metrics().exchanges_done >= 3)
    until(lambda: torch.dist(second.model.adapter, base[: TRAINED - 1]) < 0.1)
    for one in (first, second):
        one.stop()
        assert torch.equal(one.model.base, base)


def test_a_newcomer_gets_the_frozen_base_of_a_member_whose_loop_stands(train):
    first = trainee(train, Adapted(0))

    def stand(node):
        newcomer = Adapted(1)
        with Node(newcomer, seeds=[node.address], config=first.options["config"], join_or_fail_s=20):
            return newcomer.base.clone(), torch.dist(newcomer.adapter, first.model.adapter)

    base, apart = first.do(stand)
    assert torch.equal(base, first.model.base)
    assert apart < torch.dist(Adapted(1).adapter, first.model.adapter) / 2, "of a snapshot of before"


def test_who_freezes_other_parameters_is_refused_and_told_which(train, quick):
    first = trainee(train, Adapted(0))
    sentence = (
        r"'base' is trained here and frozen there: freeze the same ones on every node.* give every Node the same local="
    )
    for model, average in ((Adapted(1, frozen=False), ()), (Adapted(1), ["base"])):
        node = Node(model, seeds=[first.node.address], config=quick, average=average)
        with pytest.raises(LocalError, match=sentence):
            node.start()


def test_a_checkpoint_fits_whatever_is_trained_next(train, tmp_path):
    first = trainee(train, Adapted(0))
    first.do(lambda node: node.save(tmp_path / "run"))
    first.stop()
    model = Adapted(1, frozen=False)
    again = train(model)
    again.do(lambda node: node.load(tmp_path / "run"))
    assert torch.equal(model.base, Adapted(0).base)
    assert (
        Node(Adapted(2))._training.live.state.layout.contents_fingerprint
        == again.node._training.live.state.layout.fingerprint
    )


# -- the hash of a base ------------------------------------------------------------------------------------------------
def base_of(number):
    if number not in BASES:
        BASES[number] = torch.randn(LARGE, generator=torch.Generator().manual_seed(number))
    return BASES[number]


def digest_of(base):
    return hashlib.blake2b(base_of(base).numpy().tobytes(), digest_size=32).digest()


def large(base, seed):
    """Return a model whose large frozen base is equal for equal ``base``, and whose adapter differs."""
    model = Adapted(seed)
    model.base = nn.Parameter(base_of(base).clone(), requires_grad=False)
    return model


def first_of(train, until):
    first = trainee(train, large(0, 0), rate=1e-4)
    until(lambda: first.side.network.peer.local.frozen_hash)
    until(lambda: first.side.network.peer.local.optimizer_keys)
    return first


def received(trained):
    """Return the bytes that this node's links have received so far."""
    return trained.do(lambda node: sum(link.bytes_received for link in node._training.network.runtime.links.all()))


def test_no_byte_of_the_same_base_travels_and_all_of_another(train, until):
    first = first_of(train, until)
    config = Config(mix_every_steps=1_000_000, join_timeout_s=3.0)
    same = trainee(train, large(0, 1), rate=1e-4, seeds=[first.node.address], config=config)
    assert 8 * TRAINED <= received(same) < 8 * TRAINED + 100_000, "adapter, momentum, and some talk"
    other = trainee(train, large(1, 1), rate=1e-4, seeds=[first.node.address], config=config)
    assert received(other) >= 4 * LARGE
    for one in (same, other):
        assert torch.equal(one.at_entry["base"], base_of(0))
        assert torch.dist(one.at_entry["adapter"], first.model.adapter) < 5.0
        assert one.optimizer.state[one.model.adapter]["momentum_buffer"].norm() > 0
    peer = other.side.network.peer
    until(lambda: peer.local.frozen_hash == digest_of(0))
    assert same.side.network.peer.local.frozen_hash == digest_of(0)


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
    assert sizes == [(1 << 20) + 1, LARGE - (1 << 20) - 1]
    assert not {first, threading.main_thread(), first.side.network.thread} & {*threads}


def test_what_is_adopted_without_the_base_leaves_it_whatever_the_vector_holds_there():
    model = large(0, 0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    pulled(model, optimizer)()
    state = ModelState(model, optimizer)
    version = model.base._version
    vector = np.full(TRAINED + LARGE + TRAINED - 1, np.nan, np.float32)
    vector[:TRAINED], vector[TRAINED + LARGE :] = 0.5, 0.25
    state.adopt_exchanged(vector, ("momentum_buffer",), {})
    assert torch.all(model.adapter == 0.5)
    assert torch.all(optimizer.state[model.adapter]["momentum_buffer"] == 0.25)
    assert model.base._version == version, "not written to at all"
    state.adopt_exchanged(np.full(TRAINED + LARGE, 2.0, np.float32), (), {})
    assert torch.all(model.adapter == 2.0)
    assert torch.equal(model.base, base_of(0))
