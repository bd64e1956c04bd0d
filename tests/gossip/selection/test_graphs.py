"""Graphs read from files, and which member plays which node of one."""

import pytest

from gossip.errors import ConfigError
from gossip.ids import Address, PeerId
from gossip.selection.graphs import Graph


def read(tmp_path, text):
    path = tmp_path / "links.txt"
    path.write_text(text)
    return Graph.from_file(path)


def test_a_file_names_ranks_one_link_a_line(tmp_path):
    graph = read(tmp_path, "# a square\n0 1\n\n1   2 # and so on\n2 3\n3 0\n0 3\n")
    assert graph.kind == "rank"
    assert graph.names == (0, 1, 2, 3)
    assert graph.links == ((1, 3), (0, 2), (1, 3), (0, 2))
    assert graph.max_degree == 2


def test_a_file_may_name_addresses_or_ids(tmp_path):
    a, b, c = (PeerId(bytes([first] * 16)) for first in (0x11, 0xAB, 0xCD))
    graph = read(tmp_path, "10.0.0.5:7700 [::1]:7700\n")
    here, there = Address("10.0.0.5", 7700), Address("::1", 7700)
    played = graph.node_numbers([(a, there), (b, None), (c, here)])
    assert {graph.names[node]: peer for peer, node in played.items()} == {here: c, there: a}
    graph = read(tmp_path, "11111111 ABABABABAB\n")  # eight digits are no rank
    assert graph.kind == "id"
    assert graph.node_numbers([(a, None), (b, here), (c, there)]) == {a: 0, b: 1}


def test_members_beyond_the_ranks_of_a_graph_play_no_node():
    members = [(PeerId(bytes([i] * 16)), None) for i in range(6)]
    graph = Graph.from_text("0 1\n1 2\n2 3\n3 0")
    assert graph.node_numbers(members) == {peer: i for i, (peer, _) in enumerate(members[:4])}


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "has no links: write one a line"),
        ("# 0 1\n", "has no links"),
        ("0 1\n1 2 3\n", "line 2: '1 2 3' is no link: name two members"),
        ("0\n", "line 1: '0' is no link"),
        ("0 alice\n", "line 1: 'alice' names no member: write a rank"),
        ("0 -1\n", "'-1' names no member"),
        ("0 abcdef1\n", "'abcdef1' names no member"),
        ("0 1\n1 10.0.0.5:7700\n", "line 2: '10.0.0.5:7700' is an address after a rank: name all in one way"),
        ("0 host:port\n", "line 1: 'host:port' is not an address"),
        ("2 2\n", "line 1: '2' is linked with itself"),
        ("0 2\n", "names 2 and not 1: ranks count the members from 0"),
        ("1 2\n2 3\n", "names 3 and not 0"),
        ("0 1\n2 3\n3 4\n4 5\n", "no path leads from 0, 1 to 2, 3, 4 and 1 more; add a link"),
        ("aaaaaaaa bbbbbbbb\naaaaaaaa bbbbbbbbbb\n", "'bbbbbbbb' and 'bbbbbbbbbb' may be one member"),
        ("\n".join(f"0 {node}" for node in range(1, 10_001)), "names 10001 members: 10000 are the most"),
    ],
)
def test_a_file_that_is_no_connected_graph_is_refused_in_one_sentence(tmp_path, text, sentence):
    with pytest.raises(ConfigError) as error:
        read(tmp_path, text)
    assert sentence in str(error.value)
    assert "links.txt" in str(error.value)
    assert str(error.value).endswith(".")


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"Cannot read the graph .*nowhere.txt: No such file"):
        Graph.from_file(tmp_path / "nowhere.txt")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe0 1")
    with pytest.raises(ConfigError, match="is not a text"):
        Graph.from_file(tmp_path / "bytes")
