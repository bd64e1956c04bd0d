"""Node: what a training loop holds."""

from __future__ import annotations

import dataclasses
import math
import os
import signal
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gossip.arithmetic.mixing import OuterStep
from gossip.averaging.boundary import Boundary, Visit
from gossip.codecs import self_test
from gossip.config import Config
from gossip.errors import CheckpointError, ConfigError, LayoutError, LocalError
from gossip.peer import Peer
from node import leaving
from node.data.sharding import Shard, samples_in
from node.loop import StepLoop
from node.model import checkpoint
from node.model.kept import KeptWeights
from node.model.pool import VectorPool
from node.model.quasi_global import QuasiGlobal
from node.model.snapshot import ModelState
from node.model.tensors import plain_name
from node.observe.figures import Metrics, Reading, Source, reading
from node.observe.members import Member, SwarmView
from node.runtime import Runtime
from node.service import LEAVE_S, REPORT_S, Service
from node.settings import Settings
from node.thread import NetworkThread

__all__ = ["Member", "Metrics", "Node"]

FAREWELL_S = 0.5  # for a newcomer to ask for the next piece of a finished run's weights
CLOSED_PATIENCE = 3.0  # times join_timeout_s, with seeds that accept connections and close them at once
ALONE_S = 1.0  # how old the newest snapshot of a node alone gets, which newcomers are given while its loop stands
LAST_S = 10.0  # and in company, where each exchange takes one
LAST_WORK = 100.0  # times what a copy takes, between two of them
COPY_RATE = 10e9  # bytes a second that a copy may count as, since a GPU's goes on beside the loop
SETTLED = 1e-4  # |theirs - ours| / |ours| of an exchange that found nothing left to agree on


class Node:
    """One node of a swarm beside an ordinary training loop; used as ``with Node(model, optimizer, ...) as node``.

    ``model``: a torch module, or a mapping of names to tensors or writable arrays. ``optimizer``: with one, mixes take
    the outer step of :meth:`gossip.config.Config.for_training`. ``seeds``: "host:port" of any nodes, or invites; empty
    starts a swarm. ``listen``: "host:port", port 0 for a free one, "none" to only dial out.
    ``advertise``: the address others should dial, when it differs. ``secret``: the file that holds the swarm's secret.
    ``state_dir``: where the node's key and address book are kept; None: a new identity at every start. What is not
    given comes from GOSSIP_SEEDS, GOSSIP_LISTEN, GOSSIP_ADVERTISE, GOSSIP_SECRET_FILE, GOSSIP_STATE_DIR, GOSSIP_CONFIG.
    ``join_or_fail_s``: raise LocalError, naming what became of each seed, unless the weights of a swarm are here within
    so many seconds; without it (and without GOSSIP_MUST_JOIN) a node that reaches nobody starts alone in the end.

    Raises LocalError and its kinds (ConfigError, IdentityError, LayoutError) with one sentence saying what to do.
    """

    def __init__(
        self,
        model: nn.Module | Mapping[str, Any],
        optimizer: torch.optim.Optimizer | None = None,
        *,
        seeds: Iterable[str] = (),
        listen: str | None = None,
        advertise: str | None = None,
        secret: str | os.PathLike[str] | None = None,
        state_dir: str | os.PathLike[str] | None = None,
        config: Config | None = None,
        join_or_fail_s: float | None = None,
    ) -> None:
        self_test()
        model = unwrapped(model)
        check_optimizer(optimizer)
        self.settings = Settings.gather(
            seeds, listen, advertise, secret, state_dir, config, join_or_fail_s=join_or_fail_s
        )  # fmt: skip
        self.quasi_global = optimizer if isinstance(optimizer, QuasiGlobal) else None
        if optimizer is not None:
            decided = self.settings.config.for_training(self.quasi_global is not None)
            self.settings = dataclasses.replace(self.settings, config=decided)
        self.config = self.settings.config
        self.model, self.optimizer = model, optimizer
        self.state = ModelState(model, optimizer)
        self.pool = VectorPool(self.state)
        self.wake = threading.Event()  # for a training loop that has nothing else to do (joining, settling)
        self.boundary = Boundary(
            self.state, self.pool, KeptWeights(self.state, optimizer, self.keep), self.config.conserves,
            threading.Lock(), self.wake.set, self.wake.clear,
        )  # fmt: skip
        self.kept_in: Path | None = None  # where the weights are that this node gave up for another run's
        config, parameters = self.config, self.state.layout.parameters
        self.outer = OuterStep(parameters, *config.outer, config.averaged)
        self.loop = StepLoop(self.config, self.boundary, self, REPORT_S)
        self.outer_lock = threading.Lock()  # it moves in the network's threads, and is reset in the training thread
        self.service = Service(
            self.settings, self.state, self.boundary, self.pool, self.outer, self.outer_lock, self.wake,
            self.loop.signals, self.figures,
        )  # fmt: skip
        self.thread = NetworkThread()
        self.steps = self.samples = 0
        self.loss: Any = None
        self.lost = self.lost_told = False  # the loss is no number, and that was said
        self.passes = 0
        self.overheads: deque[float] = deque(maxlen=512)
        self.optimizer_at = -math.inf
        self.handler: Any = None

    # -- life ----------------------------------------------------------------------------------------------------
    def __enter__(self) -> Self:
        if self.service.runtime is not None:
            raise LocalError("This Node was used already: make a new one for each run.")
        if leaving.asked():
            raise SystemExit(128 + signal.SIGTERM)
        if not self.outer.plain:
            self.reset_outer()
        self.install_handler()
        try:
            self.thread.start(self.service.main)
            self.join()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Say LEFT and stop, in about a second at most; ``with`` does it."""
        if self.service.leaving is not None:
            self.thread.call(self.service.leaving.set)
        self.thread.join(2 * LEAVE_S)
        if self.handler is not None:
            signal.signal(signal.SIGTERM, self.handler)
            self.handler = None

    def install_handler(self) -> None:
        """SIGTERM leaves the with block; a program with a handler of its own keeps it."""
        if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:

            def leave(number: int, frame: FrameType | None) -> None:
                raise SystemExit(128 + number)

            self.handler = signal.signal(signal.SIGTERM, leave)

    def join(self) -> None:
        """Until this node holds weights to train: taken from the swarm, or its own."""
        runtime, limit_s, began = self.runtime, self.settings.join_or_fail_s, time.monotonic()
        runtime.counts = lambda: (self.steps, self.samples)
        while True:
            self.wake.wait(0.02)
            self.thread.check()
            self.visit()
            ready, refusal = runtime.peer.ready and not self.boundary.wanted, runtime.doors.refusal
            waited_s = time.monotonic() - began
            # A seed that only closes may be too busy, or a forwarder whose node is down: it is tried for a while.
            patient = waited_s < CLOSED_PATIENCE * self.config.join_timeout_s and not ready
            final = refusal is not None and not (patient if refusal.code == "closed" else ready)
            if final and not runtime.doors.dialling and not len(runtime.links):
                raise LocalError(f"Could not join: {refusal}") from refusal
            if limit_s is not None and waited_s > limit_s and not ready:
                raise LocalError(f"Could not join within {limit_s:g} s: {runtime.doors.why_alone()}.")
            if ready:
                self.visit()  # and with it a copy for newcomers: until the first step may be long
                self.heard()  # and with the weights the count of what is behind them
                return

    def figures(self) -> Reading:
        return reading(self.source())

    def source(self) -> Source:
        runtime = self.runtime
        return Source(
            runtime.peer, runtime.links, self.steps, self.samples, self.swarm_samples, runtime.streams.durations,
            self.overheads,
        )  # fmt: skip

    @property
    def runtime(self) -> Runtime:
        if self.service.runtime is None:
            raise LocalError("This Node is not running: use it inside its with block.")
        return self.service.runtime

    @property
    def peer(self) -> Peer:
        return self.runtime.peer

    @property
    def view(self) -> SwarmView:
        return self.service.view

    # -- the training loop's ---------------------------------------------------------------------------------------
    @property
    def id(self) -> str:
        """32 hexadecimal digits: the hash of this node's public key."""
        return self.service.identity.id.hex()

    @property
    def address(self) -> str:
        """What others dial, "host:port"; "none" for a node that nobody can dial."""
        address = self.peer.record.address
        return str(address) if address is not None else "none"

    @property
    def members(self) -> tuple[Member, ...]:
        """Everybody this node knows of, itself included, at most a quarter of a second old."""
        service = self.service
        if time.monotonic() - service.listed_at > REPORT_S:
            self.thread.call(service.list_members)
            self.heard()
        return service.members

    @property
    def swarm_samples(self) -> int:
        """Samples behind the weights of this node's run: the whole swarm's, the departed and what a checkpoint says
        included. Others are taken to go on at the pace that they said last, within 2 % where it is steady: schedules
        and stopping rules agree about as closely, and the number may fall a little."""
        view = self.view
        return view.swarm_samples + self.samples - view.own_samples

    @property
    def finished(self) -> bool:
        """Whether this node's run has reached its end: somebody called :meth:`finish`, here or on most members, or the
        members that gave this node its weights said so. A loop that asks ends with its swarm, and a late-comer's does
        not begin: ``while not node.finished and node.swarm_samples < samples``."""
        return self.peer.finished

    def finish(self, seconds: float = 5.0) -> None:
        """The run is complete: call it at the end, with the weights as they are to be. Newcomers get them and learn
        that nothing is left to train; others end when most members say so. A state directory remembers it. Waits while
        newcomers fetch the weights, for up to ``seconds``."""
        runtime, peer = self.runtime, self.peer
        self.thread.call(lambda: runtime.perform(peer.finish(runtime.now)))
        self.heard()
        self.service.state_dir.finish(peer.genesis)
        now = time.monotonic()
        until, quiet_at = now + seconds, now + FAREWELL_S
        while now < until and (now < quiet_at or peer.serving):
            self.wake.wait(0.02)
            self.visit()
            now = time.monotonic()
            if peer.serving:
                quiet_at = now + FAREWELL_S

    def step(self, loss: Any = None, samples: int = 1) -> None:
        """Call after ``optimizer.step()``: counts the step, and lets finished exchanges land between two steps.

        ``loss``: a scalar tensor or number, for people; ``samples``: the batch's size. Never waits for the network, nor
        for a GPU. Raises LocalError when the network thread has died.
        """
        start = time.perf_counter()
        self.steps += 1
        self.samples += samples
        if loss is not None:
            self.loss = loss.detach() if isinstance(loss, Tensor) else loss
        self.loop.step(self.steps, start + self.service.clock_s)
        if self.config.max_version_gap is not None:
            self.hold()
        self.overheads.append(time.perf_counter() - start)

    def hold(self) -> None:
        """Stay at this boundary while a mix is under way for longer than ``max_version_gap`` allows, and until what it
        brought has landed."""
        self.heard()
        landing = self.loop.lands
        while self.loop.waits(landing):
            landing = True
            self.wake.wait(0.05)
            self.visit()
            self.heard()

    def heard(self) -> None:
        """Wait until the network thread has done what it was told so far: it is never far behind."""
        told = threading.Event()
        if self.thread.call(told.set):
            told.wait(1.0)

    def visit(self) -> None:
        """The step boundary: fulfil the network thread's wishes, and report."""
        self.loop.visit(time.perf_counter() + self.service.clock_s)

    # -- the loop's owner ------------------------------------------------------------------------------------------
    def mixed(self) -> None:
        if self.quasi_global is not None:
            self.quasi_global.mixed()

    def updated(self, visit: Visit) -> None:
        self.thread.check()
        self.thread.call(self.runtime.averager.updated, visit)

    def report(self, visit: Visit) -> None:
        self.thread.check()
        runtime, now = self.runtime, time.perf_counter()
        optimizer = None
        if now - self.optimizer_at > 5.0 or (self.optimizer is not None and not runtime.peer.gives_optimizer):
            self.optimizer_at = now
            optimizer = self.optimizer_state()
        loss = self.read_loss()
        self.thread.call(runtime.at_boundary, self.steps, self.samples, loss, visit, optimizer)
        self.watch_soundness(runtime)

    def keeps(self) -> bool:
        """Whether it is time for a copy of the weights that serves newcomers while this loop stands. Exchanges leave
        one; for who mixes with nobody it is made now and then, in a hundredth of its time."""
        peer, now = self.runtime.peer, time.monotonic()
        if not peer.ready or peer.taking:
            return False
        copy_s = max(self.state.copy_s, 4 * self.state.layout.size / COPY_RATE)
        every_s = max(LAST_WORK * copy_s, ALONE_S if peer.alone else LAST_S)
        if now - self.pool.last_at < every_s:
            return False
        self.pool.last_at = now
        return True

    def watch_soundness(self, runtime: Runtime) -> None:
        """Once a report: a loss that is no number is told once, and then the weights are looked at; and those that were
        spoiled may have been mended by the loop. Weights without a loss are looked at when they are to be sent."""
        lost, self.lost_told = self.lost and not self.lost_told, self.lost
        if not runtime.peer.sound:
            if not self.boundary.wanted and self.state.sound():
                self.thread.call(lambda: runtime.perform(runtime.peer.mended(runtime.now)))
        elif self.lost and not self.state.sound():
            self.thread.call(lambda: runtime.perform(runtime.peer.spoiled(None, runtime.now)))
        elif lost:
            sentence = f"The loss is not finite (step {self.steps}); the weights still are, and are mixed."
            self.thread.call(runtime.on_event, "loss", sentence)

    def optimizer_state(self) -> tuple[tuple[str, ...], tuple[tuple[str, float], ...]]:
        """What newcomers are told of the optimizer; nothing of one that keeps more than is exchanged."""
        try:
            return self.state.optimizer_keys, tuple(self.state.optimizer_scalars().items())
        except LayoutError:
            return (), ()

    def replaced(self, vector: Any) -> None:
        if self.quasi_global is not None:
            self.quasi_global.joined(keep=self.momentum_came(vector))
        with self.outer_lock:
            self.outer.reset(vector)

    def keep(self) -> None:
        """Write down what this node holds before it tries the weights of another run. Raises CheckpointError."""
        if self.kept_in is None:
            folder = self.settings.state_dir or Path(tempfile.mkdtemp(prefix="gossip-"))
            self.kept_in = Path(folder) / "before-merge.safetensors"
        self.save(self.kept_in)
        text = f"The weights of this node's run are kept in {self.kept_in}; node.load takes them back."
        self.thread.call(self.runtime.on_event, "kept", text)

    def merge(self, run: str) -> None:
        """Take the weights of another run, of which a notice told: ``run`` is its name, 32 hexadecimal digits. They are
        tried first, and the weights that are here are kept. Returns at once. Raises LocalError for what is no name."""
        try:
            genesis = bytes.fromhex(run)
        except ValueError:
            genesis = b""
        if len(genesis) != 16:
            raise LocalError(f"{run!r} names no run: give the 32 hexadecimal digits that the notice named.")
        runtime = self.runtime
        self.thread.call(lambda: runtime.perform(runtime.peer.merge(genesis, runtime.now)))

    def momentum_came(self, vector: Any) -> bool:
        """Whether the vector taken over held the optimizer's state as well, and that was ours to take: then it is here.
        The donor may train with another optimizer, whose state is as long and stays behind."""
        if not self.state.layout.size < vector.size == self.state.size(full=True):
            return False
        held = self.pool.take(vector.size)
        self.state.read(held.array, full=True)
        same = np.array_equal(held.array, vector)
        self.pool.give(held)
        return same

    def reset_outer(self) -> None:
        vector = self.pool.take()
        self.state.read(vector.array)
        with self.outer_lock:
            self.outer.reset(vector.array)
        self.pool.give(vector)

    def read_loss(self) -> float | None:
        loss = self.loss
        if isinstance(loss, Tensor) and loss.is_cuda:
            return self.read_cuda_loss(loss)
        if loss is None:
            return None
        return self.number(float(loss))

    def number(self, loss: float) -> float | None:
        self.lost = not math.isfinite(loss)
        return None if self.lost else loss

    def read_cuda_loss(self, loss: Tensor) -> float | None:
        """The loss of the last report whose copy has arrived: asking for this one would wait for the device."""
        value = None
        pending = getattr(self, "loss_copy", None)
        if pending is not None and pending[1].query():
            value = float(pending[0])
            self.last_loss = self.number(value)
            self.loss_copy = pending = None
        if pending is None:
            host = torch.empty((), pin_memory=True)
            host.copy_(loss.reshape(()), non_blocking=True)
            self.loss_copy = (host, torch.cuda.current_stream(loss.device).record_event())
        return getattr(self, "last_loss", None)

    def shard(self, dataset: Any, batch_size: int, shuffle: bool = True, epochs: int = 1) -> Iterator[Any]:
        """One pass (or ``epochs``) over this node's share of ``dataset``, in batches: divided by rendezvous hashing
        over the members alive, and looked up anew as they come and go: a dead member's part is covered again."""
        length = samples_in(dataset)
        # The swarm's count of passes, so that members agree on how this one is divided; our own where we are ahead.
        self.passes = max(self.passes, self.swarm_samples // length)
        shard = Shard(
            dataset, batch_size, shuffle, epochs, self.service.identity.id, lambda: self.view.owners,
            lambda: self.view.changes, first_pass=self.passes,
        )  # fmt: skip
        self.passes += epochs
        return iter(shard)

    def settle(self, seconds: float = 5.0) -> float:
        """Mix without training until the nodes agree, or for ``seconds``; returns the consensus distance (nan when
        there was nobody). Call it before evaluating or saving, on every node about the same time."""
        runtime, peer = self.runtime, self.peer
        until = time.monotonic() + seconds
        before = peer.counts.done
        self.thread.call(lambda: runtime.perform(peer.settle(True, runtime.now)))
        while time.monotonic() < until:
            self.wake.wait(0.02)
            self.visit()
            if peer.counts.done - before >= 3 and peer.agreement() < SETTLED:
                break
        self.thread.call(lambda: runtime.perform(peer.settle(False, runtime.now)))
        self.finish_exchanges(min(1.0, seconds))
        if not self.outer.plain:
            self.reset_outer()
        return peer.consensus_distance

    def finish_exchanges(self, seconds: float) -> None:
        """Let those under way land, so that what is evaluated or saved is what the partners have too."""
        runtime = self.runtime
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self.wake.wait(0.005)
            self.visit()
            if runtime.peer.idle and not self.boundary.owed and not self.boundary.wanted:
                return

    def metrics(self) -> Metrics:
        """A reading of now."""
        return Metrics.of(self.source())

    # -- checkpoints -------------------------------------------------------------------------------------------------
    def save(self, path: str | os.PathLike[str]) -> None:
        """Write model, optimizer and the run's figures to ``path`` (safetensors, a small JSON beside it), atomically.

        Raises CheckpointError in one sentence; the previous checkpoint is then intact.
        """
        peer = self.peer
        tensors = self.model.state_dict() if isinstance(self.model, nn.Module) else dict(self.model)
        tensors = {plain_name(name): torch.as_tensor(value) for name, value in tensors.items()}
        meta = {
            "format": 1, "fingerprint": self.state.layout.fingerprint, "genesis": peer.genesis.hex(),
            "version": peer.version, "steps": self.steps, "samples": self.samples,
            "swarm_samples": self.swarm_samples, "finished": peer.finished, "node": self.id,
            "members": len(self.view.owners),
        }  # fmt: skip
        checkpoint.save(path, tensors, self.optimizer.state_dict() if self.optimizer is not None else None, meta)

    def load(self, path: str | os.PathLike[str]) -> dict[str, Any]:
        """Continue the run of a checkpoint, with a swarm of any size; returns its figures.

        A living swarm of the same run is ahead of any file, so then its weights stay, and that is said. Others with
        another run behind them merge by the rule for two runs: the one with fewer samples takes the other's weights.
        Weights of no run, as any safetensors file of these names, are taken where nothing is trained yet.
        """
        saved = checkpoint.load(path)
        meta = dict(saved.meta)
        if meta.get("fingerprint", self.state.layout.fingerprint) != self.state.layout.fingerprint:
            raise CheckpointError(
                f"{path} holds another model than this node's: load it into the model it was saved from."
            )
        runtime, peer = self.runtime, self.peer
        run, samples, version = checkpoint.figures(meta, path)
        genesis = run or peer.genesis
        # Weights of no run begin one, where nothing is trained yet.
        ahead = self.swarm_samples >= samples if run is not None else self.swarm_samples > 0
        if genesis == peer.genesis and ahead:
            text = (
                f"{path} is not loaded: the run that this node holds has {self.swarm_samples:,} samples behind it, and "
                "stays."
            )
            self.thread.call(runtime.on_event, "load", text)
            return meta
        self.load_tensors(saved.tensors)
        self.boundary.mass = 1.0
        if self.quasi_global is not None:
            self.quasi_global.joined()
        if self.optimizer is not None and saved.optimizer_state is not None:
            self.optimizer.load_state_dict(saved.optimizer_state)
        if not self.outer.plain:
            self.reset_outer()
        resumed = threading.Event()

        def resume() -> None:
            runtime.averager.forget()
            peer.counted(self.steps, self.samples)
            over = meta.get("finished") is True
            runtime.perform(peer.resume(genesis, samples, version, runtime.now, over))
            self.service.view = self.view.refreshed(runtime.peer)
            resumed.set()

        self.thread.call(resume)
        resumed.wait(5.0)
        self.thread.check()
        return meta

    @torch.no_grad()
    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        if isinstance(self.model, nn.Module):
            named = {plain_name(name): name for name in self.model.state_dict()}  # compiled or not: the same model
            self.model.load_state_dict({named.get(plain_name(name), name): value for name, value in tensors.items()})
            return
        for name, value in self.model.items():
            target = value if isinstance(value, Tensor) else torch.as_tensor(value)
            target.copy_(tensors[name])


def unwrapped(model: nn.Module | Mapping[str, Any]) -> nn.Module | Mapping[str, Any]:
    """The module inside DistributedDataParallel, whose tensors are the same under their own names: with "module."
    before each it would be another model to nodes that run without it."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def check_optimizer(optimizer: object) -> None:
    """Raise :class:`~gossip.errors.ConfigError` for what is no single optimizer."""
    if isinstance(optimizer, list | tuple | dict):
        raise ConfigError(
            "Node takes one optimizer: give the one whose state newcomers should take over, and step the others "
            "yourself; the weights of all of them are exchanged."
        )
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        kind = type(optimizer).__name__
        raise ConfigError(f"optimizer is a {kind}: give a torch.optim.Optimizer, or leave it out.")
