"""The bytes that the passes of an exchange move for each element of a large model, counted and not timed."""

from collections import Counter

import numpy as np
import pytest
import torch

from gossip import kernel
from gossip.config import Config
from node.model.snapshot import ModelState
from tests.gossip.kernel.building import passes
from tests.node.conftest import until

ELEMENTS = 1 << 21
MOVED: Counter[str] = Counter()  # Bytes by the name of a pass, "numpy" for all of numpy's.


class Counted(np.ndarray):
    """A vector that counts the bytes of numpy's passes over itself and its slices."""

    def __array_ufunc__(self, ufunc, method, *inputs, out=None, **how):
        arrays = [one.view(np.ndarray) if isinstance(one, Counted) else one for one in (*inputs, *(out or ()))]
        how |= {"out": tuple(arrays[len(inputs) :])} if out else {}
        result = getattr(ufunc, method)(*arrays[: len(inputs)], **how)
        for one in (*arrays, *([] if out else [result])):
            if isinstance(one, np.ndarray):
                MOVED["numpy"] += one.nbytes
        return result

    def dot(self, other, out=None):
        MOVED["numpy"] += self.nbytes + other.nbytes
        return self.view(np.ndarray).dot(np.asarray(other), out)

    def __setitem__(self, where, value):
        self.view(np.ndarray)[where] = value
        MOVED["numpy"] += 2 * np.asarray(self.view(np.ndarray)[where]).nbytes


class CountingPasses:
    """The compiled passes, with the bytes of the vectors that each reads or writes, once; tables are not counted."""

    def __getattr__(self, name):
        found = getattr(passes(), name)
        if not callable(found):
            return found

        def counted(*arguments):
            buffers = [one for one in arguments[1:6] if not isinstance(one, float) and one is not None]
            MOVED[name] += sum(memoryview(one).nbytes for one in buffers)
            return found(*arguments)

        return counted


@pytest.mark.parametrize(
    ("codec", "expected"),
    [
        # Difference: theirs (which it replaces) and ours. Mix: difference, snapshot, phi, momentum and pull. Add_read:
        # the model and the update, then the model and its copy. Numpy: the sketch of the difference.
        ("fp32", {"difference": 12, "mix": 20, "add_read": 16, "numpy": 4}),
        # Blockwise: values and codes to encode; values, codes, decoded values and the difference to subtract.
        ("int8", {"blockwise": 18, "mix": 20, "add_read": 16, "numpy": 4}),
    ],
)
def test_an_exchange_of_a_large_model_passes_over_it_as_rarely_as_now(train, monkeypatch, codec, expected):
    monkeypatch.setattr(kernel, "passes", CountingPasses())
    plain = ModelState.buffer
    monkeypatch.setattr(ModelState, "buffer", lambda self, elements: plain(self, elements).view(Counted))

    def start(**options):
        x = torch.zeros(ELEMENTS)
        return train({"x": x}, None, lambda: x[::64].add_(torch.randn(ELEMENTS // 64)).sum(), config=config, **options)

    config = Config(codec=codec, mix_every_steps=8)
    one = start()
    other = start(seeds=[one.node.address])
    until(lambda: one.node.metrics().exchanges_done >= 2)  # Then memory and links stand.
    MOVED.clear()
    until(lambda: one.node.metrics().exchanges_done >= 12)
    for trainee in (one, other):
        trainee.stopping = True
        trainee.join(20)
    mixes = MOVED["mix"] / 20
    found = {name: moved / mixes for name, moved in MOVED.items()}
    assert found.keys() - {"squares"} == expected.keys()
    for name, moved in expected.items():  # An exchange may begin before the count, and end in it.
        assert found[name] <= 1.15 * moved, name
