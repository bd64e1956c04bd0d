"""The samples that steps count are those of the data, or the loop is refused or told in a sentence."""

import itertools
import pickle
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from gossip.errors import ConfigError, LocalError
from node import Node
from node.data.draws import COMPARED_ONES, EMPTY, EMPTY_STEPS, SKIPPED_EPOCHS, STEPS_AS_SAMPLES, UNDIVIDED
from node.data.loader import UNREAD_BATCHES
from tests.node.data.shares import share
from tests.node.sharers import IDS, Swarm

TRAIN, HELD_OUT = TensorDataset(torch.randn(96, 4)), TensorDataset(torch.randn(40, 4))


def told(node, kind="samples"):
    node._training.network.sync()
    return [str(event) for event in node._training.listeners.history() if event.kind == kind]


def loader(data=TRAIN, size=16):
    return DataLoader(data, size, shuffle=True)


# Samples that a loop states ------------------------------------------------------------------------------------------
@pytest.mark.parametrize("way", ["loader", "shard"])
@pytest.mark.parametrize("stated", [lambda rows: 512 * rows.numel(), lambda rows: 1], ids=["tokens", "steps"])
def test_rows_count_whatever_a_loop_states_and_it_is_told(node, way, stated):
    batches, seen = loader(), 0
    for _ in node.epochs(4, batches):
        for (rows,) in node.loader(batches) if way == "loader" else node.shard(TRAIN, 16):
            node.step(samples=stated(rows))
            seen += len(rows)
    assert seen == node.swarm_samples == 4 * 96
    [sentence] = told(node)
    assert "samples in 8 steps, for which node.loader and node.shard gave 128. These count" in sentence


@pytest.mark.parametrize("stated", [None, 16])
def test_several_steps_on_a_batch_count_it_once(node, stated):
    batches, steps = loader(), 0
    for _ in node.epochs(4, batches):
        for _ in node.loader(batches):
            for _ in range(4):
                node.step(samples=stated)
                steps += 1
    assert (node.swarm_samples, steps) == (4 * 96, 4 * 6 * 4)
    assert bool(told(node)) == (stated is not None)


def test_a_loop_that_leaves_out_padding_or_bad_batches_is_told_nothing(node):
    batches = loader()
    for _ in node.epochs(8, batches):
        for number, (rows,) in enumerate(node.loader(batches)):
            node.step(samples=0 if number == 3 else len(rows))
    assert node.swarm_samples == 8 * 96
    assert not told(node)


def test_a_batch_of_a_stream_counts_as_the_loop_states(node):
    files = node.shards([str(number) for number in range(8)], epochs=1)
    for stated, counted in ((None, 2), (5, 5)):
        before = node.swarm_samples
        for batch in node.loader(DataLoader(Stream(files), 2, collate_fn=torch.cat)):
            assert len(batch) == 8, "tokens"
            node.step(samples=stated)
        assert node.swarm_samples == before + 4 * counted
    assert not told(node)


# Steps without samples -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("size", [None, 16])
def test_a_loader_of_the_users_own_must_state_its_samples(node, size):
    sampler = node.sampler(TRAIN, size)
    batches = DataLoader(TRAIN, 16, sampler=sampler) if size is None else DataLoader(TRAIN, batch_sampler=sampler)
    for (rows,) in batches:
        with pytest.raises(ConfigError, match="drawn by a loader that this node does not see"):
            node.step()
        node.step(samples=len(rows))
    assert node.swarm_samples == 96


@pytest.mark.parametrize(
    ("stated", "steps", "is_told"), [(16, 200, False), (16 * 512, 8, True), (1, 7, False), (1, COMPARED_ONES, True)]
)
def test_what_a_loop_over_a_sampler_states_is_compared_with_what_it_was_given(node, stated, steps, is_told):
    batches = (rows for _ in itertools.count() for rows in DataLoader(TRAIN, 16, sampler=node.sampler(TRAIN)))
    for _ in itertools.islice(batches, steps):
        node.step(samples=stated)
    assert [f"for which node.sampler gave {16 * steps:,}" in text for text in told(node)] == [True] * is_told


def test_a_sampler_of_an_evaluation_asks_for_no_samples(node):
    with torch.no_grad():
        assert len(list(DataLoader(HELD_OUT, 8, sampler=node.sampler(HELD_OUT)))) == 5
    node.step()
    assert node.swarm_samples == 1


def test_epochs_of_a_loader_that_the_loop_does_not_share_are_refused_at_the_first_step(node):
    batches = loader()
    for _ in node.epochs(3, batches):
        for _ in batches:
            with pytest.raises(ConfigError, match=r"loop over node.loader\(loader\)"):
                node.step()
            node.step(samples=16)
    assert node.swarm_samples == 3 * 96, "stated samples are those of a node's own data"


@pytest.mark.parametrize("data", [loader(), TRAIN, 96], ids=["loader", "dataset", "number"])
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("way", ["plain", "loader", "sampler", "evaluated"])
def test_epochs_of_data_of_which_nothing_is_drawn_are_told_once(node, data, way, workers):
    """The loop forgets `node.loader`, and states the right samples, so that every node trains on all data."""
    batches = DataLoader(TRAIN, 8, sampler=node.sampler(TRAIN) if way == "sampler" else None, num_workers=workers)
    for _ in node.epochs(2, data):
        if way == "evaluated":
            with torch.no_grad():
                list(node.loader(DataLoader(HELD_OUT, 8)))
        for (rows,) in node.loader(batches) if way == "loader" else batches:
            node.step(samples=len(rows))
    assert told(node) == [UNDIVIDED] * (way in ("plain", "evaluated") and data != 96)


@pytest.mark.parametrize(("length", "is_told"), [(10, False), (96, True)])
def test_epochs_of_a_number_may_count_steps_but_not_rows(node, length, is_told):
    for _ in node.epochs(2, length):
        for _ in loader():
            node.step()
    assert node.swarm_samples >= 2 * length
    assert told(node) == [STEPS_AS_SAMPLES] * is_told


@pytest.mark.parametrize(
    ("calls", "is_told"),
    [([(2, TRAIN), (3, TRAIN)], False), ([(1, TRAIN)] * 3, True), ([(4, HELD_OUT), (2, TRAIN)], True)],
    ids=["further epochs", "a call for each epoch", "phases"],
)
def test_epochs_that_earlier_calls_have_counted_are_told_once(node, calls, is_told):
    for count, data in calls:
        batches = loader(data)
        for _ in node.epochs(count, batches):
            for _ in node.loader(batches):
                node.step()
    assert [text.startswith("node.epochs counts the samples of the whole") for text in told(node)] == [True] * is_told


@pytest.mark.parametrize(
    ("members", "trains", "reduces", "is_told"),
    [(2, False, False, True), (1, False, False, False), (2, True, False, False), (2, False, True, False)],
)
def test_an_evaluation_of_a_share_is_told_once_unless_it_is_reduced(node, members, trains, reduces, is_told):
    samplers = node._share.samplers
    ids = [samplers.sharers.me(), IDS[1]][:members]
    samplers.sharers = replace(samplers.sharers, members=lambda: ids)
    node._training.model.train(trains)
    for _ in range(2):
        with torch.no_grad():
            seen = sum(len(rows) for (rows,) in node.loader(DataLoader(HELD_OUT, 8, drop_last=members == 1)))
        if reduces:
            node.reduce({"seen": seen})
        node.step()
    assert [f"has seen {seen} of 40 samples" in text for text in told(node)] == [True] * is_told


def evaluate_a_copy(node, model, rows):
    with torch.no_grad():
        sum(len(batch) for (batch,) in rows)


def evaluate_with_gradients(node, model, rows):
    model.eval()
    for (batch,) in rows:
        torch.autograd.grad(model(batch.requires_grad_()).sum(), batch)
    model.train()


def leave_a_pass(node, model, rows):
    with torch.no_grad():
        next(iter(rows))


def reestimate_statistics(node, model, rows):
    with torch.no_grad():
        for (batch,) in rows:
            model.seen += len(batch)


def accumulate(node, model, rows):
    model.eval()  # Its statistics are frozen.
    for (batch,) in rows:
        model(batch).sum().backward()
    node.step()
    model.zero_grad()
    model.train()


@pytest.mark.parametrize("data", [TRAIN, HELD_OUT], ids=["same data", "other data"])
@pytest.mark.parametrize("is_after", [False, True])
@pytest.mark.parametrize(
    ("work", "is_evaluation"),
    [
        (evaluate_a_copy, True), (evaluate_with_gradients, True), (leave_a_pass, False),
        (reestimate_statistics, False), (accumulate, False),
    ],
)  # fmt: skip
def test_a_pass_without_a_step_is_an_evaluation_over_other_data_or_after_the_epochs(
    quick, data, is_after, work, is_evaluation
):
    model = nn.Linear(4, 2)
    model.register_buffer("seen", torch.zeros(()))
    with Node(model, config=quick) as node:
        samplers, batches = node._share.samplers, loader()
        ids, others = [samplers.sharers.me(), IDS[1]], DataLoader(data, 8)
        samplers.sharers = replace(samplers.sharers, members=lambda: ids)
        for _ in node.epochs(2, batches, settle=None):
            for _ in node.loader(batches):
                node.step()
            if not is_after:
                work(node, model, node.loader(others))
        if is_after:
            work(node, model, node.loader(others))
    is_told = is_evaluation and (is_after or data is HELD_OUT)
    assert ["An evaluation over node.loader" in text for text in told(node)] == [True] * is_told


def test_steps_on_a_batch_of_a_pass_that_was_left_are_told(node):
    left = iter(node.loader(loader()))
    next(left)
    for _ in range(1 + EMPTY_STEPS):
        node.step()
    assert told(node) == [EMPTY]
    assert node.swarm_samples == 16


def test_steps_on_a_copy_of_a_pass_are_told(node):
    for _ in itertools.islice(itertools.cycle(node.loader(loader())), 6 + 1 + EMPTY_STEPS):
        node.step()
    assert told(node) == [EMPTY]


# Evaluations ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("way", ["loader", "shard"])
@pytest.mark.parametrize("data", [TRAIN, HELD_OUT], ids=["of the same data", "of other data"])
@pytest.mark.parametrize("is_first", [True, False])
def test_an_evaluation_is_whole_in_each_epoch_and_counts_nothing(node, way, data, is_first):
    """An evaluation neither ends with the run, nor is it repeated in the last epoch."""
    batches, others = loader(), DataLoader(data, 8)

    def evaluate():
        with torch.set_grad_enabled(data is HELD_OUT):  # other data are told apart without it
            return sum(len(rows) for (rows,) in (node.loader(others) if way == "loader" else node.shard(data, 8)))

    for _ in node.epochs(3, batches):
        assert not is_first or evaluate() == len(data)
        for _ in node.loader(batches):
            node.step()
        assert is_first or evaluate() == len(data)
    assert node.swarm_samples == 3 * 96


def test_an_evaluation_between_a_batch_and_its_step_counts_nothing(node):
    for (rows,) in node.loader(loader()):
        with torch.no_grad():
            assert len(list(node.shard(HELD_OUT, 8))) == 5
        node.step()
        node.step()
        assert node.swarm_samples % len(rows) == 0
    assert node.swarm_samples == 96


def test_an_evaluation_over_the_loader_of_the_pass_leaves_its_counts(node):
    batches = DataLoader(HELD_OUT, 16, collate_fn=lambda rows: {"tokens": torch.zeros(3)})
    for _ in node.loader(batches):
        with torch.no_grad():
            assert len(list(node.loader(batches))) == 3
        node.step()
    assert node.swarm_samples == 40


def test_the_evaluations_of_all_members_are_of_all_samples_whatever_each_has_counted():
    swarm, seen = Swarm(*IDS[:3]), []
    for me in IDS[:3]:
        swarm.trained += 55
        with torch.no_grad():
            seen += [int(row) for (row,) in share(swarm, me).loader(DataLoader(TensorDataset(torch.arange(40))))]
    assert sorted(seen) == list(range(40))


@pytest.mark.parametrize("shuffle", [True, False])
def test_an_evaluation_after_a_restart_is_whole_and_the_training_goes_on_where_it_was(shuffle):
    swarm = Swarm(IDS[0])
    first = share(swarm)
    before = first.shard(TensorDataset(torch.arange(96)), 16, True, 1, None, False)
    trained = [int(row) for _, (rows,) in zip(range(2), before, strict=False) for row in rows]
    swarm.trained = len(trained)
    again = share(swarm)
    again.samplers.load(first.samplers.state())
    for _ in range(2):
        with torch.no_grad():
            rows = again.shard(TensorDataset(torch.arange(96)), 16, shuffle, 1, None, False)
            assert sum(len(batch) for (batch,) in rows) == 96
    after = again.shard(TensorDataset(torch.arange(96)), 16, True, 1, None, False)
    assert sorted(trained + [int(row) for (rows,) in after for row in rows]) == list(range(96))


@pytest.mark.parametrize(("data", "size"), [(HELD_OUT, 4), (TensorDataset(torch.randn(96, 4)), 16), (TRAIN, 16)])
def test_of_two_loaders_side_by_side_the_one_of_the_epochs_counts(node, data, size):
    named, unnamed = loader(), loader(data, size)
    for _ in node.epochs(3, named):
        for _ in zip(node.loader(named), node.loader(unnamed), strict=False):
            node.step()
    assert node.swarm_samples == 3 * 96


def test_two_loaders_side_by_side_keep_pace_in_the_last_epoch():
    """Half of the trained samples are taken away again, so that the last epoch takes several passes."""
    swarm, data = Swarm(IDS[0]), [TensorDataset(torch.arange(96)) for _ in range(2)]
    ours, (first, second) = share(swarm), map(loader, data)
    numbers, pairs = [], []
    for number in ours.epochs(2, first):
        numbers.append(number)
        for (one,), (other,) in zip(ours.loader(first), ours.loader(second), strict=False):
            pairs.append(torch.equal(one, other))
            swarm.trained += ours.draws.take(None)
            swarm.behind -= 8
    assert all(pairs)
    assert (len(pairs), numbers) == (4 * 6, [0, 1, 1, 1]), "the swarm's count is rounded"


def test_an_evaluation_of_as_many_samples_counts_nothing_though_it_begins_with_gradients(node):
    train, held_out = loader(), loader(TensorDataset(torch.randn(96, 4)))
    for _ in node.epochs(3, train):
        for _ in node.loader(train):
            node.step()
        list(node.loader(held_out))
    assert node.swarm_samples == 3 * 96


def test_a_loop_without_gradients_counts_what_it_draws(node):
    batches = loader()
    with torch.no_grad():
        for _ in node.epochs(3, batches):
            for _ in node.loader(batches):
                node.step()
    assert node.swarm_samples == 3 * 96


# Loops that would not end, streams -----------------------------------------------------------------------------------
@pytest.mark.parametrize(("size", "passes"), [(1, 3), (16, 43)])
def test_a_last_epoch_without_a_step_ends_in_a_sentence(size, passes):
    swarm = Swarm(IDS[0])
    ours, batches = share(swarm), loader(size=size)
    batches_of_all_epochs = (batch for _ in ours.epochs(1, batches) for batch in ours.loader(batches))
    with pytest.raises(LocalError, match=f"{passes} passes have drawn batches without node"):
        list(batches_of_all_epochs)


@pytest.mark.parametrize(
    ("data", "does"), [(loader(), "skip"), (loader(), "wait"), (loader(), "sample"), (loader(), "follow"), (96, "skip")]
)
def test_epochs_that_a_program_skips_for_ever_end_in_a_sentence(monkeypatch, data, does):
    monkeypatch.setattr("node.data.epochs.IDLE_S", 0.0)
    monkeypatch.setattr("node.data.draws.SKIPPED_S", 0.0 if does == "wait" else 60.0)
    swarm = Swarm(IDS[0])
    ours, numbers = share(swarm), itertools.count()

    def loop():
        for _ in itertools.islice(ours.epochs(3, data), 2 * SKIPPED_EPOCHS):
            swarm.behind += does == "follow" and next(numbers) % 50 == 49
            if does == "sample":  # The share may be empty, or smaller than a batch.
                next(iter(ours.sampler(TRAIN)))

    if does == "skip" and data != 96:
        with pytest.raises(LocalError, match=f"{SKIPPED_EPOCHS} epochs in a row have drawn nothing from"):
            loop()
    else:
        loop()


@pytest.mark.parametrize("epochs", [1, 3])
def test_a_step_for_several_passes_of_one_batch_is_no_loop_without_end(epochs):
    swarm, batches = Swarm(IDS[0]), loader(size=96)
    ours, number = share(swarm), itertools.count(1)
    for _ in ours.epochs(epochs, batches):
        for _ in ours.loader(batches):
            if next(number) % 4 == 0:
                swarm.trained += ours.draws.take(None)
    assert swarm.trained == 4 * 96


class Stream(IterableDataset):
    """A stream of the given names, or of data of its own."""

    def __init__(self, names):
        self.names = names

    def __iter__(self):
        return (torch.zeros(4) for _ in self.names)


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")  # Python 3.12 warns at a fork.
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("reads", [True, False])
def test_a_stream_that_reads_no_file_of_its_share_is_told(node, reads, workers):
    names = [str(number) for number in range(2 * UNREAD_BATCHES)]
    files = node.shards(names, epochs=1)
    stream, start = Stream(files if reads else names), "fork" if workers else None
    batches = node.loader(DataLoader(stream, 1, num_workers=workers, multiprocessing_context=start))
    for _ in range(2):
        for _ in batches:
            node.step()
    sentences = told(node, "data")
    assert len(sentences) == (not reads)
    assert all("Stream has given 8 batches and taken no file from node.shards" in text for text in sentences)


def test_files_that_go_to_another_process_count_as_taken():
    ours = share(Swarm(IDS[0]))
    files = ours.files(["a", "b"], 1, True, None)
    assert not ours.passes_begun
    assert list(pickle.loads(pickle.dumps(files)))
    assert ours.passes_begun
