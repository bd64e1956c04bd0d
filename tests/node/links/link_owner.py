"""An owner for a Connector under test, in place of a Runtime."""

from types import SimpleNamespace

from node.faults import Faults


class LinkOwner:
    """``missed`` receives the peers whose dial failed, ``told`` the notices; ``is_known`` recognises members."""

    def __init__(self, me, run_link=None, missed=print, told=print, is_known=lambda peer: True):
        self.run_link, self.on_dial_failed, self.notify = run_link, missed, told
        self.faults = Faults(told)
        membership = SimpleNamespace(me=me, remembers=is_known, turnover=-1)
        ignored = lambda seed: None  # noqa: E731
        reach = SimpleNamespace(inside=None)
        self.peer = SimpleNamespace(membership=membership, reach=reach, on_seed_busy=ignored, on_own_seed=ignored)

    def report_misbehaviour(self, who, kind):
        """Ignore the report."""
