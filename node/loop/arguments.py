"""The values that a loop gives `node.step`, checked there: a wrong one would show elsewhere and later, or never."""

import math
from typing import Any

import torch

from gossip.errors import ConfigError


def checked_samples(samples: Any) -> int:
    """Return a step's samples as an int of its own: a tensor would change the count with the loop's next value.

    Raises:
        ConfigError: It is no whole number of at least 0.
    """
    if type(samples) is int and samples >= 0:
        return samples
    try:
        if isinstance(samples, bool | str) or shape_of(samples) not in ((), (1,)):
            raise TypeError
        count = int(samples)
        if count != samples or count < 0:  # A fraction, or below 0. NaN and infinities have raised.
            raise ValueError
    except (TypeError, ValueError, OverflowError, RuntimeError):
        raise ConfigError(
            f"samples is {shown(samples)}: give the whole number of samples in this step, at least 0."
        ) from None
    return count


def checked_loss(loss: Any) -> Any:
    """Return a loss that is a scalar, still on its device, or None.

    Raises:
        ConfigError: It is something else.
    """
    if loss is None or type(loss) is float:
        return loss
    if isinstance(loss, torch.Tensor):
        is_scalar = loss.numel() == 1 and not loss.is_complex()
    elif shape := shape_of(loss):  # Reading an array of JAX would wait for its device.
        is_scalar = math.prod(shape) == 1
    else:
        is_scalar = not isinstance(loss, str) and is_number(loss)
    if not is_scalar:
        raise ConfigError(f"loss is {shown(loss)}: give a scalar, as loss.mean() is, or leave it out.")
    return loss


def checked_rate(rate: Any) -> float:
    """Return a learning rate as a float.

    Raises:
        ConfigError: It is no finite number of at least 0.
    """
    if isinstance(rate, str) or not is_number(rate) or not 0 <= float(rate) < math.inf:
        raise ConfigError(f"lr is {shown(rate)}: give the learning rate, or leave it out.")
    return float(rate)


def is_number(value: Any) -> bool:
    try:
        float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return False
    return True


def shape_of(value: Any) -> tuple[int, ...]:
    """Return the shape of a tensor or array; () for a number."""
    return tuple(getattr(value, "shape", ()))


def shown(value: Any) -> str:
    """Return a short text of a value that does not fit."""
    shape = shape_of(value)
    return f"a {type(value).__name__} of shape {shape}" if shape else repr(value)[:80]
