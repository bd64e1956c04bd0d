"""A scenario's data set as tensors: training samples, held-out samples, and the client of each training sample."""

from dataclasses import dataclass

import torch

from gossip.errors import DataError
from sim import plugins
from sim.learning import corpora

# The number of held-out samples is limited, evenly spaced, because an evaluation costs a forward pass over all of them
# for each peer. With 1,000 the standard error of an accuracy is at most 1.6 points for one peer.
TEST_SAMPLES = 1000
# Fewer windows of text are enough, because each predicts CONTEXT bytes: 8,192 predictions.
TEST_WINDOWS = 128
CONTEXT = 64  # Bytes in a window of text.
TOKENS = (torch.int32, torch.int64)  # Types of x that hold token ids; smaller integers hold pixels.


@dataclass(frozen=True, slots=True, kw_only=True)
class Dataset:
    """A data set as tensors on the CPU.

    Attributes:
        name: Its name in a scenario.
        x_train, x_test: float32 (samples, ...), or token ids, int64 (samples, ...). For text: bytes, uint8 (samples,
            context).
        y_train, y_test: Class numbers, int64 (samples,), or one for each position, (samples, ...); or real numbers,
            float32 (samples, ...). For text: x shifted by one byte.
        clients: The client of each training sample, int64 (samples,).
        picture: The shape of a sample that is a picture.
    """

    name: str
    x_train: torch.Tensor
    y_train: torch.Tensor
    x_test: torch.Tensor
    y_test: torch.Tensor
    clients: torch.Tensor | None = None
    picture: tuple[int, int, int] | None = None  # Channels, height, width.

    @property
    def tokens(self) -> bool:
        """Return True if x holds token ids, which a module receives as int64."""
        return not self.x_train.is_floating_point()

    @property
    def labelled(self) -> bool:
        """Return True if y holds class numbers, not real numbers."""
        return not self.y_train.is_floating_point()

    @property
    def text(self) -> bool:
        """Return True if a model predicts a token for each position of a sample."""
        return self.tokens and self.labelled and self.y_train.dim() > 1

    @property
    def outputs(self) -> int:
        """Return the number of outputs for a sample, or for a position of it: one per class, or the size of y."""
        if not self.labelled:
            return self.y_train[0].numel()
        if self.y_train.dtype == torch.uint8:
            return 256
        return 1 + int(max(self.y_train.max(), self.y_test.max()))


def load(name: str) -> Dataset:
    """Load a data set by its name in a scenario, or by "module:function".

    The function takes no arguments and returns the tensors (x_train, y_train, x_test, y_test). x is float32, or int64
    for tokens. y is int64 class numbers from 0, for a sample or for each position of it, or float32. For text both are
    uint8 (samples, context). A fifth tensor may number each training sample's client.

    Raises:
        DataError: Data is missing or has another form.
        ConfigError: The function cannot be found.
    """
    if name == "digits":
        return _dataset(name, corpora.digits(), TEST_SAMPLES, picture=(1, 8, 8))
    if name == "mnist":
        return _dataset(name, corpora.mnist(), TEST_SAMPLES, picture=(1, 28, 28))
    if name == "fashion-mnist":
        return _dataset(name, corpora.fashion_mnist(), TEST_SAMPLES, picture=(1, 28, 28))
    if name == "shakespeare":
        return _shakespeare()
    return _custom(name)


def _dataset(
    name: str,
    split: corpora.Split,
    max_held_out: int,
    *,
    clients: torch.Tensor | None = None,
    picture: tuple[int, int, int] | None = None,
) -> Dataset:
    """Return the data set with at most ``max_held_out`` samples for tests, evenly spaced."""
    x_train, y_train, x_test, y_test = split
    chosen = torch.linspace(0, len(x_test) - 1, min(max_held_out, len(x_test))).long()
    return Dataset(
        name=name, x_train=x_train, y_train=y_train, x_test=x_test[chosen], y_test=y_test[chosen], clients=clients,
        picture=picture,
    )  # fmt: skip


def _shakespeare() -> Dataset:
    """Load Shakespeare as windows of text that do not overlap, so that an epoch reads each byte once.

    The last tenth of every role is held out, and each role is a client.
    """
    texts = [text for _, text in sorted(corpora.shakespeare().items())]
    pieces = [_windows(text[: len(text) * 9 // 10]) for text in texts]
    train = torch.cat(pieces)  # (windows, context + 1)
    test = _windows(b"\n".join(text[len(text) * 9 // 10 :] for text in texts))
    clients = torch.repeat_interleave(torch.arange(len(pieces)), torch.tensor([len(piece) for piece in pieces]))
    split = train[:, :-1], train[:, 1:], test[:, :-1], test[:, 1:]
    return _dataset("shakespeare", split, TEST_WINDOWS, clients=clients)


def _windows(text: bytes) -> torch.Tensor:
    """Cut text into windows plus one byte, uint8 (windows, context + 1); an incomplete last one is dropped."""
    count = len(text) // (CONTEXT + 1)
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)[: count * (CONTEXT + 1)].view(count, CONTEXT + 1)


def _custom(name: str) -> Dataset:
    """Load the user's data set by calling its function, and check what it returns."""
    with torch.random.fork_rng(devices=[]):  # Every run, level and process loads the same data.
        torch.manual_seed(0)
        returned = plugins.find(name, "task.dataset")()
    parts = tuple(returned) if isinstance(returned, tuple | list) else ()
    if len(parts) not in (4, 5) or not all(isinstance(part, torch.Tensor) for part in parts):
        wanted = "the tensors (x_train, y_train, x_test, y_test), or a fifth with clients"
        raise DataError(f"task.dataset = {name!r} must return {wanted}.")
    x_train, y_train, x_test, y_test = (part.detach().cpu() for part in parts[:4])
    if not len(x_train) or not len(x_test) or (len(x_train), len(x_test)) != (len(y_train), len(y_test)):
        raise DataError(f"{name} must return as many labels as samples, and at least one to train on and one to test.")
    if x_train.shape[1:] != x_test.shape[1:]:
        raise DataError(f"{name} returns training samples of shape {list(x_train.shape[1:])} and others for the test.")
    split: corpora.Split
    if x_train.dtype == y_train.dtype == x_test.dtype == y_test.dtype == torch.uint8 and x_train.dim() == 2:
        if (x_train.shape, x_test.shape) != (y_train.shape, y_test.shape):
            raise DataError(f"{name} returns text, whose y must have the shape of x and lie one byte ahead.")
        split = x_train, y_train, x_test, y_test
    else:
        real = y_train.is_floating_point()
        if real != y_test.is_floating_point() or y_train.shape[1:] != y_test.shape[1:]:
            raise DataError(f"{name} returns y of one kind or shape for training and of another for the test.")
        if not real and min(int(y_train.min()), int(y_test.min())) < 0:
            raise DataError(f"{name} must return class numbers from 0 as y, or real numbers as float32.")
        xs = [x.long() if x.dtype in TOKENS else x.float() for x in (x_train, x_test)]
        ys = [y.float() if real else y.long() for y in (y_train, y_test)]
        split = xs[0], ys[0], xs[1], ys[1]
    clients = parts[4].detach().cpu().long() if len(parts) == 5 else None
    if clients is not None and clients.shape != (len(x_train),):
        raise DataError(f"{name} must return one client number for each training sample as its fifth tensor.")
    shape = tuple(x_train.shape[1:])
    # A sequence has many predictions in one sample, so fewer samples are held out.
    max_held_out = TEST_WINDOWS if y_train.dim() > 1 and not y_train.is_floating_point() else TEST_SAMPLES
    return _dataset(name, split, max_held_out, clients=clients, picture=shape if len(shape) == 3 else None)
