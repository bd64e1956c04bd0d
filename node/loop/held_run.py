"""The run whose weights a node holds: its progress, its checkpoints, and how a node continues from one.

A *run* is one training from one start. Its id travels with its weights, and all members with this id train one model.
"""

import contextlib
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from gossip.effects import MemberState
from gossip.errors import CheckpointError, DataError, LocalError, checked_whole
from gossip.ids import PeerId, from_hex, quantity, short
from node.data.sampler import Samplers
from node.loop.live import LiveModel
from node.loop.network_side import NetworkSide
from node.model import checkpoint
from node.model.state import State
from node.observe.members import SwarmView
from node.storage.copies import fetched_copy
from node.storage.older import MAX_KEPT, companion
from node.storage.uploads import CheckpointUploads
from node.storage.urls import beside, is_url, public_url, with_ending

LOADED_STATE = "The state of a checkpoint"  # The origin of a state whose weights the program has loaded itself.


class OtherRanks:
    """The other ranks of a node, which make each change of the model too. By default there are none."""

    def on_replaced(self) -> None:
        """Handle the replacement of this rank's weights."""

    def send_heartbeat(self) -> None:
        """Tell the other ranks that this rank waits at a boundary, and has not ended."""

    @property
    def uncounted_samples(self) -> int:
        """Return an estimate of the samples that all ranks have trained on and that this rank has not counted yet."""
        return 0


class HeldRun:
    """The run of a node's live model, used by the training thread."""

    def __init__(self, live: LiveModel, network: NetworkSide, samplers: Samplers, ranks: OtherRanks) -> None:
        self.live, self.network, self.samplers, self.ranks = live, network, samplers, ranks
        live.backup.save = self.save_before_merge
        self.own_folder: Path | None = None  # The folder for this node's own files, once it is needed.
        # The file with the weights that this node gave up for another run's, once there were any.
        self.before_merge_path: Path | None = None
        self.uploads = CheckpointUploads(network.notify)
        self.has_told_of_replaced = False  # The user knows that several nodes save to one path.
        self.url: str | None = None  # The URL of the last save to a store; None before the first.
        self.early_state: Mapping[str, Any] | None = None  # A state that was loaded before the node started.
        self.steps = self.samples = 0  # Those of this loop.
        self.shown_samples = SwarmView(), 0  # The last view of the swarm, and the sample count shown with it.

    # -- readings --------------------------------------------------------------------------------------------------
    @property
    def view(self) -> SwarmView:
        return self.network.service.view

    @property
    def swarm_samples(self) -> int:
        """Return the number of samples that this run's weights were trained on, by all members together.

        An exchange may lower the node's own number, as :mod:`gossip.exchange.progress` explains. So the largest number
        of the run is returned. It falls only when the node settles or takes another run. Parts of a swarm that trained
        apart count as their mean when they meet, as their weights do.
        """
        view, (last_view, largest) = self.view, self.shown_samples
        samples = view.samples_at(self.samples)
        if view.continues(last_view):
            samples = max(samples, largest)
        self.shown_samples = view, samples
        return samples

    # -- checkpoints -----------------------------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        """Return the run's metadata for a checkpoint."""
        peer, uncounted = self.network.peer, self.ranks.uncounted_samples
        # Each of our samples counts as often as the run has members, as in SwarmView.samples_at.
        swarm_samples = self.swarm_samples + self.view.sharers * uncounted
        return {
            "fingerprint": self.live.state.layout.contents_fingerprint, "run_id": peer.view.run_id.hex(),
            "version": peer.local.version, "steps": self.steps, "samples": self.samples + uncounted,
            "swarm_samples": swarm_samples, "samplers": self.samplers.state(),
            "finished": peer.view.finished,
            "node": self.network.service.identity.id.hex(), "members": len(self.view.owners),
        }  # fmt: skip

    def save(self, path: str | os.PathLike[str], state: Mapping[str, Any] | None = None, keep: int = 1) -> None:
        """Write a checkpoint.

        Args:
            path: A path, or the URL of a store, to which a thread then uploads the checkpoint.
            state: The metadata, by default :meth:`state_dict`.
            keep: The number of checkpoints to keep under this name.
        """
        advice = f"give how many checkpoints to keep, from 1 to {MAX_KEPT}."
        keep = checked_whole("keep", keep, advice, 1, MAX_KEPT, CheckpointError)
        if is_url(path):
            with self.uploads.spool(str(path), keep, self.folder()) as file:
                self.save(file, state)
            self.url = str(path)
            self.live.archive.written = public_url(with_ending(self.url))
            return
        self.tell_of_replaced(path, self.live.archive.save(path, self.state_dict() if state is None else state, keep))

    def save_own(self, path: Path) -> None:
        """Write a checkpoint of the node's own. The user's is the one that figures and messages name."""
        written = self.live.archive.written
        try:
            self.save(path)
        finally:
            self.live.archive.written = written

    def tell_of_replaced(self, path: str | os.PathLike[str], replaced: Mapping[str, Any]) -> None:
        """Tell the user once if another node of this run saves to the same path, by the metadata that was replaced.

        A node that takes the place of a dead one may save to its path, and so may a new life of a node.
        """
        peer, writer = self.network.peer, from_hex(replaced.get("node"))
        if writer is None or self.has_told_of_replaced or replaced.get("run_id") != peer.view.run_id.hex():
            return
        member = PeerId(writer)
        if member == peer.id or not peer.membership.was_contacted(member):
            return
        if peer.membership.state(member) is not MemberState.DEAD:
            self.has_told_of_replaced = True
            text = (
                f"Member {short(member)} saves to {path} as well, and this save has replaced its checkpoint: save on "
                "one node alone, or put node.id into the path."
            )
            self.network.notify("overwritten", text)

    def load(self, path: str | os.PathLike[str]) -> dict[str, Any]:
        """Continue the run of the checkpoint at a path or URL, and return the checkpoint's metadata."""
        if is_url(path):
            self.uploads.wait(self.ranks.send_heartbeat, str(path))  # This node may still be uploading it.
            with fetched_copy(str(path), self.folder(), self.ranks.send_heartbeat) as copy:
                saved = self.live.archive.load(copy)
            return self.restore(saved, public_url(str(path)))
        return self.restore(self.live.archive.load(path), str(path))

    def restore(self, saved: checkpoint.Checkpoint, origin: str) -> dict[str, Any]:
        """Continue the run of a checkpoint that was read from ``origin``; return its metadata."""
        meta = dict(saved.meta)
        try:
            self.samplers.check(meta.get("samplers"))
        except DataError as error:
            raise CheckpointError(
                f"{origin} is not loaded: its sampler's state is damaged; use another file."
            ) from error

        def load_weights() -> None:
            self.live.archive.restore(saved, origin)
            if saved.lack and self.live.optimizers.all:
                text = f"{origin} is loaded without the optimizer's state, since {saved.lack}: this node's own stays."
                self.network.notify("load", text)

        if self.continue_run(meta, origin, load_weights) or not self.steps:  # A loop's own pass is ahead as well.
            self.samplers.load(meta.get("samplers"))
        return meta

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue the run of this state, whose weights the program has loaded: now, or once the node starts."""
        check_state(state, self.live.state)
        self.samplers.load(state.get("samplers"))
        if self.network.service.runtime is None:
            self.early_state = dict(state)
        else:
            self.continue_run(state, LOADED_STATE, None)

    def continue_run(self, meta: Mapping[str, Any], origin: str, load_weights: Callable[[], None] | None) -> bool:
        """Continue a checkpoint's run, unless this node holds the same run and is not behind the checkpoint.

        Weights of no run are continued only by a node that has trained nothing.

        Args:
            meta: The checkpoint's metadata.
            origin: The checkpoint's name in messages.
            load_weights: Loads the checkpoint's weights into the model. It is not called if the present run stays. None
                if the program has loaded them inside the block of the node.

        Returns:
            False if the present run stays.
        """
        peer = self.network.peer
        saved_run, samples, version = checkpoint.run_progress(meta, origin)
        if saved_run is None:  # Weights of no run are taken only if nothing is trained yet.
            run_id, is_present_ahead = peer.view.run_id, self.swarm_samples > 0
        else:
            run_id, is_present_ahead = saved_run, self.swarm_samples >= samples
        if run_id == peer.view.run_id and is_present_ahead:
            text = (
                f"{origin} is not loaded: the run that this node holds has {quantity(self.swarm_samples, 'sample')} "
                "behind it, and stays."
            )
            if load_weights is None:
                text += " Weights that the program has loaded count as its newest: load both before the Node starts."
            self.network.notify("load", text)
            return False
        if load_weights is not None:
            load_weights()
        self.ranks.on_replaced()
        self.live.boundary.mass = 1.0  # The push-sum mass of weights of which nothing was pushed away.
        # The outer step and the correction begin again from a copy of these weights. A node without both makes none.
        outer = self.live.outer
        weights = None if outer.is_plain and outer.correction is None else self.live.pool.take()
        if weights is not None:
            self.live.state.read(weights.array)

        def resume() -> None:
            runtime, peer = self.network.runtime, self.network.peer  # A fault may have replaced those of above.
            # Drop pending work first. A mixing job that runs after the reset would move the outer step again.
            runtime.averager.forget_old_weights()
            if weights is not None:
                runtime.averager.on_weights_replaced(weights.array)
                self.live.pool.give(weights)
            peer.update_counts(self.steps, self.samples)
            is_finished = meta.get("finished") is True
            runtime.perform(peer.resume(run_id, samples, version, runtime.now, is_finished))
            self.network.service.view = self.view.refreshed(runtime.peer)

        # Until the network thread has dropped old updates, the boundary would add them to the new weights.
        self.network.run_to_end(resume)
        return True

    # -- files that a node writes by itself --------------------------------------------------------------------------
    def save_before_merge(self) -> None:
        """Save the node's state before it tries another run's weights. Raises CheckpointError."""
        if self.before_merge_path is None:
            self.before_merge_path = self.folder() / "before-merge.safetensors"
        self.save_own(self.before_merge_path)
        places = f"{self.before_merge_path}{self.upload_before_merge()}"
        text = f"The weights of this node's run are kept in {places}; node.load takes them back."
        self.network.notify("kept", text)

    def upload_before_merge(self) -> str:
        """Upload the saved state next to the node's last checkpoint in a store, because this disk may be lost.

        Returns:
            A clause for the notice; empty if the node has saved to no store, or the upload cannot begin.
        """
        assert self.before_merge_path is not None
        if self.url is None:
            return ""
        url = beside(self.url, "before-merge")
        try:
            with self.uploads.spool(url, 1, self.folder()) as file:
                # A later save replaces the first names and leaves these.
                os.link(self.before_merge_path, file)
                optimizer_file = self.before_merge_path.with_name(companion(self.before_merge_path.name))
                if optimizer_file.exists():
                    os.link(optimizer_file, file.with_name(companion(file.name)))
        except (OSError, CheckpointError):
            return ""
        return f", and go to {public_url(url)}"

    def folder(self) -> Path:
        """Return the folder for this node's own files: the state directory, or a temporary one.

        Raises:
            CheckpointError: No temporary folder can be made.
        """
        if self.own_folder is None:
            try:
                self.own_folder = Path(self.network.service.settings.state_dir or tempfile.mkdtemp(prefix="gossip-"))
            except OSError as error:
                text = f"No temporary folder can be made for this node's checkpoints: {error.strerror}."
                raise CheckpointError(text) from error
        return self.own_folder

    def close(self) -> None:
        """Wait until all uploads have ended, and remove the temporary folder if it is empty."""
        self.uploads.wait()
        if self.own_folder is not None and self.network.service.settings.state_dir is None:
            with contextlib.suppress(OSError):
                self.own_folder.rmdir()
                self.own_folder = None

    def load_final(self) -> None:
        """Load the final weights of a finished run from the state directory. Call it if no member has sent weights.

        Otherwise the program would evaluate untrained weights, and save them over its checkpoint.
        """
        state_dir = self.network.service.state_dir
        if state_dir.final_checkpoint is None or not state_dir.finished_run():
            return
        try:
            self.load(state_dir.final_checkpoint)
        except CheckpointError as error:
            raise LocalError(
                f"The run of the state directory {state_dir.path} is finished, and its weights cannot be taken: "
                f"{error} Delete its file 'finished' to begin anew, or name another directory."
            ) from error

    def save_final(self) -> None:
        """Save the final weights in the state directory, for a later start at which no member may have them."""
        path = self.network.service.state_dir.final_checkpoint
        if path is not None:
            try:
                self.save_own(path)
            except CheckpointError as error:
                text = f"The final weights are not kept in the state directory: {error}"
                self.network.notify("state", text)


def check_state(loaded: object, state: State) -> None:
    """Raise CheckpointError if ``loaded`` is no node's state, or that of another model."""
    if not isinstance(loaded, Mapping):
        raise CheckpointError(f"A node's state is a mapping, as state_dict() gives, not {type(loaded).__name__}.")
    if loaded.get("fingerprint", state.layout.contents_fingerprint) != state.layout.contents_fingerprint:
        raise CheckpointError(f"{LOADED_STATE} belongs to another model than this node's: load it beside its weights.")
    checkpoint.run_progress(loaded, LOADED_STATE)
