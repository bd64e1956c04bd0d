"""Detection of links that one connection does not fill: they get more, and a notice says once that bbr would help."""

import math
from collections.abc import Callable
from weakref import WeakKeyDictionary

from gossip.ids import short
from node.links.link import Link
from node.links.pool import Links
from node.transport.byte_stream import socket_of
from node.transport.loss import PathRecord

CHECK_PERIOD_S = 1.0  # Less than the seconds in which a user would notice a slow link.
MIN_BYTES = 65_536  # A link that has sent less since the last check is not worth two system calls.


class Losses:
    """The loss monitor of one node.

    At every check it calls ``widen`` for every link that one connection does not fill.
    """

    def __init__(
        self, links: Links, on_event: Callable[[str, str], None], widen: Callable[[Link], None] = lambda link: None
    ) -> None:
        self.links, self.on_event, self.widen = links, on_event, widen
        # For each link the bytes that it had sent at the last check, and what is known of its path.
        self.records: WeakKeyDictionary[Link, tuple[int, PathRecord]] = WeakKeyDictionary()
        self.checked_at, self.is_reported = -math.inf, False

    def check_links(self, now: float) -> None:
        """Check all links, at most once per ``CHECK_PERIOD_S``."""
        if now - self.checked_at < CHECK_PERIOD_S:
            return
        self.checked_at = now
        lossy_count = 0
        for link in self.links.all():
            sent_before, path = self.records.get(link) or (0, PathRecord())
            if link.sent_bytes - sent_before >= MIN_BYTES:
                self.check_link(link, path)
            lossy_count += path.loss is not None
            if path.is_narrow:
                self.widen(link)
        self.links.lossy_links = lossy_count

    def check_link(self, link: Link, path: PathRecord) -> None:
        """Read the socket's statistics of one link, and tell the user of the first link with losses."""
        self.records[link] = link.sent_bytes, path
        plain = socket_of(link.stream)
        if plain is not None:
            path.update(*plain.tcp_info())
        if path.loss is not None and not self.is_reported:
            self.is_reported = True  # The cause is this machine's TCP, so naming the first link suffices.
            share, rtt = f"{100 * path.loss.share:.1f} %", f"{1e3 * path.loss.rtt_s:.0f} ms"
            self.on_event("lossy", (
                f"Of what goes to member {short(link.peer)} {share} is lost on its way, and this machine's TCP (cubic) "
                f"takes that for a full path: at {rtt} it sends {path.loss.ceiling_mb_s:.2f} MB/s at most by each "
                "connection. Such links get several (`connections`). bbr needs one: as root, `modprobe tcp_bbr` and "
                '`sysctl -w net.ipv4.tcp_allowed_congestion_control="reno cubic bbr"`, then start this node again.'
            ))  # fmt: skip
