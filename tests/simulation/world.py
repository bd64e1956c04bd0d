"""A world of honest peers and liars, with a judge and a digest of all that happens."""

import random
import zlib
from collections.abc import Callable
from typing import Any, NoReturn

from gossip.config import Config
from tests.harness import world as harness
from tests.simulation.host import Host
from tests.simulation.judge import Failure, Judge
from tests.simulation.network import Network
from tests.simulation.truth import Truth


class World(harness.World):
    """A world with a judge, which describes every event to ``tell``, if given.

    ``exact``: weights are fractions, which grow with every exchange and are too slow for thousands of them.
    """

    hosts: list[Host]

    def __init__(
        self, seed: int, config: Config, tell: Callable[[str], None] | None = None, exact: bool = True
    ) -> None:  # fmt: skip
        super().__init__(seed, config=config)
        self.exact = exact
        self.tell = tell
        self.rng = random.Random(f"world {seed}")
        self.report_s = 0.0  # longest time between two visits of a loop to its boundary
        self.votes_every_s = 0.0  # seconds between counts of the votes to end a run; 0: no run ends
        self.digest = 0  # checksum of all deliveries, by which two processes are compared
        self.network = Network(self)
        self.judge = Judge(self)
        self.truth = Truth(self)

    @property
    def honest(self) -> list[Host]:
        return [host for host in self.hosts if not host.gone and not host.liar]

    def enter(self, host: Host) -> Host:
        self.judge.entered(host)
        self.note(f"{host} starts with {host.model.value}, seeds {[str(seed) for seed in host.seeds]}")
        return super().enter(host)

    def mark(self, message: Any, number: int) -> None:
        """Add a delivered message, its receiver and the time to the digest."""
        self.digest = zlib.crc32(b"%s %d %f" % (type(message).__name__.encode(), number, self.now), self.digest)

    def note(self, text: str) -> None:
        """Write a line of the trace."""
        if self.tell is not None:
            self.tell(f"{self.now:9.4f}  {text}")

    def fail(self, claim: str, detail: str) -> NoReturn:
        raise Failure(claim, f"{detail} (seed {self.seed}, at {self.now:.4f} s)")
