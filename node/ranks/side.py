"""The side of a node on one of its ranks, and the calls that all ranks make together.

The *ranks* are the processes of torch.distributed that train one model and form one node.
"""

import contextlib
import math
import os
from collections.abc import Mapping
from typing import Any

from gossip.errors import GossipError, LocalError
from gossip.ids import PeerId
from node import running
from node.data.division import Sharers
from node.data.sampler import Samplers
from node.loop.held_run import check_state
from node.loop.live import Trained
from node.model.inventory.items import Inventory
from node.model.snapshot import device_of
from node.observe.listeners import Listeners
from node.observe.members import Member, SwarmView
from node.observe.metrics import Metrics
from node.observe.reduced import Reduced
from node.ranks.part import part_of
from node.ranks.plain import checked
from node.ranks.ranks import Call, Ranks
from node.ranks.report import SwarmKnowledge, SwarmReport

Outcome = tuple[Any, LocalError | None, SwarmReport | None]
"""The payload of "done": the result of rank 0's call, its error, and a report unless rank 0 could not start."""

RESULTS = {Call.SETTLE: float | None, Call.REDUCE: dict[str, Reduced], Call.LOAD: dict[str, Any]}
"""The annotations of the results of calls that have one."""


class RankSide:
    """The counterpart of :class:`node.loop.training.TrainingSide` on a rank, which :class:`node.node.Node` holds.

    On rank 0 it is a :class:`node.ranks.leader.Leader`. The other ranks apply rank 0's changes to their models, and
    learn of the swarm from it: they have no thread, identity or settings.
    """

    learning_rate = math.nan  # As the loop passes it; not used, since a node of several ranks learns no correction.

    def __init__(self, trained: Trained, ranks: Ranks) -> None:
        self.ranks = ranks
        self.part, self.knowledge = part_of(trained, ranks), SwarmKnowledge(ranks)
        self.model, self.state = trained.model, self.part.state
        ranks.channel.device = device_of(self.state)
        self.listeners = Listeners(lambda: self.me.hex())  # It gets no events, since only rank 0 reports them.
        self.samplers = Samplers(Sharers(
            lambda: self.me, lambda: self.view.owners, lambda: self.view.changes, lambda: self.swarm_samples,
            lambda: self.trained_on, ranks.rank, ranks.size, lambda: self.finished,
        ))  # fmt: skip

    # -- life ----------------------------------------------------------------------------------------------------
    def addresses(self) -> dict[int, str]:
        return {}

    def start(self) -> None:
        self.ranks.open()
        self.enter()
        try:
            self.together(Call.START)
        except BaseException as error:
            self.close(error)  # Another rank may have refused to start.
            raise

    def enter(self) -> None:
        """Close another node of this process over the model."""
        running.enter(self)

    def leave(self, error: BaseException | None) -> None:
        """Let members that stay take the last steps, if all ranks have come to their ends in order; then close."""
        if error is None and self.ranks.is_up:
            with contextlib.suppress(GossipError):  # Another rank may have left before, or failed.
                self.together(Call.LEAVE)
        self.close(error)

    def close(self, error: BaseException | None = None) -> None:
        """Leave the other ranks, with the reason if there was an error."""
        running.leave(self)
        self.ranks.leave(error)

    # -- the loop ------------------------------------------------------------------------------------------------
    def step(self, loss: Any, samples: int) -> None:
        """Count a step, and carry out rank 0's commands if a summary has said that they come."""
        knowledge, is_lockstep = self.knowledge, self.part.is_lockstep
        knowledge.count_step(samples)
        if is_lockstep:
            knowledge.begin_summary(Call.STEP)
        summary = knowledge.finish_summary()
        if summary is not None and summary.must_stop:
            self.obey()
        if not is_lockstep and knowledge.count_boundary():
            knowledge.begin_summary(Call.STEP)

    def together(self, call: Call, *arguments: Any) -> Any:
        """Make a call that all ranks make, and that rank 0 carries out with its own arguments.

        Returns:
            Rank 0's result.

        Raises:
            LocalError: Rank 0 raised it, and so does every rank.
        """
        self.knowledge.wait_for_all(call)
        return self.obey(RESULTS.get(call, Any))

    def obey(self, hint: Any = Any) -> Any:
        """Carry out rank 0's commands at this boundary until "done", and return the result that comes with it."""
        with self.ranks.at_one_boundary():
            while (command := self.ranks.receive_command()).kind != "done":
                self.part.obey(command)
        result, error, report = checked(command.payload, Outcome)
        if report is not None:
            self.knowledge.on_report(report)
        if error is not None:
            raise error
        return checked(result, hint)

    # -- calls that all ranks make ---------------------------------------------------------------------------------
    def settle(self, seconds: float, wait_s: float = 0.0) -> float | None:
        distance: float | None = self.together(Call.SETTLE, seconds, wait_s)
        return distance

    def finish(self, seconds: float) -> None:
        self.together(Call.FINISH, seconds)

    def merge(self, run: str) -> None:
        self.together(Call.MERGE, run)

    def reduce(self, figures: Mapping[str, Any]) -> dict[str, Reduced]:
        """Reduce rank 0's figures with those of the other members."""
        reduced: dict[str, Reduced] = self.together(Call.REDUCE, figures)
        return reduced

    def load(self, path: str | os.PathLike[str]) -> dict[str, Any]:
        """Load a checkpoint, which rank 0 reads."""
        figures: dict[str, Any] = self.together(Call.LOAD, path)
        self.samplers.load(figures.get("samplers"))
        return figures

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        check_state(state, self.state)  # Every rank checks it before any of them waits for another.
        if self.knowledge.last_report is not None:
            self.together(Call.LOAD_STATE_DICT, state)
        self.samplers.load(state.get("samplers"))

    def save(self, path: str | os.PathLike[str], keep: int = 1) -> None:
        """Save a checkpoint: of a sharded model all ranks give their parts, otherwise rank 0 saves alone."""
        if self.part.is_sharded:
            self.together(Call.SAVE, path, keep)

    def export(self, path: str | os.PathLike[str]) -> None:
        if self.part.is_sharded:
            self.together(Call.EXPORT, path)

    # -- readings: the same on all ranks at the same step ------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        """Return the run's metadata for a checkpoint."""
        knowledge = self.knowledge
        swarm_samples = knowledge.swarm_samples + knowledge.view.sharers * knowledge.uncounted_samples
        return {
            **knowledge.report.run, "steps": knowledge.steps, "samples": self.trained_on,
            "swarm_samples": swarm_samples, "samplers": self.samplers.state(),
            "finished": knowledge.finished,
        }  # fmt: skip

    @property
    def me(self) -> PeerId:
        return self.knowledge.report.me

    @property
    def address(self) -> str:
        return self.knowledge.report.address

    @property
    def view(self) -> SwarmView:
        return self.knowledge.view

    @property
    def trained_on(self) -> int:
        """Return the samples of all ranks."""
        return self.knowledge.samples + self.knowledge.uncounted_samples

    @property
    def swarm_samples(self) -> int:
        return self.knowledge.swarm_samples

    @property
    def finished(self) -> bool:
        return self.knowledge.finished

    def members(self) -> tuple[Member, ...]:
        return self.knowledge.members()

    def inventory(self) -> Inventory:
        return self.state.inventory()

    def metrics(self) -> Metrics:
        return self.knowledge.metrics()
