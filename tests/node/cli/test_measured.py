"""`gossip plan --measure`: its queries to running nodes, and its treatment of impossible answers."""

import json

import pytest

from gossip.errors import LocalError
from gossip.ids import parse_address
from node.cli.links import query_nodes, scenario_tables
from sim.planner.world import World
from tests.node.trainees import alive, linear, mixed

A, B, C = "a" * 32, "b" * 32, "c" * 32


def answer(identity, **known):
    return {
        "id": identity,
        "members": [{"id": peer * 32, "rtt_s": rtt, "mb_s": rate} for peer, (rtt, rate) in known.items()],
    }


def test_a_node_tells_of_its_links_and_one_address_is_enough(train, until, called, monkeypatch):
    first = train(linear(1))
    second = train(linear(2), seeds=[first.node.address])
    until(mixed(first, second))
    until(lambda: alive(first) == alive(second) == 2)

    def known():
        try:
            return scenario_tables(query_nodes([parse_address(first.node.address)], None))
        except LocalError:
            return None

    until(lambda: known() is not None)
    table = known()
    assert table["peers"] == 2
    rtt_ms = table["network"]["latency"]["rtt_ms"]
    assert 0 < rtt_ms[0][1] == rtt_ms[1][0] < 1_000
    assert all(each["rate_mbit_s"] > 0 for each in table["fleet"])
    monkeypatch.setattr("sim.planner.command.plan", lambda links, table, **_: print(json.dumps(table)) or 0)
    done = called("plan", "--measure", first.node.address)
    assert done.returncode == 0
    assert json.loads(done.stdout)["peers"] == 2


def test_what_is_measured_is_a_world():
    table = scenario_tables([answer(A, b=(0.05, 2.0), c=(0.1, None)), answer(B, a=(0.06, 1.0)), answer(C)])
    latency = table["network"]["latency"]
    assert latency["rtt_ms"] == [[0, 50, 100], [50, 0, 75], [100, 75, 0]], (
        "the lesser of both, and where unknown the usual"
    )
    assert [each["rate_mbit_s"] for each in table["fleet"]] == [16, 16, 16]
    assert World.from_mapping(table, "measured", model_mb=1.0).scenario.peers == 3


@pytest.mark.parametrize("rtt", [None, "0.1", -1.0, 0, 1e9, float("nan"), float("inf"), True, 2**80])
def test_what_cannot_be_is_not_taken_for_a_link(rtt):
    with pytest.raises(LocalError, match="know no round trip"):
        scenario_tables([answer(A, b=(rtt, rtt)), answer(B)])


def test_nodes_that_nobody_asked_are_no_part_of_it():
    table = scenario_tables([answer(A, b=(0.05, 1e9), d=(0.001, 50.0)), answer(B)])
    assert table["peers"] == 2
    assert [each["rate_mbit_s"] for each in table["fleet"]] == [100, 100], "a rate that cannot be is none"
