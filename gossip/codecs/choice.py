"""The choice of a link's codec, and of the local steps between two mixes, by their costs in time."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

AUTO = "auto"
"""The setting that leaves the codec to each link, or the interval to each node."""

# The codecs to choose from, with their bytes as a share of fp32's.
BYTES_SHARE: Mapping[str, float] = {"fp32": 1.0, "bf16": 0.5, "int8": 0.2510}

# The CPU time of an exchange, as a multiple of what copying its vector takes in memory (`make bench`, the default with
# 40 MB). The first is the training thread's at its boundary, including both passes of a correction. The second is for
# transfer, checks and averaging.
BOUNDARY_COPIES = 3.0
CARRYING_COPIES = 17.0
# The CPU time of an exchange of few elements: messages, decisions and turns of the interpreter. A mix slows a loop of
# 0.4 ms a step by 1.5 ms on a slow machine, and takes 0.4 ms on a fast one.
EXCHANGE_S = 1e-3


@dataclass(frozen=True, slots=True)
class Machine:
    """The cost of exchanges on one machine, in seconds of one core for a GB of float32.

    Attributes:
        coding_s_per_gb: To encode a vector and to subtract the partner's, beyond fp32's time, by codec.
        cores: The processors that training and exchanges share.
        copy_s_per_gb: To copy a vector in memory.
        element_weight: The number of real elements for each element of a smaller simulated model.
    """

    coding_s_per_gb: Mapping[str, float]
    cores: int = 2
    copy_s_per_gb: float = 0.08
    element_weight: float = 1.0

    def coding_s(self, codec: str) -> float:
        """Return the cost of coding in this codec; one that was not measured counts as int8."""
        return self.element_weight * self.coding_s_per_gb.get(codec, self.coding_s_per_gb["int8"])

    def work_s(self, codec: str) -> float:
        """Return how much an exchange delays training: the boundary stops it, and the cores share the rest."""
        copy_s = self.element_weight * self.copy_s_per_gb
        return BOUNDARY_COPIES * copy_s + (CARRYING_COPIES * copy_s + self.coding_s(codec)) / self.cores


# Measured by `make bench-codecs`, with the copies of a virtual EPYC. The simulator uses these constants, so that it
# decides alike on every machine.
COMPILED = Machine({"fp32": 0.0, "bf16": 0.03, "int8": 0.08})
NUMPY = Machine({"fp32": 0.0, "bf16": 0.49, "int8": 0.95})

BYTES_PER_ELEMENT_STEP = 0.5
"""The most bytes that mixing may send for each element and local step: fp32 every 8 steps."""

# The interval that a model's version counts as one mixing round if no number is set, and the shortest while exchanges
# fail.
NOMINAL_STEPS = 8
SLACK = 0.05  # The share by which an interval may be shorter than its limits: int8 needs 0.4 % for its scales.
MAX_INTERVAL_STEPS = 64  # With longer intervals nodes drift apart on any data.
MIN_STEP_S = 1e-9  # A shorter step was not timed.
# The largest share of an interval that an exchange may take: a longer one delays the next mix.
MAX_LINK_SHARE = 1.0


def fastest_codec(rate_mb_s: float | None, machine: Machine) -> str:
    """Return the codec with the least time for sending and coding at this rate in MB/s.

    With the compiled passes int8 wins below 5,000 MB/s, which few sockets exceed. With numpy fp32 wins above about
    1,000 MB/s, int8 below about 540 MB/s, and bf16 between them. At an infinite rate fp32 wins. The leanest codec
    serves while the rate is unknown, since it wins on most links. Coarser codecs trade accuracy for bytes, so only the
    user chooses them.
    """
    if rate_mb_s is None or rate_mb_s <= 0:
        return tuple(BYTES_SHARE)[-1]
    return min(tuple(BYTES_SHARE), key=lambda name: BYTES_SHARE[name] * 1000.0 / rate_mb_s + machine.coding_s(name))


@dataclass(frozen=True, slots=True)
class ExchangeCost:
    """The cost of one exchange: ``elements`` mixed in ``codec``, ``sent_bytes`` each way, for ``seconds``."""

    elements: int
    codec: str
    sent_bytes: int
    seconds: float


def mix_interval(
    step_s: float, exchange: ExchangeCost, machine: Machine, share: float, is_failing: bool = False
) -> int:
    """Return the fewest local steps between two mixes within four limits, from 1 to ``MAX_INTERVAL_STEPS``.

    - Mixing sends no more bytes than fp32 every 8 steps, whatever the link.
    - An exchange ends before the next one is due.
    - Mixing costs at most ``share`` of the training time (:meth:`Machine.work_s`).
    - If exchanges fail, it is at least ``NOMINAL_STEPS``. Retries keep the slots of both sides: with 30 % of exchanges
      failing, 32 peers that tried to mix every 2 steps finished 58 mixes each, and every 8 steps 107.

    Args:
        step_s: Seconds of a local step. Below ``MIN_STEP_S``, without a clock, only the bytes count.
        exchange: The current cost of an exchange.
        machine: The costs on this machine.
        share: The share of a step's time that mixing may cost, above 0.
        is_failing: True if many of the last exchanges failed.
    """
    min_steps = NOMINAL_STEPS if is_failing else 1
    by_bytes = exchange.sent_bytes / (BYTES_PER_ELEMENT_STEP * max(exchange.elements, 1))
    if step_s < MIN_STEP_S:
        return max(min_steps, whole_steps(by_bytes))
    # An element has 4e-9 GB of float32.
    work_s = EXCHANGE_S + 4e-9 * exchange.elements * machine.work_s(exchange.codec)
    by_time = max(exchange.seconds / MAX_LINK_SHARE, work_s / share) / step_s
    return max(min_steps, whole_steps(max(by_bytes, by_time)))


def steps_for_bytes(share: float) -> int:
    """Return the shortest interval that so many bytes allow, as a share of fp32's; less than int8's count as those."""
    return whole_steps(4.0 * max(share, BYTES_SHARE["int8"]) / BYTES_PER_ELEMENT_STEP)


def whole_steps(steps: float) -> int:
    """Return a number of whole steps, rounded up except for a share of ``SLACK``, from 1 to ``MAX_INTERVAL_STEPS``."""
    return max(1, min(math.ceil(min(steps, 2 * MAX_INTERVAL_STEPS) * (1.0 - SLACK)), MAX_INTERVAL_STEPS))
