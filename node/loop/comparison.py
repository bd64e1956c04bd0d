"""The comparison of this loop with those of other members: datasets, drawn batches, constants and learning rates.

Each node states its own in four marks of its record. It tells once where another's differ, and of draws where they are
equal.
"""

import hashlib
import math
import struct
import time
from collections.abc import Callable

import torch

from gossip.ids import MemberRecord, short
from gossip.recent import Recent
from node.data.likeness import Likeness
from node.loop.network_side import NetworkSide
from node.model.inventory.constants import Constants
from node.observe.reduced import CONSTANTS, DATA, FIRST_LOSSES, RATE, mark_in, values_in

COMPARE_S = 0.5  # Seconds between two comparisons; each reads the records of the members that this node has linked.
MANY_MEMBERS = 100  # Above this number comparisons are so much rarer: a record takes 3 us to read.
# A first pass that is shorter than this waits for the others' marks, which take up to 0.75 s in a small swarm.
MARKS_S = 1.5
FEW_MEMBERS = 8
POLL_S = 0.02  # Seconds between two looks during that wait.
RATE_PERIOD_S = 10.0  # Seconds between two looks at this loop's learning rate.
RATE_CHANGE = 1.5  # The factor by which it must have changed to be stated again, since a record goes to all members.
RATES_APART = 4.0  # The ratio of two learning rates from which on they are told to differ.
RATES_APART_S = 30.0  # Seconds for which they must, since a schedule's steps come to nodes at slightly other times.
MAX_TOLD = 1_024  # Members remembered of which it was told that their data differ.
OTHER_PASSES = 3  # After so many passes of training over other data in a row the first data are no more this loop's.

Mark = tuple[float, int]


class DataComparison:
    """The marks of one node, in its training thread, compared with the marks of others.

    Args:
        network: The network thread.
        announce: Puts a mark into this node's record, or removes it.
    """

    def __init__(self, network: NetworkSide, announce: Callable[[str, Mark | None], None]) -> None:
        self.network, self.announce = network, announce
        self.data: Likeness | None = None  # The first dataset that this loop has divided.
        self.other_passes = 0  # Passes of training over other data since the last over that one.
        self.divided_at = 0.0  # The time of the first pass.
        self.losses: Mark | None = None  # Of the first two losses, if this loop divides no data.
        self.has_losses = False  # They are known, and perhaps say nothing.
        self.told_members = Recent[bytes, None](MAX_TOLD)  # Members whose data were told to differ.
        self.constants: Constants | None = None  # Those of the model, as they were before the first step.
        self.is_draw_told = self.are_constants_told = False
        self.rate, self.rate_read_at = 0.0, -math.inf  # The learning rate that was stated last, and when one was read.
        # The time from which on a member's rate is another one; None once this was told.
        self.rates_apart_since: dict[bytes, float] | None = {}
        self.has_stated = False  # There were marks when they were last published.
        self.is_awaited = False  # A few members have not stated their data yet.
        self.compared_at = 0.0

    @property
    def marks(self) -> dict[str, Mark | None]:
        """Return this node's marks."""
        data = self.data if self.other_passes < OTHER_PASSES else None
        return {
            DATA: None if data is None else (data.checksum, data.length),
            FIRST_LOSSES: self.losses if self.data is None else None,
            CONSTANTS: None if self.constants is None else self.constants.mark,
            RATE: (self.rate, 0) if self.rate else None,
        }

    def on_pass(self, data: Likeness, is_over: bool) -> None:
        """Handle the begin or the end of a pass over a dataset that is divided among the members."""
        if self.network.service.runtime is None or self.network.forked:
            return
        if is_over:
            if self.divided_at and time.monotonic() - self.divided_at < MARKS_S:
                self.wait_for_marks()
        elif self.data is None:
            self.data, self.divided_at = data, time.monotonic()
            self.publish()
        elif data.difference(self.data) is None:
            self.other_passes = 0
        # Phases of a training, of which a late member sees the last ones, and no evaluations.
        elif self.other_passes < OTHER_PASSES and torch.is_grad_enabled():
            self.other_passes += 1

    def publish(self) -> None:
        """Put the marks into this node's record, where a change of its run removes them."""
        self.has_stated = any(self.marks.values())
        own = self.network.peer.membership.me
        # Removals come first, because a record has no room for all marks.
        stated = values_in(own)
        for name, mark in sorted(self.marks.items(), key=lambda item: item[1] is not None):
            if stated.get(name) != mark:
                self.announce(name, mark)

    def wait_for_marks(self) -> None:
        """Wait for the others' marks, since a short program would end before they come."""
        self.divided_at, until = 0.0, self.divided_at + MARKS_S
        self.is_awaited = True
        while self.is_awaited and time.monotonic() < until:
            self.network.call(self.compare)
            self.network.sync()
            time.sleep(POLL_S)

    def compare_if_due(self, losses: tuple[float, float] | None, rate: Callable[[], float]) -> None:
        """Compare now and then, at a step boundary.

        Args:
            losses: The first two losses of this loop, if they are known.
            rate: Returns the learning rate of this loop, NaN if it is unknown.
        """
        now = time.monotonic()
        if losses is not None and not self.has_losses:
            self.losses, self.has_losses, self.compared_at = mark_of(*losses), True, 0.0
        if now - self.compared_at >= COMPARE_S * max(1, len(self.network.service.view.owners) // MANY_MEMBERS):
            self.compared_at = now
            if now - self.rate_read_at >= RATE_PERIOD_S:
                self.rate_read_at = now
                if ratio_of(current := rate(), self.rate) >= RATE_CHANGE:
                    self.rate = current
            if self.has_stated or any(self.marks.values()):  # The removal of the last mark is published too.
                self.publish()
            if self.has_stated:
                self.network.call(self.compare)

    def compare(self) -> None:
        """Compare this node's marks with the others': tell of other data of each member once, of the rest once in all.

        Runs in the network thread.
        """
        marks, data, peer = self.marks, self.data, self.network.peer
        records = peer.membership.run_members(peer.view.run_id)
        lacking = sum(mark_in(record, DATA) is None for record in records[: FEW_MEMBERS + 1])
        self.is_awaited = lacking > 0 and len(records) <= FEW_MEMBERS
        if self.rates_apart_since:
            here = {record.id for record in records}
            self.rates_apart_since = {one: since for one, since in self.rates_apart_since.items() if one in here}
        for record in records:
            told = values_in(record)  # Read once, for all marks.
            mark = told.get(DATA)
            if marks[DATA] is not None and mark is not None and data is not None and record.id not in self.told_members:
                difference = data.difference(Likeness(mark[1], mark[0]))
                if difference is not None:
                    self.told_members[record.id] = None
                    self.network.notify("data", (
                        f"Member {short(record.id)} {difference}: give all nodes the same data in the same order, or "
                        "some samples are trained twice and others by nobody."
                    ))  # fmt: skip
            if marks[FIRST_LOSSES] is not None and told.get(FIRST_LOSSES) == marks[FIRST_LOSSES]:
                self.tell_of_equal_draws(record)
            if self.constants is not None and (mark := told.get(CONSTANTS)) and self.constants.differ(mark):
                self.tell_of_constants(self.constants, record)
            self.compare_rates(record, told.get(RATE))

    def compare_rates(self, record: MemberRecord, mark: Mark | None) -> None:
        """Tell once that a member trains at another learning rate than this node, if it has done so for a while."""
        if self.rates_apart_since is None:
            return
        now, ours, theirs = time.monotonic(), self.rate, 0.0 if mark is None else mark[0]
        if not (ours > 0 and theirs > 0) or (ratio := ratio_of(ours, theirs)) < RATES_APART:
            self.rates_apart_since.pop(record.id, None)
        elif now - self.rates_apart_since.setdefault(record.id, now) >= RATES_APART_S:
            self.rates_apart_since = None
            high, low = (f"member {short(record.id)}", "this node")[:: 1 if theirs > ours else -1]
            self.network.notify("rate", (
                f"The learning rate of {high} is {ratio:.3g} times that of {low}: give the scheduler to "
                "node.schedule, so that the rates of all nodes follow the swarm's progress."
            ))  # fmt: skip

    def tell_of_constants(self, constants: Constants, record: MemberRecord) -> None:
        if not self.are_constants_told:
            self.are_constants_told = True
            self.network.notify("data", (
                f"The model of member {short(record.id)} was made with other values in tensors that do not travel "
                f"({constants}): if the model computes with them, the nodes train different functions. Register them "
                "as persistent buffers, or draw them from one seed on all nodes."
            ))  # fmt: skip

    def tell_of_equal_draws(self, record: MemberRecord) -> None:
        if not self.is_draw_told:
            self.is_draw_told = True
            self.network.notify("data", (
                f"The first losses of member {short(record.id)} and of this node are equal to the bit: both draw the "
                "same batches, and learn nothing from each other. Divide the data by node.loader or node.shard, or "
                "draw with another seed on each node."
            ))  # fmt: skip


def ratio_of(one: float, other: float) -> float:
    """Return the ratio of two learning rates, at least 1: inf if one of them is 0, NaN if one is unknown."""
    low, high = sorted((abs(one), abs(other)))
    return high / low if low else math.inf * high


def mark_of(first: float, second: float) -> Mark | None:
    """Return the mark of a loop's first two losses; None if they say nothing of its batches.

    Equal ones are constants. The first alone is the same everywhere if a last layer begins with zeros.
    """
    if first == second or not math.isfinite(second):
        return None
    digest = hashlib.blake2b(struct.pack("<d", first), digest_size=6).digest()
    return second, int.from_bytes(digest, "little")
