"""The agreement of the models of a swarm of processes at its end, as `gossip local` reports it."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from node.child import Child
from node.storage.urls import is_url

# The largest relative difference of nodes that agree. Sums in another order differ by as much in float32.
AGREEMENT = 1e-6
ADVICE = "call node.settle(10, wait_s=60) at the end of the script"


def describe_agreement(children: Sequence[Child]) -> list[str]:
    """Return a sentence for each model of the script: do the nodes agree on it, by what they logged of `node.settle`?

    Processes that failed are left out. There is no sentence for a model that fewer than two nodes hold.
    """
    ended = [child for child in children if child.code == 0]
    models = max((len(child.nodes) for child in ended), default=0)
    sentences = []
    for place in range(models):
        rows = {child.number: child.nodes[place].settled for child in ended if len(child.nodes) > place}
        if len(rows) > 1:
            nodes = "The nodes" if models == 1 else f"The nodes of model {place + 1}"
            sentences.append(describe_model(nodes, rows))
    return sentences


def describe_file(children: Sequence[Child]) -> str:
    """Return a sentence on where the model is, by the first node that saved it, and how to load it."""
    files = [child.figures["model_file"] for child in children if child.figures.get("model_file")]
    if not files:
        return 'No node has saved its model: call node.export("model.safetensors") at the end of the script.'
    if is_url(files[0]):
        return f"The model is in {files[0]}: node.load({files[0]!r}) loads it, or safetensors.torch once it is a file."
    return f"The model is in {files[0]}: model.load_state_dict(safetensors.torch.load_file({files[0]!r})) loads it."


def describe_model(nodes: str, rows: dict[int, dict[str, Any] | None]) -> str:
    """Return a sentence on the agreement of nodes.

    Args:
        nodes: Their name in the sentence.
        rows: For each number of a node, the last row of its log that says how it settled; None if it did not.
    """
    settled = {number: row for number, row in rows.items() if row is not None}
    if not settled:
        return f"{nodes} did not settle at the end, so their models differ: {ADVICE}."
    others = [number for number in rows if number not in settled]
    if not others:
        return f"{nodes} {describe_settled(settled)}."
    rest = f"{named(others).capitalize()} did not settle at the end: {ADVICE} on all nodes."
    if len(settled) == 1:
        return rest
    return f"{named(list(settled)).capitalize()} {describe_settled(settled)}. {rest}"


def describe_settled(settled: dict[int, dict[str, Any]]) -> str:
    """Return in a clause whether nodes agree, by the rows that say how they settled."""
    by_digest: dict[str, list[int]] = defaultdict(list)
    for number, row in settled.items():
        by_digest[row["digest"]].append(number)
    if len(by_digest) == 1:
        return "agree to the bit"
    known = [row for row in settled.values() if row["distance"] is not None]
    difference = "largest relative difference unknown"
    largest = max(known, key=lambda row: float(row["distance"]), default={"distance": 0.0})
    if largest["distance"]:  # Nodes that agreed and have changed their weights since have no distance.
        tensor = f" ({largest['tensor']})" if largest["tensor"] else ""
        difference = f"largest relative difference {largest['distance']:.1g}{tensor}"
        if len(known) == len(settled) and largest["distance"] <= AGREEMENT:
            return f"agree: {difference}"
    most = max(by_digest.values(), key=len)
    if len(most) == 1:
        return f"do not agree, and all differ: {difference}"
    apart = [number for number in settled if number not in most]
    differ = "differs" if len(apart) == 1 else "differ"
    return f"do not agree: {named(apart)} {differ} from {named(most)}, {difference}"


def named(numbers: Sequence[int]) -> str:
    """Return the names of these nodes in words."""
    if len(numbers) == 1:
        return f"node {numbers[0]}"
    return f"nodes {', '.join(map(str, numbers[:-1]))} and {numbers[-1]}"
