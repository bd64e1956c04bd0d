"""The run whose weights a peer holds: begin it, resume it, take another's weights.

    our weights --adopted--> on trial --passed--> the run's weights, and its run id
        ^                       |
        +------- restored ------+ failed

A peer without weights takes those of a run without a trial. *Spoiled* weights hold a value that is not finite.
"""

from dataclasses import dataclass
from typing import Any

from gossip.arithmetic.group_mean import norm_refusal
from gossip.effects import Confirm, Effect, HashFrozen, Notice, Restore
from gossip.exchange.exchanges import Exchanges
from gossip.exchange.session import clamp_version
from gossip.ids import quantity
from gossip.membership.members import Members
from gossip.schedule import Schedule
from gossip.state_transfer.donating import Donor
from gossip.state_transfer.ending import Ending
from gossip.state_transfer.joining import AVOID_S, Newcomer, Phase
from gossip.state_transfer.moments import MomentMixing
from gossip.state_transfer.runs import STALEMATE_S, Run, outranks
from gossip.state_transfer.trial import TrialEvaluator


@dataclass(frozen=True, slots=True)
class RunState:
    """The state of a Peer that failed, for the next Peer of the same node."""

    run_id: bytes
    progress: int  # Samples behind the weights.
    version: float  # The next four are those of :class:`gossip.exchange.session.Local`.
    ready: bool
    sound: bool
    finished: bool
    settling: bool
    paused: bool
    steps: int  # Steps of the training loop, as last counted.
    samples: int  # Samples of these steps.
    earlier_steps: int  # Counts of earlier lives, which the peer's record adds.
    earlier_samples: int
    incarnation: int  # Of the peer's record, like the next one.
    extra: tuple[Any, ...]  # Figures for the owners of other nodes.


class OwnRun:
    """The run of one peer. Another run's weights are on trial until ``trial`` has enough losses."""

    def __init__(
        self, members: Members, exchanges: Exchanges[Any], joining: Newcomer, donating: Donor, moments: MomentMixing,
        ending: Ending, schedule: Schedule,
    ) -> None:  # fmt: skip
        self.membership, self.exchanges, self.joining, self.donating = members, exchanges, joining, donating
        self.moments, self.ending, self.schedule = moments, ending, schedule
        self.local, self.config = joining.local, joining.config
        self.trial = TrialEvaluator()
        self.had_earlier_life = members.me.incarnation > 1

    # -- after a fault -------------------------------------------------------------------------------------------
    @property
    def state(self) -> RunState:
        """Return the state for a new Peer (``continue_from``): plain numbers only, since this peer may have failed."""
        local, me = self.local, self.membership.me
        return RunState(
            run_id=local.run_id, progress=local.progress.samples, version=local.version, ready=local.ready,
            sound=local.sound, finished=local.finished, settling=local.settling, paused=local.paused,
            steps=local.steps, samples=local.samples, earlier_steps=max(0, me.steps - local.steps),
            earlier_samples=max(0, self.membership.my_samples - local.samples), incarnation=me.incarnation,
            extra=me.extra,
        )  # fmt: skip

    def continue_from(self, earlier: RunState, now: float) -> None:
        """Continue the run of an earlier peer.

        Samples that the earlier peer was not told of count with the next report.
        """
        local = self.local
        local.steps = local.mixed_steps = earlier.steps
        local.samples = earlier.samples
        self.resume(earlier.run_id, earlier.progress, earlier.version, now, earlier.finished)
        local.settling, local.paused = earlier.settling, earlier.paused
        if earlier.ready:
            local.ready, local.progress.resumed = True, False
            self.membership.update_me(now, ready=True)
            self.restart_schedule(now)
        else:
            local.sound = earlier.sound

    # -- our own weights -----------------------------------------------------------------------------------------
    def begin(self, now: float, reason: str) -> list[Effect]:
        """Become ready with our own weights. No samples are behind them, except those of a checkpoint.

        ``reason`` is the sentence that tells the user.
        """
        self.local.ready = True
        progress, missed_run_id = self.local.progress, self.joining.run_id  # The run that we tried to join, or empty.
        missed: list[Effect] = []
        if not progress.resumed:
            progress.begin(0)
            if self.had_earlier_life:
                reason += " Its weights are new, and the count of samples begins at 0: load a checkpoint to go on."
            if missed_run_id:
                text = f"This node found run {missed_run_id.hex()[:8]} and did not get its weights: "
                missed.append(Notice("untaken", text + "those that it trains are its own, with nothing behind them."))
        progress.resumed = False
        self.membership.update_me(now, ready=True, progress=progress.samples)
        self.restart_schedule(now)
        return [Notice("started", reason), *missed, *self.ending.on_begun(now)]

    def resume(self, run_id: bytes, samples: int, version: float, now: float, finished: bool = False) -> list[Effect]:
        """Note that the weights now come from a checkpoint.

        Args:
            run_id: The run id.
            samples: The samples behind the weights.
            version: The mixing rounds behind them.
            now: The current time.
            finished: True if the run is finished.
        """
        self.publish_counts(now)
        self.local.progress.begin(samples, resumed=samples > 0 and not self.local.ready)
        self.local.run_id, self.local.version, self.local.sound = run_id, clamp_version(version), True
        self.membership.update_me(now, run_id=run_id, progress=samples, version=self.local.version)
        self.local.finished = finished or run_id == self.ending.finished_run_id
        self.membership.update_me(now, finished=self.local.finished)
        return [*self.hash_frozen(), *self.end_transfers()]

    def hash_frozen(self) -> list[Effect]:
        """Have the frozen weights hashed, since they are new. Until then we state no hash."""
        local = self.local
        if not local.frozen_elements:
            return []
        local.frozen_hash = None
        return [HashFrozen(local.elements, local.frozen_stop)]

    def end_transfers(self) -> list[Effect]:
        """End everything that began with weights that were replaced: trial, exchanges and transfers."""
        confirmed: list[Effect] = [Confirm()] if self.trial.on_trial else []
        self.trial.end()
        abandoned = self.exchanges.abandon()
        given = [*self.donating.abandon(list(self.donating.table)), *self.moments.drop()]
        return [*confirmed, *abandoned, *self.joining.stop(), *given]

    def update_counts(self, steps: int, samples: int) -> None:
        """Update the counts of the training loop, and the version and progress that follow; ignore older reports."""
        local, members, interval_steps = self.local, self.membership, self.config.interval_steps
        steps, samples = max(steps, local.steps), max(samples, local.samples)
        if interval_steps is not None:
            local.version = clamp_version(local.version + (steps - local.steps) / interval_steps)
        if local.ready:
            local.progress.add_samples(
                samples - local.samples, steps - local.steps, members.run_size,
                dialable=members.me.address is not None, arrears=members.take_arrears(),
            )  # fmt: skip
        local.steps, local.samples = steps, samples

    def publish_counts(self, now: float) -> None:
        """Publish the counts so far: the weights change now, or the counts are our last."""
        self.membership.update_me(now, steps=self.local.steps, samples=self.local.samples, version=self.local.version)

    def restart_schedule(self, now: float) -> None:
        """Schedule the next mix an interval from now, since the weights have just become those of a run."""
        self.schedule.begin(self.local.steps, now)

    # -- weights that are not finite -----------------------------------------------------------------------------
    def on_spoiled(self, now: float, tensor: str = "") -> list[Effect]:
        """Handle weights of ours that are not finite any more: this peer is not ready until others replace them."""
        self.local.ready = self.local.sound = False
        self.membership.update_me(now, ready=False)
        where = f"{tensor}, step {self.local.steps}" if tensor else f"step {self.local.steps}"
        text = (
            f"The weights are not finite any more ({where}): this node "
            "gives them to no member, and takes the swarm's as soon as a member gives them."
        )
        # The frozen weights may be spoiled too. A new hash differs from the donors', so that theirs are fetched.
        return [*self.hash_frozen(), Notice("spoiled", text)]

    def on_mended(self, now: float) -> list[Effect]:
        """Handle weights that the training loop has made finite again by itself."""
        if self.local.sound or self.joining.phase is Phase.ADOPTING:
            return []
        effects = self.joining.stop()
        self.local.ready = self.local.sound = True
        self.membership.update_me(now, ready=True)
        return [*effects, Notice("mended", "The weights are finite again: this node mixes again.")]

    # -- another run's weights -----------------------------------------------------------------------------------
    def on_adopted(self, now: float, difference_sq: float = 0.0, own_sq: float = 0.0) -> list[Effect]:
        """Handle the adopted joining vector.

        During a trial, ``difference_sq`` is its squared distance from the old weights, and ``own_sq`` the squared norm
        of these.
        """
        local, joining = self.local, self.joining
        local.boundary_at = now
        effects = [] if joining.keeps_frozen else self.hash_frozen()
        if joining.phase is not Phase.ADOPTING:
            return effects
        if not local.ready:
            return effects + self.switch_run(now)
        refusal = norm_refusal(difference_sq, own_sq, local.elements, self.config.internal.norm_bound)
        self.trial.begin(local.steps, now)
        if refusal is not None:
            return effects + self.end_trial(False, now)
        return effects if self.trial.can_judge else effects + self.end_trial(True, now)

    def end_trial(self, is_passed: bool, now: float) -> list[Effect]:
        """Keep the new weights, or restore the old ones."""
        self.trial.end()
        if is_passed:
            return [Confirm(), *self.switch_run(now)]
        self.joining.consented_run_id = b""
        seconds = self.joining.avoid_after_trial(now)
        text = (
            f"The weights of run {self.joining.run_id.hex()[:8]} are worse here than this node's own, which come "
            f"back; that run is left alone for {seconds:.0f} s."
        )
        return [Restore(), Notice("put back", text)]

    def on_restored(self, now: float) -> list[Effect]:
        """Handle the restored weights after a failed trial."""
        self.local.boundary_at = now
        self.restart_schedule(now)
        effects = [] if self.joining.keeps_frozen else self.hash_frozen()
        return effects + self.joining.stop()

    def on_not_kept(self, now: float) -> list[Effect]:
        """Handle a trial that could not start: the old weights could not be kept, and stay."""
        self.joining.avoid_run(self.joining.run_id, now + AVOID_S)
        return self.joining.stop()

    def switch_run(self, now: float) -> list[Effect]:
        """Switch to the run whose weights we have adopted."""
        joining, local, progress = self.joining, self.local, self.local.progress
        self.publish_counts(now)
        is_merge = local.ready
        # Our smaller sample count may lower the median of the new run. Without this pause our former run could then
        # look larger, and we would go back. It depends on the id: members in phase could swap their runs for ever.
        if is_merge:
            joining.avoid_run(local.run_id, now + STALEMATE_S * (1 + self.membership.me.id[0] / 256))
        local.run_id, local.version, local.ready = joining.run_id, clamp_version(joining.version), True
        local.sound = True
        self.exchanges.filter.on_joined(joining.check.spread_sq)
        own_samples = progress.samples if progress.resumed else 0
        # After a merge of two runs, members keep their own sample counts and exchanges average them. The counts of
        # another run must not end the training of this one.
        if not is_merge or joining.consented_run_id == local.run_id:
            progress.begin(joining.swarm_samples)
        self.membership.update_me(
            now, run_id=local.run_id, progress=progress.samples, version=local.version, ready=True
        )  # fmt: skip
        joining.consented_run_id = b""
        joining.failed_trials.pop(local.run_id, None)
        notice = self.switch_notice(is_merge, own_samples, now)
        self.restart_schedule(now)
        local.finished = False
        ended = self.ending.on_adopted(joining.finished and not is_merge, now)
        if not ended:
            self.membership.update_me(now, finished=False)
        return [*self.end_transfers(), notice, *ended]

    def switch_notice(self, is_merge: bool, own_samples: int, now: float) -> Notice:
        """Return the notice of a switch; ``own_samples`` are behind the checkpoint that we had loaded."""
        joining = self.joining
        text = (
            f"Took the weights of run {joining.run_id.hex()[:8]} from {quantity(len(joining.donors), 'member')} in "
            f"{now - joining.began_at:.1f} s"
        )
        text += ", in place of those of the run this node came from." if is_merge else "."
        if joining.keeps_frozen:
            text += " Its own frozen weights are the same, and stay."
        # Both have an empty run id, so that only a clear lead in samples outranks.
        are_older = outranks(Run(own_samples, b""), Run(joining.swarm_samples, b""))
        if are_older and joining.swarm_samples:  # 0: the donors run a version that does not state samples.
            text += (
                f" They are older than this node's checkpoint, with {quantity(joining.swarm_samples, 'sample')} behind "
                f"them and not {own_samples:,}: to go on from the newest, end all nodes and start the one that loads "
                "it first."
            )
        if joining.leaves_state:
            text += " No member that has the optimizer's state takes a step at the moment: the state begins afresh."
        return Notice("merged" if is_merge else "joined", text)
