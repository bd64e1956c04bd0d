"""The start of training: wait until this node holds weights to train, and then for other members."""

import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from gossip.config.mixings import MIXINGS
from gossip.effects import MemberState
from gossip.errors import FaultError, LocalError
from gossip.ids import Address, quantity
from node import running
from node.faults import report_to
from node.loop.held_run import HeldRun
from node.loop.live import LiveModel
from node.loop.network_side import NetworkSide
from node.loop.settling import VISIT_PERIOD_S
from node.observe.reduced import STARTED, mark_in
from node.settings import Settings, beside

MEET_S = 5.0  # Seconds to meet all members once another one has counted them: a link takes about one.
GONE = MemberState.LEFT, MemberState.DEAD
NEXT_RUN_S = 15.0  # Seconds in which members that end a run that is over here come to this one.
COUNT_PERIOD_S = 0.1  # Seconds between two counts of members, each of which walks over all of them.

SHARED = (
    "Another Node of this program trains this run too, over another model, so that both become one model: give each a "
    "swarm of its own by Config(swarm=...), and seeds of that swarm."
)
LEFT = (
    "Members still train the run that an earlier Node of this program has left, over another model: this Node begins "
    "anew, apart from them. To go on with that run, give Node the same model object."
)


class Count(NamedTuple):
    """A count of the members that hold this run. Only members that this node has contacted count."""

    here: int  # ALIVE and contacted, this node included.
    gone: int  # LEFT or DEAD.
    told: int  # The largest number that a contacted member says it has counted; 0 if none does.


class Startup:
    """The waits of a training loop before its first step. Each of them visits the boundary meanwhile.

    ``announce`` puts a mark into this node's record.
    """

    def __init__(
        self, settings: Settings, live: LiveModel, network: NetworkSide, run: HeldRun, visit: Callable[[], None],
        announce: Callable[[str, tuple[float, int]], None],
    ) -> None:  # fmt: skip
        self.settings, self.live, self.network, self.run, self.visit = settings, live, network, run, visit
        self.announce = announce

    def enter(self, owner: running.Side) -> int:
        """Register this node in its process, and give it an address of its own there.

        Returns:
            The number of other nodes over the same model, which are closed.
        """
        settings = self.settings
        if settings.shares_address:
            running.claim_address()
        replaced_nodes = running.enter(owner)
        if settings.follows_first and settings.listen is not None:
            port = running.ports.get(0, 0)  # 0 if the first Node has not started yet.
            self.network.service.bound = beside(Address(settings.listen.host, port), settings.place)
        return replaced_nodes

    def join(self) -> None:
        """Wait until this node holds weights to train, from the swarm or its own.

        Raises:
            FaultError: Faults of this library keep the network side from starting.
            LocalError: A seed refused this node, or ``settings.join_or_fail_s`` has passed.
        """
        service, began = self.network.service, time.monotonic()
        running.ports[self.settings.place] = 0 if service.bound is None else service.bound.port
        service.read_progress = self.network.runtime.read_progress = lambda: (self.run.steps, self.run.samples)
        is_ready = False
        while not is_ready:
            self.live.wake.wait(VISIT_PERIOD_S)
            self.network.check()
            if service.is_backing_off:
                raise FaultError(
                    "Could not join: faults of this library end the network side each time that it begins anew. Report "
                    f"the traceback, which the log has, {report_to()}."
                )
            self.visit()
            is_ready = self.network.peer.view.ready and not self.live.boundary.has_requests
            self.raise_failure(time.monotonic() - began, is_ready)
        mixing = self.network.peer.config.mixing
        if trusts := MIXINGS[mixing].trusts:
            text = f'With mixing = "{mixing}" one member that lies decides {trusts}: use it where all members are yours'
            self.network.notify("trust", f"{text}, and pairs elsewhere.")
        self.begin_with_own_weights()
        self.visit()  # This also takes a copy for newcomers, because the first step may be far off.
        self.network.sync()  # The network thread then knows the sample count behind the weights.

    def raise_failure(self, waited_s: float, is_ready: bool) -> None:
        """Raise LocalError if a seed has refused this node for good, or the time to join has passed."""
        connector, limit_s = self.network.runtime.connector, self.settings.join_or_fail_s
        refusal = connector.seeds.refusal
        may_connect = bool(connector.dialling) or len(self.network.runtime.links) > 0
        # A seed that closes connections at once may be busy, or a forwarder whose node is down. That is final only when
        # the peer has given up waiting for it: it would train alone, although its seed exists.
        is_early = bool(self.network.service.completed_runs) and waited_s < NEXT_RUN_S
        if refusal is not None and not (may_connect or is_early) and is_ready == (refusal.code == "closed"):
            raise LocalError(f"Could not join: {refusal}") from refusal
        if limit_s is not None and waited_s > limit_s and not is_ready:
            raise LocalError(f"Could not join within {limit_s:g} s: {connector.seeds.why_alone()}.")

    def begin_with_own_weights(self) -> None:
        """Start mixing from the node's own weights, unless it has adopted others, and allocate memory for exchanges."""
        if not self.live.has_weights:
            self.live.begin_mixing()
            self.network.runtime.streams.allocate_memory()

    def wait_for_others(self, began: float) -> None:
        """Wait until ``settings.wait_for`` members hold this run, up to ``settings.wait_s`` seconds after ``began``.

        The wait ends on all nodes or on none. A node that has counted enough members says so in its record, also in the
        last one before it leaves. A node that reads it waits only for members that have not left meanwhile.
        """
        wanted, wait_s = self.settings.wait_for, self.settings.wait_s
        told_at = math.inf  # The time at which this node first read that another one has counted enough members.
        while (count := self.count_members()).here < wanted and not self.network.peer.view.finished:
            now = time.monotonic()
            if count.told >= wanted:
                told_at = min(told_at, now)
                if count.here + count.gone >= wanted or now - told_at >= MEET_S:
                    break
            if now - began >= wait_s:
                self.give_up_waiting(count.here)
                return
            until = now + COUNT_PERIOD_S
            while time.monotonic() < until:
                self.live.wake.wait(VISIT_PERIOD_S)
                self.visit()
        if wanted > 1:
            self.announce(STARTED, (float(max(count.here, count.told)), 0))
            self.network.sync()

    def count_members(self) -> Count:
        """Count the members that hold this run. From now on samplers divide the data among the present ones."""
        here, told, gone = 1, 0, 0

        def count() -> None:
            nonlocal here, told, gone
            self.network.service.refresh_view()
            peer = self.network.peer
            here = peer.membership.run_size
            for record, state in peer.membership.members():
                if record.run_id == peer.view.run_id:
                    gone += state in GONE
                    mark = mark_in(record, STARTED)
                    if mark is not None and peer.membership.was_contacted(record.id):
                        told = max(told, int(mark[0]))

        self.network.call(count)
        self.network.sync()
        self.network.check()
        return Count(here, gone, told)

    def tell_of_trained(self, model: Any) -> None:
        """Tell of another model of this program in this run, and of members in the run of an earlier one."""
        peer, runs = self.network.peer, running.trained_runs()
        left = {run for run in self.network.service.completed_runs if runs.get(run) is not None}
        if running.note_run(peer.view.run_id, model):
            self.network.notify("twin", SHARED)

        def look() -> None:
            if any(record.run_id in left and state not in GONE for record, state in peer.membership.members()):
                self.network.notify("divided", LEFT)

        self.network.call(look)

    def give_up_waiting(self, members: int) -> None:
        """Tell the user that only so many members came, or raise LocalError if a launcher started others."""
        count, wait_s = self.settings.wait_for, self.settings.wait_s
        if self.settings.others is not None and self.network.peer.view.alive_count < 2:
            address = self.network.peer.membership.me.address or "none"
            raise LocalError(
                f"Waited {wait_s:g} s for {count} members that were launched together, and none of the others "
                f"came to this node at {address} ({self.network.runtime.connector.seeds.why_alone()}): it does "
                "not train alone. Look whether the others run and can reach this address."
            )
        present = f"{members} is" if members == 1 else f"{members} are"
        text = (
            f"Waited {wait_s:g} s for {quantity(count, 'member')}, of whom {present} here with the weights, "
            "this one included: this node goes on, and mixes with the others when they come."
        )
        self.network.notify("waited", text)
