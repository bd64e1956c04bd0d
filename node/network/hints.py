"""Hints that the network thread writes, and that a training loop reads without locks."""

from __future__ import annotations

import math
import threading

from gossip.config import Config
from gossip.peer import Peer

__all__ = ["LoopHints", "WakeEvent"]


class LoopHints:
    """Hints that the network thread writes after each decision, as plain numbers, so that the loop need not ask."""

    __slots__ = ("by_steps", "due_steps", "held", "lockstep", "mix_at")

    def __init__(self, config: Config) -> None:
        self.by_steps, self.lockstep = config.interval_steps is not None, config.max_version_gap is not None
        self.due_steps: float = 0  # The step count at which the next mix is due.
        self.mix_at = math.inf  # The earliest time at which that mix can begin, as far as known.
        self.held = False  # The loop must wait at its boundary.

    def release(self) -> None:
        """Forget the mix that is due or running, and let the loop continue."""
        self.due_steps = self.mix_at = math.inf
        self.held = False

    def read(self, peer: Peer) -> bool:
        """Copy the hints after a decision. Return True if a held loop may continue."""
        due_steps, self.mix_at = peer.initiator.next_mix
        self.due_steps = due_steps if self.by_steps else math.inf
        if not self.lockstep:
            return False
        before, self.held = self.held, peer.view.held
        return before and not self.held


class WakeEvent:
    """A wake-up event for a loop that only waits, cheaper than threading.Event while no thread waits."""

    __slots__ = ("event", "rung", "waited")

    def __init__(self) -> None:
        self.event, self.rung, self.waited = threading.Event(), False, False

    def set(self) -> None:
        self.rung = True
        # Dekker's handshake: set `rung`, then read `waited`; `wait()` does the reverse.
        if self.waited:
            self.event.set()

    def clear(self) -> None:
        self.rung = False

    def wait(self, timeout_s: float) -> None:
        self.event.clear()
        self.waited = True
        if not self.rung:
            self.event.wait(timeout_s)
        self.waited = False
