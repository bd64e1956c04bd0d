"""The end of training: mix without it until the nodes agree, and give the final weights to newcomers."""

import hashlib
import math
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

import numpy as np

from gossip.arithmetic.layout import quoted
from gossip.averaging.vectors import Floats
from gossip.effects import Effect, MemberState
from gossip.ids import MemberRecord, quantity
from gossip.peer import Peer
from node.loop.held_run import HeldRun
from node.loop.live import LiveModel
from node.loop.network_side import NetworkSide
from node.network.service import REPORT_S
from node.observe.events import SettledEvent
from node.observe.reduced import AGREED, SETTLING, Figures, mark_in

FAREWELL_S = 0.5  # Time for a newcomer to request the next piece of a finished run's weights.
VISIT_PERIOD_S = 0.02  # Seconds between two visits of the boundary while the loop waits.
QUICK_VISIT_PERIOD_S = 0.005  # The same for a wait that ends within a second.
ALONE_S = 1.0  # Seconds without others after which a node settles alone: busy machines lose each other for less.
LOOK_PERIOD_S = 0.05  # Seconds between two looks at what the other members say.
PRESENT = MemberState.ALIVE, MemberState.SUSPECT  # Slow machines are often suspected, and still count.
POSITIVE_ZERO = np.float32(0.0)  # Added to a vector, it turns -0.0 to 0.0: the two are one value to an exchange.
DIGEST_BYTES = 8
MARK_BYTES = 6  # Of the digest that a mark holds, since its count must be exact as a float64 too.
# Seconds for which members that have the same weights mix on until their numbers of samples are the same as well.
# Limits against liars may keep these apart (gossip.exchange.progress).
SAMPLES_S = 1.0
WORD_S = 5.0  # Further seconds for the others' word that they have the same weights, which comes late on busy machines.

CHANGED_ADVICE = (
    "unless each node made the same change, call node.settle(10, wait_s=60) after it, as after optimizer.eval() of a "
    "schedule-free optimizer, new statistics of BatchNorm, or weights that the program loads."
)


@dataclass(slots=True)
class Standing:
    """How far a loop that settles agrees with the other members."""

    digest: bytes | None = None  # Of our weights, once a partner had the same values; None before.
    equal_since: int | None = None  # The exchange from which on partners had the values of this digest.
    samples: int = 0  # The number of samples that we told with it.
    others: int = 0  # Members to agree with.
    missing: int = 0  # Those of them that do not say that they have the same weights.
    are_gone: bool = False  # No other member is left.

    @property
    def is_agreed(self) -> bool:
        return self.digest is not None and not self.missing

    @property
    def mark(self) -> tuple[float, int] | None:
        """Return the mark that tells other members; None without a digest."""
        if self.digest is None:
            return None
        return float(self.samples), int.from_bytes(self.digest[:MARK_BYTES])


class Settling:
    """The waits at the end of training, in the training thread. Each of them visits the boundary meanwhile."""

    def __init__(
        self, live: LiveModel, network: NetworkSide, run: HeldRun, visit: Callable[[], None],
        on_replaced: Callable[[Floats], None],
    ) -> None:  # fmt: skip
        self.live, self.network, self.run, self.visit, self.on_replaced = live, network, run, visit, on_replaced
        self.own_figures = Figures()  # The figures of this node that other members get.
        self.settled_at: int | None = None  # The step count at which this loop settled; None once it has continued.
        self.changes = live.state.changes  # Those of the weights at the end of the last step or visit.
        # The name of the next settlement: the mark of the weights on which the last one ended, and how many in a row
        # ended on them. A member that is still in the last one has told those weights, and another name.
        self.meeting: tuple[float, int] = (0.0, 0)
        self.agreed: bytes | None = None  # The digest of the weights of the last agreement.

    def on_step(self) -> None:
        """Withdraw the announcement that this loop settles, and mix again, if it has taken a step since."""
        if self.settled_at is not None and self.run.steps > self.settled_at:
            self.settled_at = None
            if self.live.state.is_standing and not self.live.outer.is_plain:
                self.live.reset_outer()  # What the program changed since, as pruning does, is no movement of training.
            self.announce(SETTLING, None)
            self.network.report_to_peer(lambda peer, now: peer.settle(False, now))

    def note_weights(self) -> None:
        """Note the state of the weights, which every training step and every visit calls."""
        self.changes = self.live.state.changes

    def pause(self, drops: bool) -> None:
        """Keep the weights as they are: begin no exchange, and drop (``drops``) those in progress, of other weights."""

        def pause() -> None:
            runtime = self.network.runtime
            if drops:
                runtime.averager.forget_updates()
            peer, now = runtime.peer, runtime.now
            runtime.perform([*peer.settle(False, now), *peer.pause(now, drops)])

        self.network.run_to_end(pause)

    def settle(self, seconds: float, wait_s: float = 0.0) -> float | None:
        """Mix without training until all nodes have the same weights.

        A loop compares its weights with a partner's in exchanges. It then tells all members a digest of them, and ends
        once all have told the same one. That word stays in its record, so that no member has to wait for a later one.

        Args:
            seconds: The time limit of the mixing.
            wait_s: The time limit of a wait before it, until all other members settle too.

        Returns:
            The largest difference of a tensor from the last partners', relative to its norm: 0 if all nodes have the
            same weights. None if it is unknown.
        """
        self.settled_at = self.run.steps
        self.pause(drops=self.live.state.changes != self.changes)
        standing, began_at = self.standing_among_settled(), time.monotonic()
        if is_new := standing is None:
            has_all = self.wait_for_settlers(wait_s)
            self.announce(AGREED, None)  # Until here the others may have needed that of the last time.
            began_at = time.monotonic()
            self.network.report_to_peer(lambda peer, now: peer.settle(True, now))
            self.network.call(lambda: self.network.runtime.averager.furthest.clear())
            standing = self.mix_until_agreed(began_at + seconds, has_all)
        with self.live.outer_lock:
            # Otherwise an exchange that ends later would add the momentum to this node alone.
            self.live.outer.forget_momentum()
        self.pause(drops=standing.is_agreed)  # An exchange that ends later would move this node away from the others.
        self.finish_exchanges(min(1.0, seconds))
        self.network.call(self.network.service.on_settled)
        self.network.sync()
        if not self.live.outer.is_plain:
            self.live.reset_outer()
        if standing.mark is not None:
            digest = standing.mark[1]
            self.meeting = (self.meeting[0] + is_new if self.meeting[1] == digest else 1.0), digest
        if self.network.peer.view.finished:
            self.run.save_final()  # The weights of before may have been kept by `finish`.
        remedy = "Settle on all nodes at the same time, with wait_s, or for longer."
        if standing.are_gone:
            remedy = "Give settle wait_s on all nodes, or a longer one, so that none leaves before all have settled."
        elif wait_s > 0 and standing.missing:
            remedy = f"Give settle more than {seconds:g} s: it ends as soon as all agree."
        return self.report_end(standing, time.monotonic() - began_at, remedy)

    def standing_among_settled(self) -> Standing | None:
        """Return a standing if all others have settled on the weights of this node and have not stepped since.

        That is so if this loop settles again, and for a late node that took its weights from them. Others would not mix
        with it, and need not call ``settle`` again.
        """
        run = self.network.peer.view.run_id
        sharers = [record for record in self.present_members() or () if record.ready and record.run_id == run]
        told = {mark_in(record, SETTLING) and mark_in(record, AGREED) for record in sharers}
        digests = {mark and mark[1] for mark in told}
        if len(digests) != 1 or digests == {None} or self.live.boundary.pending_updates:
            return None
        digest = self.read_digest()
        if digests != {int.from_bytes(digest[:MARK_BYTES])}:
            return None
        standing = Standing(digest, None, self.network.peer.local.progress.samples, len(sharers))
        if self.own_figures.marks.get(SETTLING) is None:
            self.announce(SETTLING, self.meeting)
            self.announce(AGREED, standing.mark)
        return standing

    def mix_until_agreed(self, until: float, has_all: bool) -> Standing:
        """Visit the boundary until all members agree, no other is left, or it is ``until``, or a little later.

        Args:
            until: The time of the end, by time.monotonic.
            has_all: False if a wait for members that do not settle was in vain, so that they do not count.
        """
        standing, looked_at, agreed_at = Standing(), -math.inf, math.inf
        # The time at which another member was last present; -inf for a node that has mixed with none.
        company_at = time.monotonic() if self.network.peer.exchanges.done_count else -math.inf
        while (now := time.monotonic()) < until + (WORD_S if standing.digest is not None else 0.0):
            self.live.wake.wait(VISIT_PERIOD_S)
            self.visit()
            self.update_digest(standing)
            if now - looked_at < LOOK_PERIOD_S:
                continue
            looked_at = now
            others = self.present_members()
            if others is None:
                continue
            company_at = now if others else company_at
            if not others:  # A node that comes later takes the weights of this one.
                standing.missing = 0
                if now - company_at >= ALONE_S:
                    standing.digest, standing.are_gone = self.digest_of_gone(), True
                    break
                continue
            run, own_mark = self.network.peer.view.run_id, standing.mark
            marks = [
                mark_in(record, AGREED) for record in others
                if record.ready and record.run_id == run
                and (mark_in(record, AGREED) or self.has_come(record) or (has_all and not record.finished))
            ]  # fmt: skip
            standing.others = len(marks)
            standing.missing = sum(own_mark is None or mark is None or mark[1] != own_mark[1] for mark in marks)
            agreed_at = min(agreed_at, now) if standing.is_agreed else math.inf
            has_equal_samples = all(mark == own_mark for mark in marks)
            if standing.is_agreed and (has_equal_samples or now - agreed_at >= SAMPLES_S):
                break
        return standing

    def update_digest(self, standing: Standing) -> None:
        """Tell the members the digest of our weights once a partner had the same values, and take it back later."""
        peer = self.network.peer
        if standing.equal_since != (equal_since := peer.exchanges.equal_since):
            standing.digest = None
        if equal_since is not None and standing.digest is None and not self.live.boundary.pending_updates:
            standing.digest, standing.equal_since = self.read_digest(), equal_since
        standing.samples = peer.local.progress.samples
        if standing.mark != self.own_figures.marks.get(AGREED):
            self.announce(AGREED, standing.mark)

    def read_digest(self) -> bytes:
        """Return the BLAKE2b digest of the weights that exchanges carry, as little-endian float32."""
        vector = self.live.pool.take()
        self.live.state.read(vector.array)
        vector.array += POSITIVE_ZERO
        digest = hashlib.blake2b(vector.array.data, digest_size=DIGEST_BYTES).digest()
        self.live.pool.give(vector)
        return digest

    def round_wide_weights(self) -> None:
        """Round weights of float64 to the float32 values on which the nodes have agreed."""
        layout = self.live.state.layout
        if any(segment.dtype == "float64" and segment.kind in ("parameter", "buffer") for segment in layout.segments):
            vector = np.empty(layout.size, np.float32)
            self.live.state.read(vector)
            vector[: layout.exchanged] += POSITIVE_ZERO
            self.live.state.adopt_exchanged(vector, (), {})
            self.on_replaced(vector)

    def report_end(self, standing: Standing, took_s: float, remedy: str) -> float | None:
        """Tell the user how settling has ended, and return the distance from the last partners, None if unknown."""
        if standing.is_agreed:
            self.round_wide_weights()
        digest = self.read_digest()
        distance, tensor = max(self.network.runtime.averager.furthest, default=(None, ""))
        self.agreed = None
        if standing.is_agreed and digest == standing.digest:
            distance, tensor = 0.0, ""
            self.agreed = digest
            sentence = f"Settled in {took_s:.1f} s: all nodes have the same weights ({digest.hex()})."
        elif standing.others == 0 and distance is None:
            sentence = f"This node settled alone ({digest.hex()})."
        else:
            sentence = f"Settling ended after {took_s:.1f} s with weights {digest.hex()}."
            apart = apart_sentence(standing, distance, tensor, took_s)
            self.network.notify("apart", f"{apart} {remedy}")
        self.announce_settled(sentence, distance, tensor, digest)
        return distance

    def announce_settled(self, sentence: str, distance: float | None, tensor: str, digest: bytes) -> None:
        """Post the event that says which weights this node has at the end, for the log of `gossip local` too."""
        event = SettledEvent("settled", time.time(), sentence, distance, tensor, digest.hex())
        fields = {"distance": distance, "tensor": tensor, "digest": event.digest, "steps": self.run.steps}
        self.network.call(lambda: self.network.service.announce(event, **fields))

    def tell_of_changes(self) -> None:
        """Tell the user of weights that have changed since all nodes agreed on them: other nodes do not have these."""
        if self.agreed is None or self.settled_at != self.run.steps or not self.live.state.is_standing:
            return
        if (digest := self.read_digest()) != self.agreed:  # Torch does not count changes through ``.data``.
            text = f"The weights have changed ({digest.hex()}) since all nodes agreed on them"
            self.network.notify("apart", f"{text}: {CHANGED_ADVICE}")
            self.announce_settled(f"{text}.", None, "", digest)

    def wait_for_settlers(self, wait_s: float) -> bool:
        """Announce that this loop settles, and visit the boundary until all others settle too, or are gone.

        Meanwhile no exchange begins, since members that train would move the weights that this loop wants to settle.
        Nor does one after it, until the next step, so that the weights stay those on which all have agreed.

        Args:
            wait_s: The time limit in seconds, so that a member that lies costs no more.

        Returns:
            False if it waited in vain.
        """
        until, counted_at = time.monotonic() + wait_s, -math.inf
        missing: int | None = 0  # None if it could not be counted.
        self.announce(SETTLING, self.meeting)
        while (now := time.monotonic()) < until:
            if now - counted_at >= REPORT_S:
                counted_at, missing = now, self.count_missing()
                if missing == 0:
                    return True
            self.live.wake.wait(VISIT_PERIOD_S)
            self.visit()
        if missing:
            others = quantity(missing, "member") + (" that has" if missing == 1 else " that have")
            text = f"Waited {wait_s:g} s to settle with {others} not come: this node settles without."
            self.network.notify("waited", text)
        return not missing

    def count_missing(self) -> int | None:
        """Count the run's members that have not come; None if the network thread is too busy."""
        self.announce(SETTLING, self.meeting)  # Again, because figures are dropped with a run that is given up.
        run, others = self.network.peer.view.run_id, self.present_members()
        if others is None:
            return None
        sharers = [record for record in others if record.ready and record.run_id == run]
        return sum(not self.has_come(record) for record in sharers)

    def has_come(self, record: MemberRecord) -> bool:
        """Return True if a member has come to this settlement, and is not still in the last one."""
        meeting, agreed = mark_in(record, SETTLING), mark_in(record, AGREED)
        is_in_last = meeting != self.meeting and agreed is not None and agreed[1] == self.meeting[1]
        return meeting is not None and not is_in_last

    def digest_of_gone(self) -> bytes | None:
        """Return the digest of our weights if it is what gone members told last, in this settlement.

        Members that died count only if none left: what they told may have been mixed on since.
        """
        digest = self.read_digest()
        for state in (MemberState.LEFT, MemberState.DEAD):
            came = [record for record in self.members([state]) or () if self.has_come(record)]
            if told := {mark[1] for record in came if (mark := mark_in(record, AGREED))}:
                return digest if told == {int.from_bytes(digest[:MARK_BYTES])} else None
        return None

    def present_members(self) -> list[MemberRecord] | None:
        """Return the records of the other members that are not gone; None if the network thread is too busy."""
        return self.members(PRESENT)

    def members(self, states: Collection[MemberState]) -> list[MemberRecord] | None:
        """Return the records of the other members in these states; None if the network thread is too busy."""
        answers: list[list[tuple[MemberRecord, MemberState]]] = []  # At most one, from the network thread.
        self.network.call(lambda: answers.append(self.network.peer.membership.members()))
        self.network.sync()
        self.network.check()
        return [record for record, state in answers[0] if state in states] if answers else None

    def announce(self, name: str, mark: tuple[float, int] | None) -> None:
        """Put a mark into this node's record, or remove it."""
        is_urgent = self.own_figures.marks.get(name) != mark
        packed = self.own_figures.pack_mark(name, mark, self.network.peer.view.run_id, self.run.swarm_samples)
        self.network.report_to_peer(lambda peer, now: peer.publish_figures(packed, now, is_urgent))

    def hand_over(self, seconds: float) -> None:
        """Mix for at most this many seconds with members that stay, before this node leaves.

        They then hold what this loop has learned since its last mix. The user is told if none of it was taken.
        """
        done_before, until = self.network.peer.exchanges.done_count, time.monotonic() + seconds

        def begin(peer: Peer, now: float) -> list[Effect]:
            peer.update_counts(self.run.steps, self.run.samples)  # The last report may be older.
            return peer.hand_over(now)

        self.network.report_to_peer(begin)
        self.network.sync()
        if not self.network.peer.view.is_handing_over:
            return
        while time.monotonic() < until and self.network.peer.view.is_handing_over:
            self.live.wake.wait(QUICK_VISIT_PERIOD_S)
            self.visit()
        if self.network.peer.exchanges.done_count == done_before:
            text = f"This node leaves, and no member has taken its last steps within {seconds:g} s (--grace)"
            self.network.notify("unshared", f"{text}: what it has learned since its last mix is lost.")

    def finish_exchanges(self, seconds: float) -> None:
        """Wait for exchanges in progress, so that the weights that are evaluated or saved equal the partners'."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self.live.wake.wait(QUICK_VISIT_PERIOD_S)
            self.visit()
            if (
                not self.network.peer.exchanges.table
                and not self.live.boundary.pending_updates
                and not self.live.boundary.has_requests
            ):
                return

    def finish(self, seconds: float) -> None:
        """Mark the run as complete, and wait for up to ``seconds`` while newcomers fetch its weights."""
        if not self.network.peer.view.finished:
            self.network.notify("finished", "This run is finished: this node's program said so.")
        self.network.report_to_peer(lambda peer, now: peer.finish(now))
        self.network.sync()
        self.run.save_final()
        if warning := self.network.service.state_dir.store_finished(self.network.peer.view.run_id):
            self.network.notify("state", warning)
        now = time.monotonic()
        until, quiet_at = now + seconds, now + FAREWELL_S
        while now < until and (now < quiet_at or self.network.peer.view.is_donating):
            self.live.wake.wait(VISIT_PERIOD_S)
            self.visit()
            now = time.monotonic()
            if not self.network.peer.view.finished:  # A fault has replaced the peer meanwhile.
                self.network.report_to_peer(lambda peer, now: peer.finish(now))
            if self.network.peer.view.is_donating:
                quiet_at = now + FAREWELL_S


def apart_sentence(standing: Standing, distance: float | None, tensor: str, took_s: float) -> str:
    """Return the sentence for the user of a node that does not agree with the others."""
    others, missing = "no other member settles", standing.missing
    if standing.are_gone:
        others = "the others are gone and have not told of the same weights"
    elif missing:
        others = f"{quantity(missing, 'member')} {'has' if missing == 1 else 'have'} not told of the same weights"
    where = f", most of all tensor {quoted(tensor)}, by {distance:.2g} of its norm" if distance else ""
    return f"Settling ended after {took_s:.1f} s without agreement: {others}{where}."
