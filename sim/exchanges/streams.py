"""How long the streams of an exchange take, and how much they carry."""

from __future__ import annotations

from sim.world.network import NetworkModel

__all__ = ["Streams"]

TIMED = 65_536  # durations kept; beyond it every second one goes, and from then on half as many are added


class Streams:
    """Vectors of so many bytes. ``moving`` holds how many exchanges each peer has, which share its rates."""

    def __init__(self, network: NetworkModel, size_bytes: int) -> None:
        self.network, self.size_bytes = network, size_bytes
        self.moving: list[int] = []
        self.durations_s: list[float] = []  # of exchanges, from the wish for a snapshot to the mix
        self.every = 1  # how many mixes one of these stands for
        self.sent = 0  # bytes of streams that have begun, as far as they have been counted
        self._begin: list[float] = []  # when the others do
        self._left = 1

    def seconds(self, sender: int, receiver: int) -> float:
        """From the first byte to the last, beside what both have under way when it begins."""
        network, moving = self.network, self.moving
        up = network.up_bytes_s(sender) / max(moving[sender], 1)
        down = network.down_bytes_s(receiver) / max(moving[receiver], 1)
        return self.size_bytes / min(up, down)

    def begin(self, *when: float) -> None:
        """Streams begin then."""
        self._begin += when

    def bytes_sent(self, now: float) -> int:
        """Of all streams that have begun, whole."""
        later = [when for when in self._begin if when > now]
        self.sent += self.size_bytes * (len(self._begin) - len(later))
        self._begin = later
        return self.sent

    def timed(self, seconds: float) -> None:
        """An exchange took so long: of many every other one is kept, and so on."""
        self._left -= 1
        if self._left:
            return
        self._left = self.every
        self.durations_s.append(seconds)
        if len(self.durations_s) >= TIMED:
            del self.durations_s[::2]
            self.every *= 2
