"""The honest swarm under attack (the fortress): each node is a process, forked from one that has imported torch."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import digits_node
from foe import Target
from forked import Forked
from swarm_lab import Patient

from gossip.ids import Address, parse_address
from node.identity.keys import new_secret, parse_secret

__all__ = ["Fortress"]

STEP_MS = 15.0
WARM_STEPS = 400  # steps without pauses at the start, so that accuracy no longer rises during the calm
MIX_EVERY = 8
JOIN_S = 60.0


class Fortress:
    """The processes of one run: ``with Fortress(config) as fortress``. All of them are killed at the end."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = {"mix_every_steps": MIX_EVERY} | dict(config)
        self.folder = Path(tempfile.mkdtemp(prefix="gossip-siege-"))
        self.secret = self.folder / "secret"
        self.secret.write_text(new_secret())
        self.secret.chmod(0o600)
        self.nodes: list[Patient] = []
        self.others: list[Forked] = []  # the attackers

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        processes = [*(node.process for node in self.nodes), *self.others]
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def start(self, seeds: list[str]) -> Patient:
        """Start an honest node, without waiting for it to join."""
        name = f"n{len(self.nodes)}"
        diary, log = self.folder / f"{name}.jsonl", self.folder / f"{name}.log"
        arguments = ["--diary", str(diary), "--secret", str(self.secret), "--step-ms", str(STEP_MS)]
        arguments += ["--config", json.dumps(self.config), "--for", "600"]
        arguments += ["--warm-steps", str(WARM_STEPS)] if not self.nodes else []
        for seed in seeds:
            arguments += ["--seed", seed]

        def work() -> None:
            os.environ["GOSSIP_PROGRESS"] = "line"
            digits_node.main(arguments)

        node = Patient(name, Forked(work, log), diary, log)  # type: ignore[arg-type]
        self.nodes.append(node)
        return node

    def raise_nodes(self, count: int) -> list[Patient]:
        """Start ``count`` nodes, and return them once they mix with each other."""
        first = self.start([])
        self.until(lambda: first.event("joined") is not None, "the first node")
        nodes = [first, *(self.start([first.address]) for _ in range(count - 1))]
        self.until(lambda: all(node.event("joined") for node in nodes), "all to join")
        self.until(lambda: all(node.now.get("alive", 0) >= count and node.now["done"] > 2 for node in nodes), "a swarm")
        return nodes

    def until(self, condition: Callable[[], bool], name: str, seconds: float = JOIN_S) -> None:
        """Wait until a condition holds; ``name`` says in the error what was waited for."""
        end = time.monotonic() + seconds
        while not condition():
            ended = [node.name for node in self.nodes if node.process.poll() is not None]
            if ended or time.monotonic() > end:
                logs = "\n".join(node.errors.read_text(errors="replace")[-800:] for node in self.nodes)
                raise RuntimeError(f"Waited for {name}; ended: {ended}.\n{logs}")
            time.sleep(0.05)

    def target(self, nodes: list[Patient]) -> Target:
        """Return what an attack may know of the swarm."""
        joined = nodes[0].event("joined")
        assert joined is not None
        addresses: list[Address] = [parse_address(node.address) for node in nodes]
        secret = parse_secret(self.secret.read_text())
        version = float(nodes[0].now["version"])
        identities = self.folder / "identities"
        seeds = self.folder / "seeds"
        for file in (identities, seeds):
            file.touch()
        return Target(
            addresses, secret, joined["fingerprint"], bytes.fromhex(joined["run_id"]), joined["elements"], identities,
            seeds, version, str(self.config.get("mixing", "")) in ("push-sum", "row-stochastic"),
        )  # fmt: skip

    def besieger(self, work: Callable[[], None]) -> Forked:
        process = Forked(work, self.folder / "besieger.log")
        self.others.append(process)
        return process
