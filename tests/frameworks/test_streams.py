"""node.shards with the streams of webdataset and datasets, as docs/node.md shows it."""

import io
import itertools
import json
import re
import tarfile
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch.utils.data import DataLoader, IterableDataset

from gossip.errors import DataError
from tests.node.sharers import IDS, Swarm

pytestmark = [pytest.mark.frameworks, pytest.mark.filterwarnings("ignore")]  # Ignore the libraries' own warnings.

PAGE = (Path(__file__).parents[2] / "docs" / "node.md").read_text(encoding="utf-8")
SHARDS, SAMPLES = 40, 3


@pytest.fixture
def tars(tmp_path):
    """Write 40 tar files of three samples, each of which contains its own name."""
    names = []
    for shard in range(SHARDS):
        names.append(str(tmp_path / f"{shard:02}.tar"))
        with tarfile.open(names[-1], "w") as file:
            for sample in range(SAMPLES):
                info = tarfile.TarInfo(f"{shard:02}-{sample}.txt")
                text = info.name.encode()
                info.size = len(text)
                file.addfile(info, io.BytesIO(text))
    return names


def documented(shards):
    """Run the block of docs/node.md about webdataset, on a node with these shards."""
    (code,) = [block for block in re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL) if "webdataset" in block]
    namespace = {"node": SimpleNamespace(shards=lambda names: shards), "urls": []}
    exec(compile(code, "docs/node.md", "exec"), namespace)
    return namespace["dataset"]


def texts(samples):
    return Counter(sample["txt"] for sample in samples)


@pytest.mark.parametrize("workers", [0, 2])
def test_webdataset_reads_this_nodes_share_once_a_pass(tars, workers):
    pytest.importorskip("webdataset", reason="make test-frameworks")
    swarm = Swarm(*IDS[:3])
    read = Counter()
    for me in IDS[:3]:
        dataset = documented(swarm.shards(tars, me))
        loader = DataLoader(
            dataset, batch_size=None, num_workers=workers, multiprocessing_context="fork" if workers else None
        )
        read += texts(loader)
    assert len(read) == SHARDS * SAMPLES
    assert set(read.values()) == {1}


def test_a_webdataset_that_runs_follows_the_members(tars):
    pytest.importorskip("webdataset", reason="make test-frameworks")
    swarm = Swarm(*IDS[:4])
    stream = iter(documented(swarm.shards(tars, epochs=None)))
    early = texts(itertools.islice(stream, 6))
    swarm.set(IDS[0])
    rest = texts(itertools.islice(stream, SHARDS * SAMPLES + 3_000))
    assert len(early) <= len(rest) == SHARDS * SAMPLES, "it reads the files of the three that left"


def test_a_webdataset_that_makes_a_list_of_an_endless_share_is_refused(tars):
    wds = pytest.importorskip("webdataset", reason="make test-frameworks")
    with pytest.raises(DataError, match="These files come without end"):
        wds.WebDataset(Swarm(*IDS[:3]).shards(tars, epochs=None), shardshuffle=False)


class Rows(IterableDataset):
    def __init__(self, shards):
        self.shards = shards

    def __iter__(self):
        from datasets import load_dataset

        for name in self.shards:
            yield from load_dataset("json", data_files=name, split="train", streaming=True)


def test_datasets_streams_this_nodes_files_one_after_another(tmp_path):
    pytest.importorskip("datasets", reason="make test-frameworks")
    names = []
    for shard in range(12):
        names.append(str(tmp_path / f"{shard:02}.jsonl"))
        Path(names[-1]).write_text("".join(json.dumps({"txt": f"{shard}-{n}"}) + "\n" for n in range(SAMPLES)))
    swarm = Swarm(*IDS[:2])
    read = Counter()
    for me in IDS[:2]:
        read += texts(DataLoader(Rows(swarm.shards(names, me)), batch_size=None))
    assert len(read) == 12 * SAMPLES
    assert set(read.values()) == {1}
