"""A newcomer's optimizer state comes in pieces, from several members, and its first steps are still of usual length."""

from itertools import product

import numpy as np
import pytest
import torch
from torch import nn

from gossip.averaging.vectors import Moments, Vector
from node.model.snapshot import ModelState
from tests.node.model.test_moments import OwnAdam, with_params
from tests.node.vectors import vector_of

FAR = 10.0  # The largest step with state of two donors, as a multiple of the largest with one's.
SEEN = 10  # Inputs that both donors' samples have, of 20.
OPTIMIZERS = {
    "Adam": with_params(torch.optim.Adam, lr=1e-3), "AdamW": with_params(torch.optim.AdamW, lr=1e-3),
    "amsgrad": with_params(torch.optim.Adam, lr=1e-3, amsgrad=True), "NAdam": with_params(torch.optim.NAdam),
    "RAdam": with_params(torch.optim.RAdam), "Adamax": with_params(torch.optim.Adamax),
    "RMSprop, momentum": with_params(torch.optim.RMSprop, momentum=0.9),
    "RMSprop, centred": with_params(torch.optim.RMSprop, centered=True),
    "RMSprop, centred, momentum": with_params(torch.optim.RMSprop, centered=True, momentum=0.9),
    "Adagrad": with_params(torch.optim.Adagrad), "Adadelta": with_params(torch.optim.Adadelta),
    "a user's": with_params(OwnAdam),
}  # fmt: skip


def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int, inputs: int = 20) -> None:
    """Take a step on samples whose inputs from ``inputs`` on are 0."""
    samples = torch.randn(8, 20, generator=torch.Generator().manual_seed(seed))
    samples[:, inputs:] = 0.0
    optimizer.zero_grad()
    (model(samples) - 1.0).square().mean().backward()
    optimizer.step()


def trained(make, steps: int, inputs: int = 20) -> ModelState:
    torch.manual_seed(3)
    model = nn.Linear(20, 4)
    optimizer = make(model)
    for seed in range(steps):
        step(model, optimizer, seed, inputs)
    state = ModelState(model, optimizer)
    state.mix_state = "auto"
    return state


def largest_step(state: ModelState) -> float:
    """Return how far the next step moves a weight."""
    before = vector_of(state)
    step(state.live_tensors.model, state.optimizers.all[0], 99)
    return float(np.abs(vector_of(state) - before).max())


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=list(OPTIMIZERS))
def test_state_of_one_donor_is_taken_as_it_is_and_that_of_two_moves_no_weight_far(make):
    donors = trained(make, 20), trained(make, 20, SEEN)
    vectors, keys, scalars = (
        [vector_of(donor, full=True) for donor in donors],
        donors[0].optimizer_keys,
        donors[0].optimizer_scalars(),
    )
    usual = 0.0
    for assignment in sorted(product((0, 1), repeat=len(keys)), key=sum):
        vector = vectors[0].copy()
        for number, donor in enumerate(assignment):
            piece = slice(84 * (number + 1), 84 * (number + 2))
            vector[piece] = vectors[donor][piece]
        newcomer = trained(make, 0)
        newcomer.adopt(vector, keys, scalars)
        assert newcomer.state_refusal == ""
        if not sum(assignment):
            np.testing.assert_array_equal(vector_of(newcomer, full=True), vectors[0])
            usual = largest_step(newcomer)
            continue
        assert largest_step(newcomer) <= FAR * usual, assignment


def test_mixed_means_of_a_centred_optimizer_keep_its_steps_finite():
    make = with_params(torch.optim.RMSprop, lr=1e-3, centered=True, alpha=0.5)
    ours, theirs = trained(make, 20, SEEN), trained(make, 20)
    for seed in range(20):
        form = theirs.moment_form()
        assert form is not None
        assert ours.moment_form() == form
        vector = Vector(np.zeros(form.vector_elements(84), np.float32))
        theirs.begin_read_moments(form.split(vector.array)[0], form, 0, 84).wait()
        assert form.encode(vector.array)
        form.split(vector.array)[0][0] *= 1.5  # As the mean of gradients may be rounded up.
        assert form.decode(vector.array)
        ours.mix_moments(Moments(vector, form, 0, 84))
        step(ours.live_tensors.model, ours.optimizers.all[0], seed)
        assert ours.sound()
