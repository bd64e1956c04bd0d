"""The run whose weights a node holds: its progress, its checkpoints, and how to continue from one."""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from gossip.errors import CheckpointError, LocalError
from gossip.ids import quantity
from gossip.wire.records import within
from node.data.sampler import Samplers
from node.loop.live import LiveModel
from node.loop.network_side import NetworkSide
from node.model import checkpoint
from node.model.state import State
from node.observe import notices
from node.observe.members import SwarmView
from node.storage.fetching import fetched
from node.storage.older import kept_names
from node.storage.uploads import CheckpointUploads
from node.storage.urls import beside, is_url, shown

__all__ = ["OF_OTHERS", "HeldRun", "NoRanks", "OtherRanks", "check_state"]

LOOK_S = 1.0  # Interval of the checks whether the network thread has ended.
OF_OTHERS = "The state of a checkpoint"  # The program has loaded these weights itself.


class OtherRanks(Protocol):
    """The other ranks of a node, which make each change of the model too."""

    def mixed(self) -> None:
        """Note that updates were added to the model here."""

    def replaced(self) -> None:
        """Note that other weights replaced those of this node."""

    def beat(self) -> None:
        """Note that this rank waits at a boundary, and has not ended."""

    @property
    def ahead(self) -> int:
        """Return an estimate of the samples of all ranks that are not counted yet."""


class NoRanks:
    """The other ranks of a node of one process: none."""

    ahead = 0

    def mixed(self) -> None: ...
    def replaced(self) -> None: ...
    def beat(self) -> None: ...


class HeldRun:
    """The run of a node's live model, used by the training thread."""

    def __init__(self, live: LiveModel, network: NetworkSide, samplers: Samplers, ranks: OtherRanks) -> None:
        self.live, self.network, self.samplers, self.ranks = live, network, samplers, ranks
        live.backup.save = self.keep
        self.home: Path | None = None  # The folder for this node's own files.
        self.kept_in: Path | None = None  # The file with the weights that this node gave up for another run's.
        self.uploads = CheckpointUploads(self.tell)
        self.url: str | None = None  # The URL of the last save to a store.
        self.given: Mapping[str, Any] | None = None  # A state to continue from, once there are weights.
        self.steps = self.samples = 0
        self.shown = SwarmView(), 0  # A view, and the sample count shown with it.

    # -- readings --------------------------------------------------------------------------------------------------
    @property
    def view(self) -> SwarmView:
        return self.network.service.view

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

    # -- checkpoints -----------------------------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        """Return the run's metadata for a checkpoint."""
        peer, ahead = self.network.peer, self.ranks.ahead
        return {
            "fingerprint": self.live.state.layout.contents, "run_id": peer.view.run_id.hex(),
            "version": peer.local.version, "steps": self.steps, "samples": self.samples + ahead,
            "swarm_samples": self.swarm_samples + self.view.sharers * ahead, "passes": self.samplers.passes,
            "samplers": self.samplers.state(), "finished": peer.view.finished,
            "node": self.network.service.identity.id.hex(), "members": len(self.view.owners),
        }  # fmt: skip

    def save(self, path: str | os.PathLike[str], state: Mapping[str, Any] | None = None, keep: int = 1) -> None:
        """Write a checkpoint with this metadata, by default the present one. A store gets it from a thread."""
        kept_names(keep)
        if is_url(path):
            url = str(path)
            with self.uploads.spool(url, keep, self.folder()) as place:
                self.save(place, state)
            self.url = url
            return
        meta = dict(self.state_dict() if state is None else state)
        with self.live.average.in_checkpoint() as training:
            figures = {"averaged_mixes": self.live.average.mixes} if training else {}
            self.live.archive.save(path, meta | figures, training, keep)

    def load(self, path: str | os.PathLike[str]) -> dict[str, Any]:
        if is_url(path):
            self.uploads.wait(self.ranks.beat, str(path))  # It may be of this node, and still on its way.
            with fetched(str(path), self.folder(), self.ranks.beat) as copy:
                saved = self.live.archive.load(copy)
            return self.take(saved, shown(str(path)))
        return self.take(self.live.archive.load(path), str(path))

    def take(self, saved: checkpoint.Checkpoint, origin: str) -> dict[str, Any]:
        """Continue the run of a checkpoint that was read from there."""
        meta = dict(saved.meta)
        self.samplers.load(meta.get("samplers"))

        def put() -> None:
            self.live.archive.put(saved, origin)
            self.live.average.restore(saved.averaged, within("steps", meta.get("averaged_mixes", 0)))

        self.go_on(meta, origin, put)
        return meta

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue the run of this state, whose weights the program has loaded, now or at the start."""
        check_state(state, self.live.state)
        self.samplers.load(state.get("samplers"))
        if self.network.service.runtime is None:
            self.given = dict(state)
        else:
            self.go_on(state, OF_OTHERS, lambda: None)

    def go_on(self, meta: Mapping[str, Any], origin: str, put: Callable[[], None]) -> None:
        """Continue a checkpoint's run. ``put`` loads its weights, which are not in the model yet."""
        peer = self.network.peer
        run, samples, version = checkpoint.figures(meta, origin)
        self.samplers.passes = max(self.samplers.passes, within("steps", meta.get("passes", 0)))
        run_id = run or peer.view.run_id
        # Weights without a run start one, if nothing is trained yet.
        ahead = self.swarm_samples >= samples if run is not None else self.swarm_samples > 0
        if run_id == peer.view.run_id and ahead:
            text = (
                f"{origin} is not loaded: the run that this node holds has {quantity(self.swarm_samples, 'sample')} "
                "behind it, and stays."
            )
            self.network.notice("load", text)
            return
        self.live.average.forget()
        put()
        self.ranks.replaced()
        self.live.boundary.mass = 1.0
        weights = None if self.live.outer.plain else self.live.pool.take()
        if weights is not None:
            self.live.state.read(weights.array)
        resumed = threading.Event()

        def resume() -> None:
            try:
                runtime, peer = self.network.runtime, self.network.peer  # Use the newest network side.
                # Drop pending work first: a mixing job that runs after the reset would move the outer step again.
                runtime.averager.forget()
                if weights is not None:
                    runtime.averager.replaced(weights.array)
                    self.live.pool.give(weights)
                peer.counted(self.steps, self.samples)
                over = meta.get("finished") is True
                runtime.perform(peer.resume(run_id, samples, version, runtime.now, over))
                self.network.service.view = self.view.refreshed(runtime.peer)
            finally:
                resumed.set()  # A fault in here restarts the network side, and the loop continues.

        if self.network.thread.call(resume):
            # Wait without a limit: until the network thread has dropped old updates, they would land in the new
            # weights.
            while not resumed.wait(LOOK_S) and not self.network.thread.ended.is_set():
                pass
        self.network.thread.check()

    # -- what a node writes down by itself -------------------------------------------------------------------------
    def keep(self) -> None:
        """Save the node's state before it tries another run's weights. Raise CheckpointError if that fails."""
        if self.kept_in is None:
            self.kept_in = self.folder() / "before-merge.safetensors"
        self.save(self.kept_in)
        text = f"The weights of this node's run are kept in {self.kept_in}{self.also()}; node.load takes them back."
        self.network.notice("kept", text)

    def also(self) -> str:
        """Send the weights that were kept to the store of the node's checkpoints too: this disk may not outlive it."""
        assert self.kept_in is not None
        if self.url is None:
            return ""
        url = beside(self.url, "before-merge")
        try:
            with self.uploads.spool(url, 1, self.folder()) as place:
                os.link(self.kept_in, place)  # A later save replaces the file, and not this one.
        except (OSError, CheckpointError):
            return ""
        return f", and go to {shown(url)}"

    def folder(self) -> Path:
        """Return the folder for this node's own files. Raise CheckpointError if there is none."""
        if self.home is None:
            try:
                self.home = Path(self.network.service.settings.state_dir or tempfile.mkdtemp(prefix="gossip-"))
            except OSError as error:
                raise CheckpointError(f"No temporary folder can be made for them: {error.strerror}.") from error
        return self.home

    def tell(self, kind: str, sentence: str) -> None:
        """Tell the user of an event, also once the network thread has ended."""
        if not self.network.thread.call(self.network.runtime.on_event, kind, sentence):
            notices.log(self.network.service.identity.id.hex(), kind, sentence, True)

    def close(self) -> None:
        """Wait until checkpoints have reached their stores, and remove the folder if nothing is left in it."""
        self.uploads.wait()
        if self.home is not None and self.network.service.settings.state_dir is None:
            with contextlib.suppress(OSError):
                self.home.rmdir()
                self.home = None

    def take_final(self) -> None:
        """Load the final weights of a finished run from the state directory, if no member is left.

        Otherwise a program would evaluate untrained weights, and save them over its checkpoint.
        """
        state_dir = self.network.service.state_dir
        if state_dir.final is None or not state_dir.finished():
            return
        try:
            self.load(state_dir.final)
        except CheckpointError as error:
            raise LocalError(
                f"The run of the state directory {state_dir.path} is finished, and its weights cannot be taken: "
                f"{error} Delete its file 'finished' to begin anew, or name another directory."
            ) from error

    def keep_final(self) -> None:
        """Save the final weights for a later start in the state directory, when no other member may have them."""
        path = self.network.service.state_dir.final
        if path is not None:
            try:
                self.save(path)
            except CheckpointError as error:
                text = f"The final weights are not kept in the state directory: {error}"
                self.network.notice("state", text)


def check_state(given: object, state: State) -> None:
    """Raise CheckpointError if ``given`` is no node's state, or that of another model."""
    if not isinstance(given, Mapping):
        raise CheckpointError(f"A node's state is a mapping, as state_dict() gives, not {type(given).__name__}.")
    if given.get("fingerprint", state.layout.contents) != state.layout.contents:
        raise CheckpointError(f"{OF_OTHERS} belongs to another model than this node's: load it beside its weights.")
    checkpoint.figures(given, OF_OTHERS)
