"""What all adapters share, without a framework."""

from torch import nn

from node.adapters.adapter import Adapter


def test_tensors_that_an_iterator_names_are_named_for_each_node():
    head = nn.Linear(2, 2)
    options = Adapter(local=head.parameters(), copy=["order"], seeds=["127.0.0.1:1"]).options
    assert list(options["local"]) == list(options["local"]) == list(head.parameters())
    assert options["seeds"] == ["127.0.0.1:1"]
