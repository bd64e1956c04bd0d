"""The samples that a node counts over restarts: those behind its weights, and no others."""

import dataclasses
import time
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from gossip.errors import LocalError
from gossip.ids import parse_address
from node import Node, running
from node.loop.held_run import HeldRun, OtherRanks
from node.model import checkpoint
from node.observe.members import SwarmView
from tests.harness.configs import tuned
from tests.node.conftest import Trainee
from tests.node.trainees import linear, pull, spread


def trained(trainee):
    return trainee.node.metrics().samples


def run_id(trainee):
    return trainee.side.network.peer.local.run_id


def run_size(trainee):
    return trainee.side.network.peer.membership.run_size


def test_the_number_that_is_shown_falls_only_in_another_run_or_after_settling():
    service = SimpleNamespace(view=SwarmView(run=b"a", swarm_samples=1000, own_samples=300, sharers=4))
    live, network = SimpleNamespace(backup=SimpleNamespace()), SimpleNamespace(service=service, notify=None)
    held = HeldRun(live, network, None, OtherRanks())

    def shown(**changes):
        service.view = dataclasses.replace(service.view, **changes)
        return held.swarm_samples

    held.samples = 310
    assert shown() == 1000 + 4 * 10
    assert shown(swarm_samples=900) == 1040, "an exchange lowered the node's own number"
    assert shown(sharers=1) == 1040, "members left"
    held.samples = 500
    assert shown() == 900 + 200
    assert shown(swarm_samples=950, own_samples=500) == 1100
    assert shown(swarm_samples=950, own_samples=500, settled=1) == 950, "the nodes have settled on it"
    assert shown(swarm_samples=940) == 950
    assert shown(run=b"b", swarm_samples=7) == 7, "of the other run"
    assert shown(swarm_samples=6) == 7


def test_resuming_with_a_state_directory_counts_nothing_twice(train, until, tmp_path):
    """Once, a run that was killed at 6,000 of 8,000 samples and resumed counted 11,710."""
    first = train(linear(1), state_dir=tmp_path / "state")
    until(lambda: trained(first) > 200)
    first.do(lambda node: node.save(tmp_path / "run"))
    first.stop()
    second = train(linear(2), state_dir=tmp_path / "state")

    def resume(node):
        before = node._training.run.samples
        meta = node.load(tmp_path / "run")
        return meta["swarm_samples"], before, node.swarm_samples, node._training.run.samples

    saved, before, counted, now = second.do(resume)
    assert counted == saved + now - before
    until(lambda: trained(second) > now + 100)
    second.stop()
    assert second.node.swarm_samples == saved + trained(second) - before


def test_a_state_directory_without_its_checkpoint_counts_from_nothing(train, until, tmp_path):
    first = train(linear(1), state_dir=tmp_path)
    until(lambda: trained(first) > 100)
    first.stop()
    second = train(linear(2), state_dir=tmp_path)
    until(lambda: trained(second) > 100)
    second.stop()
    assert second.node.swarm_samples == trained(second)


def test_three_nodes_that_resume_count_what_is_behind_their_weights(train, until, quick, tmp_path):
    """Once, the count of three machines rose from 96,960 to 208,960 when they resumed."""
    nodes = [train(linear(0), state_dir=tmp_path / "0")]
    nodes += [train(linear(n), state_dir=tmp_path / str(n), seeds=[nodes[0].node.address]) for n in (1, 2)]
    until(lambda: all(trained(one) > 200 for one in nodes))
    for one in nodes:  # Far more than the nodes train while they are watched below.
        one.do(lambda node: node.step(samples=100_000))
    until(lambda: all(one.node.swarm_samples > 250_000 for one in nodes))
    for number, one in enumerate(nodes):
        one.do(lambda node, number=number: node.save(tmp_path / f"run{number}"))
    for one in nodes:
        one.stop()
    again, began, saved = [], [], []
    since_s = time.monotonic()
    for number in range(3):
        # Wait long: a node that begins alone on a busy machine resumes the same run by itself, and counts for itself
        # alone until it reaches the others. Parts that trained apart count as their mean then.
        config = dataclasses.replace(quick, join_timeout_s=25.0) if again else quick
        seeds = [one.node.address for one in again[:1]]
        again.append(train(linear(number), state_dir=tmp_path / str(number), seeds=seeds, config=config))

        def load(node, number=number):
            began.append(node._training.run.samples)
            saved.append(node.load(tmp_path / f"run{number}")["swarm_samples"])

        again[-1].do(load)
    until(lambda: all(trained(one) > 400 for one in again))
    until(lambda: len({run_id(one) for one in again}) == 1 and all(run_size(one) == 3 for one in again))
    # If a machine is too busy for one of them for seconds, the others suspect it: its steps count less meanwhile.
    began_s = seen_s = time.monotonic()
    uncounted_s = 0.0
    while seen_s < began_s + 2.0:
        time.sleep(0.02)
        missing = sum(3 - run_size(one) for one in again)
        passed_s = time.monotonic() - seen_s
        seen_s, uncounted_s = seen_s + passed_s, uncounted_s + missing * passed_s
    exchanged = [(run_id(one).hex()[:8], run_size(one), one.node.metrics().exchanges_done) for one in again]
    for one in again:
        one.stop()
    made = sum(trained(one) - before for one, before in zip(again, began, strict=True))
    rate = made / (time.monotonic() - since_s)
    news = 2 * rate  # One or two seconds of training, as old as what nodes know.
    uncounted = uncounted_s * rate / 3
    # Exchanges keep the sum of the numbers. A node that a busy machine held up lies behind the others for a while.
    numbers = [one.side.network.peer.local.progress.samples for one in again]
    least, most = min(saved) + made - news - uncounted, max(saved) + made + news
    assert least <= sum(numbers) / 3 <= most, (exchanged, saved, made, numbers, uncounted)


# -- two runs meet ---------------------------------------------------------------------------------------------------
def spread_from(model, target):
    return max(float((weights - target).abs().max()) for weights in model.state_dict().values())


def introduce(one, other):
    address = parse_address(other.node.address)
    one.side.network.call(lambda: one.side.network.runtime.connector.dial(address, None))


def test_another_runs_weights_that_prove_worse_are_put_back(train, until, tmp_path, quick):
    config = dataclasses.replace(quick, merge="never")  # This node takes over nothing itself.
    bad, good = linear(1), linear(2)
    larger = train(bad, work=pull(bad, 30.0), config=config)
    until(lambda: trained(larger) > 500)
    optimizer = torch.optim.SGD(good.parameters(), lr=0.1, momentum=0.9)
    ours = train(good, optimizer, work=pull(good, 1.0), state_dir=tmp_path)
    until(lambda: len(ours.side.network.peer.own_run.trial.own_losses) >= 4 and spread_from(good, 1.0) < 0.1)
    run = run_id(ours)
    larger.do(lambda node: node.step(samples=20 * trained(larger)))
    introduce(ours, larger)
    joining = ours.side.network.peer.joining
    until(lambda: ours.side.run.before_merge_path is not None and joining.failed_trials, seconds=60.0)
    until(lambda: spread_from(good, 1.0) < 0.1)
    assert run_id(ours) == run
    kept = checkpoint.load(tmp_path / "before-merge.safetensors")
    assert kept.meta["run_id"] == run.hex()
    assert all(float((kept.tensors[name] - 1.0).abs().max()) < 0.1 for name in good.state_dict())


def test_another_runs_weights_that_are_no_worse_stay(train, until, quick):
    first, second = linear(1), linear(2)
    larger = train(first, work=pull(first, 1.0))
    until(lambda: trained(larger) > 500)
    ours = train(second, work=pull(second, 1.0))
    until(lambda: len(ours.side.network.peer.own_run.trial.own_losses) >= 4)
    larger.do(lambda node: node.step(samples=20 * trained(larger)))
    introduce(ours, larger)
    until(lambda: run_id(ours) == run_id(larger), seconds=60.0)
    assert ours.side.run.before_merge_path is not None
    assert ours.side.run.before_merge_path.exists()


# -- finished --------------------------------------------------------------------------------------------------------
@pytest.fixture
def finished(train, tmp_path):
    """Return a node that has ended after it finished its run, and the samples behind the final weights."""
    first = train(linear(1), state_dir=tmp_path)

    def finish(node):  # The loop trains on afterwards, and its samples do not belong to the final weights.
        node.step(samples=10)
        node.finish(0.1)
        return node.swarm_samples

    samples = first.do(finish)
    assert first.node.finished
    assert first.node.metrics().model_file is None, "the file is the node's own"
    first.stop()
    return first, samples


def test_a_node_that_returns_has_the_final_weights_until_somebody_deletes_the_mark(finished, train, tmp_path):
    first, samples = finished
    again = train(linear(2), state_dir=tmp_path)
    assert again.node.finished
    assert spread(again.model, first.model) == 0.0
    assert run_id(again) == run_id(first)
    assert again.node.swarm_samples >= samples
    again.stop()
    (tmp_path / "finished").unlink()
    assert not train(linear(1), state_dir=tmp_path).node.finished


@pytest.mark.usefixtures("finished")
@pytest.mark.parametrize("spoil", [Path.unlink, lambda file: file.write_bytes(b"cut off")])
def test_a_node_whose_run_is_finished_and_whose_weights_are_gone_says_so(tmp_path, quick, spoil):
    spoil(tmp_path / "final.safetensors")
    with pytest.raises(LocalError, match=r"is finished, and its weights cannot be taken.*Delete its file 'finished'"):
        Node(linear(2), state_dir=tmp_path, config=quick).start()


@pytest.mark.usefixtures("finished")
def test_another_model_in_the_directory_of_a_finished_run_is_told_what_to_do(tmp_path, quick):
    with pytest.raises(LocalError, match=r"holds another model.*Delete its file 'finished' to begin anew"):
        Node(torch.nn.Linear(3, 3), state_dir=tmp_path, config=quick).start()


def test_final_weights_that_cannot_be_kept_are_told_and_the_run_is_finished(train, tmp_path, caplog):
    first = train(linear(1), state_dir=tmp_path)
    (tmp_path / "final.safetensors").mkdir()
    first.do(lambda node: node.finish(0.1))
    assert first.node.finished
    assert any("The final weights are not kept in the state directory: " in one.message for one in caplog.records)


def test_a_late_comer_has_the_final_weights_before_those_who_finished_are_gone(train, until):
    final, late = linear(1, 1_000_000), linear(2, 1_000_000)
    first = train(final)
    until(lambda: trained(first) > 100)
    second = Trainee(late, seeds=[first.node.address])
    second.start()
    until(lambda: first.side.network.peer.donating.table or second.running.is_set())
    first.do(lambda node: node.finish())
    first.stop()
    assert second.running.wait(30)
    assert run_id(second) == run_id(first)
    assert spread(late, final) == 0.0
    second.stop()


def test_a_checkpoint_says_that_its_run_is_finished(train, tmp_path):
    first = train(linear(1))
    first.do(lambda node: node.finish(0.1))
    first.do(lambda node: node.save(tmp_path / "run"))
    first.stop()
    again = train(linear(2))
    assert not again.node.finished
    assert again.do(lambda node: node.load(tmp_path / "run"))["finished"] is True
    assert again.node.finished


def test_of_four_donors_one_that_gives_another_model_leaves_no_trace(train, until, quick, monkeypatch):
    config = tuned(quick, mix_every_steps=10**6, chunk_elements=1024)
    models = [linear(1, 20_000) for _ in range(4)]
    donors = [train(models[0], config=config)]
    donors += [train(model, config=config, seeds=[donors[0].node.address]) for model in models[1:]]
    until(lambda: all(len(one.side.view.owners) == 4 for one in donors))
    with torch.no_grad():
        for weights in models[2].parameters():
            weights.fill_(50.0)
    # It must know three donors before it asks: two that differ cannot show which one is odd.
    monkeypatch.setattr("gossip.state_transfer.runs.FIRST_TABLE_S", 2.0)
    late = linear(2, 20_000)
    newcomer = train(late, config=config, seeds=[donors[0].node.address])
    assert run_id(newcomer) == run_id(donors[0])
    assert spread(late, models[0]) == 0.0


def test_a_mapping_that_trained_a_run_is_known_again_and_not_kept():
    model = {"w": torch.zeros(2)}
    kept = weakref.ref(model["w"])
    running.note_run(b"run", model)
    assert not running.left_runs(model)
    tensor = model.pop("w")
    model["w"] = torch.zeros(2)  # As a later mapping at the same address.
    assert running.left_runs(model) == {b"run"}
    del tensor
    assert kept() is None


def test_a_closed_node_notes_its_run_once(quick):
    with Node(linear(1), config=quick) as node:
        node.step(samples=4)
    assert running.trained_runs()
    running.trained_runs().clear()  # As in another thread, in which the collector may drop the node.
    node.close()
    assert not running.trained_runs()
