"""The line of `gossip local` on the agreement of the models, for hand-written rows of the nodes' logs."""

import json

import pytest

from node.child import Child
from node.cli.agreement import ADVICE, describe_agreement, describe_file


class Ended(Child):
    """A child whose process has ended."""

    code = 0


def child(tmp_path, number, *rows, nodes=("a",)):
    """Return a child that has logged these rows: (node, event, fields)."""
    made = Ended(number, None, *(tmp_path / f"{number}.{kind}" for kind in ("jsonl", "out", "err")))
    listening = [(node, "listening", {"address": f"h:{port}"}) for port, node in enumerate(nodes)]
    for node, event, fields in (*listening, *rows):
        made.read({"t": 1.0, "id": node, "event": event, **fields})
    return made


def settled(digest, distance=0.0, tensor="", node="a", steps=10):
    row = {"sentence": "Settled.", "digest": digest, "distance": distance, "tensor": tensor, "steps": steps}
    return node, "settled", row


def steps(count, event="progress", node="a"):
    return node, event, {"steps": count}


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        ([settled("aa"), settled("aa"), settled("aa", None)], "The nodes agree to the bit."),
        (
            [settled("aa", 3e-7, "layer.weight"), settled("bb", 1e-7, "layer.bias"), settled("cc", 2e-7, "x")],
            "The nodes agree: largest relative difference 3e-07 (layer.weight).",
        ),
        (
            [settled("aa", 0.0), settled("bb", 0.02, "layer.bias"), settled("aa", 0.01, "layer.bias")],
            "The nodes do not agree: node 1 differs from nodes 0 and 2, largest relative difference 0.02 (layer.bias).",
        ),
        (
            [settled("aa", 4.0), settled("bb", 18.0, "1.running_var"), settled("cc", 9.0)],
            "The nodes do not agree, and all differ: largest relative difference 2e+01 (1.running_var).",
        ),
        (
            [settled("aa", None), settled("bb", None), settled("aa", None)],
            "The nodes do not agree: node 1 differs from nodes 0 and 2, largest relative difference unknown.",
        ),
        (
            [settled("aa"), settled("aa"), settled("bb", None)],  # It has changed its weights since.
            "The nodes do not agree: node 2 differs from nodes 0 and 1, largest relative difference unknown.",
        ),
        ([None, None, None], f"The nodes did not settle at the end, so their models differ: {ADVICE}."),
        (
            [settled("aa"), None, settled("aa")],
            f"Nodes 0 and 2 agree to the bit. Node 1 did not settle at the end: {ADVICE} on all nodes.",
        ),
        ([None, settled("aa"), None], f"Nodes 0 and 2 did not settle at the end: {ADVICE} on all nodes."),
    ],
)
def test_the_sentence_says_which_nodes_agree_and_how_far_others_differ(tmp_path, rows, sentence):
    children = [child(tmp_path, number, *([row] if row else [])) for number, row in enumerate(rows)]
    assert describe_agreement(children) == [sentence]


def test_a_loop_that_trained_on_after_it_had_settled_did_not_settle_at_the_end(tmp_path):
    trained_on = [settled("aa"), steps(11, "final")]
    stayed = [settled("aa"), steps(10), steps(10, "final")]
    again = [settled("aa"), steps(20), settled("bb", steps=20), steps(20, "final")]
    assert describe_agreement([child(tmp_path, n, *stayed) for n in range(2)]) == ["The nodes agree to the bit."]
    assert describe_agreement([child(tmp_path, n, *again) for n in range(2)]) == ["The nodes agree to the bit."]
    (told,) = describe_agreement([child(tmp_path, n, *trained_on) for n in range(2)])
    assert told.startswith("The nodes did not settle at the end")


def test_each_model_of_a_script_with_several_nodes_has_a_sentence(tmp_path):
    rows = [settled("aa", node="g"), settled("cc", node="d")], [settled("aa", node="G"), settled("dd", 0.5, node="D")]
    children = [child(tmp_path, 0, *rows[0], nodes=("g", "d")), child(tmp_path, 1, *rows[1], nodes=("G", "D"))]
    assert describe_agreement(children) == [
        "The nodes of model 1 agree to the bit.",
        "The nodes of model 2 do not agree, and all differ: largest relative difference 0.5.",
    ]


def test_a_node_that_begins_when_another_of_its_process_has_ended_takes_its_place(tmp_path):
    first = child(tmp_path, 0, settled("aa"), steps(5, "final"))
    first.read({"t": 2.0, "id": "b", "event": "listening", "address": "h:7"})
    assert (len(first.nodes), first.address, first.figures) == (1, "h:7", {})
    second = child(tmp_path, 1, steps(5))
    second.read({"t": 2.0, "id": "b", "event": "listening", "address": "h:7"})
    second.read({"t": 2.0, "id": "b", "event": "progress", "steps": 1})
    assert (len(second.nodes), second.address, second.figures["steps"]) == (2, "h:0", 5)


def test_a_node_that_listens_again_takes_its_own_place(tmp_path):
    one = child(tmp_path, 0, ("a", "final", {"steps": 1}), ("b", "progress", {"steps": 2}), nodes=("a", "b"))
    one.read({"t": 2.0, "id": "b", "event": "listening", "address": "h:9"})
    assert [node.id for node in one.nodes] == ["a", "b"]


def test_nothing_is_said_of_one_node_and_of_nodes_that_failed(tmp_path):
    one, other = child(tmp_path, 0), child(tmp_path, 1)
    other.code = 1
    assert describe_agreement([one]) == describe_agreement([one, other]) == []


def test_rows_without_an_id_are_those_of_the_only_node(tmp_path):
    one = child(tmp_path, 0, nodes=())
    one.log.write_text("".join(json.dumps({"t": 1, "event": "listening", "address": f"h:{n}"}) + "\n" for n in (1, 2)))
    one.new_rows()
    assert (len(one.nodes), one.address) == (1, "h:2")


def test_the_first_file_of_the_model_is_named_with_the_call_that_loads_it(tmp_path):
    other = child(tmp_path, 0, steps(3))
    assert describe_file([other]).startswith("No node has saved its model: call node.export")
    (_, _, figures) = steps(3)
    saved = child(tmp_path, 1, ("a", "final", figures | {"model_file": "run.safetensors"}))
    assert "model.load_state_dict(safetensors.torch.load_file('run.safetensors'))" in describe_file([other, saved])
