"""The run whose weights a node holds: its progress, its checkpoints, and how to continue from one."""

from __future__ import annotations

import math
import os
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from gossip.arithmetic.correction import Correction
from gossip.arithmetic.mixing import OuterStep
from gossip.averaging.boundary import Boundary, Update
from gossip.errors import CheckpointError, LocalError
from gossip.ids import PeerId, quantity
from gossip.peer import Peer
from gossip.wire.records import within
from node.average import Average
from node.data.sampler import Samplers, Sharers
from node.loop import WakeEvent
from node.model import checkpoint
from node.model.backup import KeptWeights
from node.model.checkpoint import Archive
from node.model.optimizers import Optimizers
from node.model.pool import VectorPool
from node.model.snapshot import ModelState
from node.model.state import State
from node.network.runtime import Runtime
from node.observe.members import SwarmView
from node.service import Service
from node.settings import Settings
from node.thread import NetworkThread

__all__ = ["HeldRun", "check_state"]

LOOK_S = 1.0  # Interval of the checks whether the network thread has ended.
OF_OTHERS = "The state of a checkpoint"  # The program has loaded these weights itself.


class HeldRun:
    """A node's model, optimizers and progress, used by the training thread."""

    rank, size = 0, 1  # The place among the processes that form one node, and their number.
    make_boundary: Callable[..., Boundary] = Boundary
    service: Service

    def __init__(
        self, model: nn.Module | Mapping[str, Any] | State, optimizers: Optimizers, settings: Settings,
        frozen: bool = False, keep_average: bool = False,
    ) -> None:  # fmt: skip
        self.settings, self.config = settings, settings.config
        self.model, self.optimizers = model, optimizers
        self.state = model if isinstance(model, State) else ModelState(model, optimizers, frozen)
        self.state.check()
        self.average = Average(self.state, keep_average)
        self.pool = VectorPool(self.state)
        self.wake = WakeEvent()  # Wakes a training loop that only waits (joining, settling).
        self.boundary = self.make_boundary(
            self.state, self.pool, KeptWeights(self.state, optimizers, self.keep), self.config.conserves,
            threading.Lock(), self.wake.set, self.wake.clear,
        )  # fmt: skip
        self.outer = OuterStep(self.state.layout.parameters, *self.config.outer, self.config.averaged)
        every = self.config.first_interval
        if self.config.kappa and every is not None and self.size == 1:
            self.outer.correction = Correction(
                self.state.layout.exchanged, self.state.layout.parameters, self.config.kappa, every
            )
        # The network's threads move the outer step, and the training thread resets it.
        self.outer_lock = threading.Lock()
        self.thread = NetworkThread()
        self.archive = Archive(self.state, optimizers)
        self.kept_in: Path | None = None  # The file with the weights that this node gave up for another run's.
        self.given: Mapping[str, Any] | None = None  # A state to continue from, once there are weights.
        self.steps = self.samples = 0
        self.begun = False  # Whether the node has weights, its own or others', from which mixing starts.
        self.rate = math.nan  # The learning rate, if the loop passes it and no optimizer has it.
        self.shown = SwarmView(), 0  # A view, and the sample count shown with it.
        self.passes = 0  # Passes over data that are sharded among the members.
        self.samplers = Samplers(Sharers.of(self))

    # -- what is looked at -----------------------------------------------------------------------------------------
    @property
    def runtime(self) -> Runtime:
        if self.service.runtime is None:
            raise LocalError("This Node is not running: use it inside its with block.")
        return self.service.runtime

    @property
    def peer(self) -> Peer:
        return self.runtime.peer

    @property
    def me(self) -> PeerId:
        return self.service.identity.id

    @property
    def trained_on(self) -> int:
        """Return the samples that this loop has trained on."""
        return self.samples

    @property
    def view(self) -> SwarmView:
        return self.service.view

    @property
    def swarm_samples(self) -> int:
        """Return the samples that all members together have put behind this run's weights.

        The number falls only when the node settles or takes another run. An exchange may lower the node's own number,
        as :mod:`gossip.exchange.progress` explains, but not this one.
        """
        view, (before, most) = self.view, self.shown
        reached = view.samples_at(self.samples)
        self.shown = view, max(reached, most) if view.continues(before) else reached
        return self.shown[1]

    # -- what becomes of the weights -----------------------------------------------------------------------------
    def mixed(self, updates: Sequence[Update]) -> None:
        """Note that updates of exchanges were added to the model."""
        self.optimizers.mixed()
        self.average.mixed([update.positions for update in updates])

    def replaced(self, vector: Any) -> None:
        """Reset all that depends on the old weights; the model now holds ``vector``."""
        # The donor may use another optimizer, whose state has the same size and is not taken.
        if self.optimizers.quasi_global:
            self.optimizers.joined(keep=self.state.holds(vector))
        self.average.forget()
        self.begun = True
        with self.outer_lock:
            if self.outer.begun:
                self.outer.replace(vector)
            else:
                self.outer.begin(vector)

    # -- checkpoints -----------------------------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        """Return the run's metadata for a checkpoint."""
        peer = self.peer
        return {
            "fingerprint": self.state.layout.contents, "run_id": peer.view.run_id.hex(), "version": peer.local.version,
            "steps": self.steps, "samples": self.samples, "swarm_samples": self.swarm_samples, "passes": self.passes,
            "samplers": self.samplers.state(), "finished": peer.view.finished, "node": self.service.identity.id.hex(),
            "members": len(self.view.owners),
        }  # fmt: skip

    def save(self, path: str | os.PathLike[str]) -> None:
        with self.average.in_checkpoint() as training:
            figures = {"averaged_mixes": self.average.mixes} if training else {}
            self.archive.save(path, self.state_dict() | figures, training)

    def load(self, path: str | os.PathLike[str]) -> dict[str, Any]:
        saved = self.archive.load(path)
        meta = dict(saved.meta)
        self.samplers.load(meta.get("samplers"))

        def put() -> None:
            self.archive.put(saved, path)
            self.average.restore(saved.averaged, within("steps", meta.get("averaged_mixes", 0)))

        self.go_on(meta, str(path), put)
        return meta

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue the run of this state, whose weights the program has loaded, now or at the start."""
        check_state(state, self.state)
        self.samplers.load(state.get("samplers"))
        if self.service.runtime is None:
            self.given = dict(state)
        else:
            self.go_on(state, OF_OTHERS, lambda: None)

    def go_on(self, meta: Mapping[str, Any], origin: str, put: Callable[[], None]) -> None:
        """Continue a checkpoint's run. ``put`` loads its weights, which are not in the model yet."""
        peer = self.peer
        run, samples, version = checkpoint.figures(meta, origin)
        self.passes = max(self.passes, within("steps", meta.get("passes", 0)))
        run_id = run or peer.view.run_id
        # Weights without a run start one, if nothing is trained yet.
        ahead = self.swarm_samples >= samples if run is not None else self.swarm_samples > 0
        if run_id == peer.view.run_id and ahead:
            text = (
                f"{origin} is not loaded: the run that this node holds has {quantity(self.swarm_samples, 'sample')} "
                "behind it, and stays."
            )
            self.thread.call(self.runtime.on_event, "load", text)
            return
        self.average.forget()
        put()
        self.boundary.mass = 1.0
        weights = None if self.outer.plain else self.pool.take()
        if weights is not None:
            self.state.read(weights.array)
        resumed = threading.Event()

        def resume() -> None:
            try:
                runtime, peer = self.runtime, self.peer  # Use the newest network side.
                # Drop pending work first: a mixing job that runs after the reset would move the outer step again.
                runtime.averager.forget()
                if weights is not None:
                    runtime.averager.replaced(weights.array)
                    self.pool.give(weights)
                peer.counted(self.steps, self.samples)
                over = meta.get("finished") is True
                runtime.perform(peer.resume(run_id, samples, version, runtime.now, over))
                self.service.view = self.view.refreshed(runtime.peer)
            finally:
                resumed.set()  # A fault in here restarts the network side, and the loop continues.

        if self.thread.call(resume):
            # Wait without a limit: until the network thread has dropped old updates, they would land in the new
            # weights.
            while not resumed.wait(LOOK_S) and not self.thread.ended.is_set():
                pass
        self.thread.check()

    def reset_outer(self) -> None:
        vector = self.pool.take()
        self.state.read(vector.array)
        with self.outer_lock:
            self.outer.reset(vector.array)
        self.pool.give(vector)

    # -- what a node writes down by itself -------------------------------------------------------------------------
    def keep(self) -> None:
        """Save the node's state before it tries another run's weights. Raise CheckpointError if that fails."""
        if self.kept_in is None:
            try:
                folder = self.settings.state_dir or Path(tempfile.mkdtemp(prefix="gossip-"))
            except OSError as error:
                raise CheckpointError(f"No temporary folder can be made for them: {error.strerror}.") from error
            self.kept_in = Path(folder) / "before-merge.safetensors"
        self.save(self.kept_in)
        text = f"The weights of this node's run are kept in {self.kept_in}; node.load takes them back."
        self.thread.call(self.runtime.on_event, "kept", text)

    def take_final(self) -> None:
        """Load the final weights of a finished run from the state directory, if no member is left.

        Otherwise a program would evaluate untrained weights, and save them over its checkpoint.
        """
        state_dir = self.service.state_dir
        if state_dir.final is None or not state_dir.finished():
            return
        try:
            # In a group all ranks are here already: call the base class's load, which does not gather them.
            HeldRun.load(self, state_dir.final)
        except CheckpointError as error:
            raise LocalError(
                f"The run of the state directory {state_dir.path} is finished, and its weights cannot be taken: "
                f"{error} Delete its file 'finished' to begin anew, or name another directory."
            ) from error

    def keep_final(self) -> None:
        """Save the final weights for a later start in the state directory, when no other member may have them."""
        path = self.service.state_dir.final
        if path is not None:
            try:
                self.save(path)
            except CheckpointError as error:
                text = f"The final weights are not kept in the state directory: {error}"
                self.thread.call(self.runtime.on_event, "state", text)


def check_state(given: object, state: State) -> None:
    """Raise CheckpointError if ``given`` is no node's state, or that of another model."""
    if not isinstance(given, Mapping):
        raise CheckpointError(f"A node's state is a mapping, as state_dict() gives, not {type(given).__name__}.")
    if given.get("fingerprint", state.layout.contents) != state.layout.contents:
        raise CheckpointError(f"{OF_OTHERS} belongs to another model than this node's: load it beside its weights.")
    checkpoint.figures(given, OF_OTHERS)
