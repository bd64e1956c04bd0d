"""Links that lose packets under a congestion control that takes those for a full path: counted, and said once."""

from __future__ import annotations

import math
from collections.abc import Callable

from gossip.ids import short
from node.links.pool import Links
from node.transport.loss import loss_of

__all__ = ["Losses"]

LOOK_S = 10.0  # between two looks, of two calls of the kernel for each link: what it is about lasts


class Losses:
    """Of one node."""

    def __init__(self, links: Links, on_event: Callable[[str, str], None]) -> None:
        self.links, self.on_event = links, on_event
        self.looked_at, self.said = -math.inf, False

    def look(self, now: float) -> None:
        """Call it now and then. The first that is found is named, with what its owner can do; it is the machine's, and
        more of them would say no more."""
        if now - self.looked_at < LOOK_S:
            return
        self.looked_at = now
        found = [(link, loss) for link in self.links.all() if (loss := loss_of(link.stream)) is not None]
        self.links.lossy = len(found)
        if found and not self.said:
            self.said = True
            link, loss = found[0]
            share, at_ms = f"{100 * loss.share:.1f} %", f"{1e3 * loss.rtt_s:.0f} ms"
            self.on_event("lossy", (
                f"Of what goes to member {short(link.peer)} {share} is lost on its way, and this machine's TCP (cubic) "
                f"takes that for a full path: at {at_ms} it sends {loss.ceiling_mb_s:.2f} MB/s at most. bbr does not:"
                " as root, `modprobe tcp_bbr` and `sysctl -w "
                'net.ipv4.tcp_allowed_congestion_control="reno cubic bbr"`, then start this node again.'
            ))  # fmt: skip
