"""The honest swarm under attack (the fortress): each node is a process, forked from one that has imported torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import digits_node
from foe import Target
from forked import Forked
from swarm_lab import Lab, Patient

from gossip.ids import parse_address
from node.identity.keys import parse_secret

STEP_MS = 15.0
WARM_STEPS = 400  # steps without pauses at the start, so that accuracy no longer rises during the calm
MIX_EVERY = 8


class Fortress(Lab):
    """The processes of one run: ``with Fortress(config) as fortress``. All of them are killed at the end."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = {"mix_every_steps": MIX_EVERY} | dict(config)
        super().__init__(digits_node, step_ms=STEP_MS, config=self.config, **{"for": 600})
        self.secret = Path(self.encrypt())
        self.others: list[Forked] = []  # the attackers

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self.others:
            process.kill()
            process.wait()
        super().__exit__(kind, error, trace)

    def raise_nodes(self, count: int) -> list[Patient]:
        """Start ``count`` nodes, and return them once they mix with each other."""
        return self.swarm(count, {"warm_steps": WARM_STEPS})

    def target(self, nodes: list[Patient]) -> Target:
        """Return what an attack may know of the swarm."""
        joined, identities, seeds = nodes[0].joined, self.folder / "identities", self.folder / "seeds"
        for file in (identities, seeds):
            file.touch()
        return Target(
            [parse_address(node.address) for node in nodes], parse_secret(self.secret.read_text()),
            joined["fingerprint"], bytes.fromhex(joined["run_id"]), joined["elements"], identities, seeds,
            float(nodes[0].now["version"]), str(self.config.get("mixing", "")) in ("push-sum", "row-stochastic"),
        )  # fmt: skip

    def besieger(self, work: Callable[[], None]) -> Forked:
        process = Forked(work, self.folder / "besieger.log")
        self.others.append(process)
        return process
