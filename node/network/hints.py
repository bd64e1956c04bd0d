"""Hints that the network thread writes, and that a training loop reads without locks."""

import math
import threading

from gossip.config import Config
from gossip.peer import Peer


class LoopHints:
    """Plain numbers that the network thread writes after each decision, so that the loop decides without asking it."""

    def __init__(self, config: Config) -> None:
        self.has_interval_in_steps = config.interval_steps is not None  # Otherwise a clock alone times the mixes.
        self.is_lockstep = config.max_version_gap is not None  # The loop waits for mixes that take long.
        self.due_at_step: float = 0  # The step count at which the next mix is due; infinite if steps do not time it.
        self.mix_at = math.inf  # The earliest time at which that mix can begin, as far as it is known.
        self.must_wait = False  # The loop must wait at its boundary, because a mix exceeds max_version_gap.

    def release(self) -> None:
        """Forget the next mix, and let the loop continue: the network side has ended by a fault."""
        self.due_at_step = self.mix_at = math.inf
        self.must_wait = False

    def update_from(self, peer: Peer) -> bool:
        """Copy the hints from the peer after a decision. Return True if a waiting loop may continue."""
        due_steps, self.mix_at = peer.initiator.next_mix
        self.due_at_step = due_steps if self.has_interval_in_steps else math.inf
        if not self.is_lockstep:
            return False
        had_to_wait, self.must_wait = self.must_wait, peer.view.is_held
        return had_to_wait and not self.must_wait


class WakeEvent:
    """An event that wakes a waiting training loop. Setting it costs less than threading.Event while no thread waits."""

    def __init__(self) -> None:
        self.event, self.is_set, self.has_waiter = threading.Event(), False, False

    def set(self) -> None:
        self.is_set = True
        # Dekker's handshake: set `is_set`, then read `has_waiter`; `wait()` does the reverse.
        if self.has_waiter:
            self.event.set()

    def clear(self) -> None:
        self.is_set = False

    def wait(self, timeout_s: float) -> None:
        self.event.clear()
        self.has_waiter = True
        if not self.is_set:
            self.event.wait(timeout_s)
        self.has_waiter = False
