"""What a Connector belongs to, in place of a Runtime."""

from __future__ import annotations

from node.faults import Faults


class LinkOwner:
    """``missed`` gets the peers whose dial failed, ``told`` the events, and ``is_known`` says who is a known member."""

    def __init__(self, me, run_link=None, missed=print, told=print, is_known=lambda peer: True):
        self.me, self.run_link, self.on_dial_failed, self.notify, self.is_known = me, run_link, missed, told, is_known
        self.faults = Faults(told)

    def own_record(self):
        return self.me

    def member_hosts(self):
        return ()

    def on_seed_answered(self, seed):
        """Nobody waits for it."""

    def on_failed_handshake(self, host):
        """Nobody counts it."""

    def on_seed_is_self(self, seed):
        """Nobody asks."""
