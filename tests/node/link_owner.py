"""What a Connector belongs to, in place of a Runtime."""

from __future__ import annotations

from node.faults import Faults


class LinkOwner:
    """``missed`` gets the peers whose dial failed, ``told`` the events, and ``knows`` says who is a known member."""

    def __init__(self, me, run_link=None, missed=print, told=print, knows=lambda peer: True):
        self.me, self.run_link, self.dial_failed, self.on_event, self.knows = me, run_link, missed, told, knows
        self.faults = Faults(told)

    def record(self):
        return self.me

    def member_hosts(self):
        return ()

    def seed_answered(self, seed):
        """Nobody waits for it."""

    def strange(self, host):
        """Nobody counts it."""

    def met_itself(self, seed):
        """Nobody asks."""
