"""The seeds of a node: their addresses, the outcome of the last dial to each, and what the user is told of it."""

from collections.abc import Callable, Mapping
from typing import Any

import trio

from gossip.errors import RefusedError
from gossip.ids import Address
from node.transport.seeds import Found

MAX_EXPLAINED_SEEDS = 4  # Seeds whose failure the message explains that ends a node.


class SeedStatus:
    """The seeds of a node, and why they do not answer.

    A seed's refusal of this node is final. That of another address may only mean that the address is stale.

    Args:
        addresses: The addresses of the seeds, as far as they are known.
        delay_s: Seconds after which the user is told that a seed does not answer, because nodes that start together do
            not listen at the same moment.
        spawn: Runs a task.
        notify_once: Tells the user a sentence of a kind, once.
    """

    def __init__(
        self, addresses: frozenset[Address], delay_s: float, spawn: Callable[..., Any],
        notify_once: Callable[[str, str], None],
    ) -> None:  # fmt: skip
        self.addresses, self.delay_s, self.spawn, self.notify_once = addresses, delay_s, spawn, notify_once
        self.names: Mapping[Address, str] = {}  # The user's name of each seed whose address was looked up.
        self.failed_lookups: Mapping[str, str] = {}  # For each name that gave no seeds: the reason.
        self.failures: dict[Address, str] = {}  # The failure of the last dial, for each seed that did not answer.
        self.unanswered: set[Address] = set()  # Seeds that failed to answer, until the user is told.
        self.refusals: dict[Address, RefusedError] = {}  # Refusals of this node, by seed.

    def on_found(self, lookup: Found) -> None:
        """Handle the result of a look-up of seeds: use these addresses, and forget the failures of former seeds."""
        self.addresses, self.names, self.failed_lookups = frozenset(lookup.addresses), lookup.names, lookup.missing
        self.failures = {address: failure for address, failure in self.failures.items() if address in self.addresses}
        self.refusals = {address: error for address, error in self.refusals.items() if address in self.addresses}

    def on_dialled(self, address: Address, greeted: bool, failure: str, refusal: RefusedError | None) -> None:
        """Handle the outcome of a dial to a seed.

        Args:
            address: The seed's address.
            greeted: True if the handshake succeeded.
            failure: Otherwise a clause that says why not.
            refusal: The refusal, if either side has refused the other. The user knows of it already.
        """
        if greeted or refusal is not None:
            self.unanswered.discard(address)
        if greeted:
            self.failures.pop(address, None)
        elif refusal is not None:
            self.failures[address] = f"refused this node: {refusal}"
        else:
            self.failures[address] = failure
            if address not in self.unanswered:
                self.unanswered.add(address)
                self.spawn(self.tell_unanswered, address)

    async def tell_unanswered(self, address: Address) -> None:
        """Tell the user after ``delay_s`` why a seed still does not answer, once for each cause.

        A name with several addresses is reported only if none answers. They may be ::1 and 127.0.0.1, or nodes of which
        some are down.
        """
        await trio.sleep(self.delay_s)
        if address not in self.unanswered:
            return
        self.unanswered.discard(address)  # The next failed dial then begins a new delay, and may have another cause.
        name, failure = self.name_of(address), self.failures.get(address)
        has_no_answer = all(seed in self.failures for seed in self.addresses if self.name_of(seed) == name)
        if failure is not None and address in self.addresses and has_no_answer:
            self.notify_once(f"Seed {name} {failure}; it is tried again and again.", "seed")

    def name_of(self, seed: Address) -> str:
        """Return the name under which the user knows a seed."""
        return self.names.get(seed) or str(seed)

    @property
    def refusal(self) -> RefusedError | None:
        """Return a seed's refusal of this node, preferably one that says more than "closed"."""
        errors = self.refusals.values()
        return next((error for error in errors if error.code != "closed"), next(iter(errors), None))

    def why_alone(self) -> str:
        """Return in a clause why no seed has answered: the last failure of each seed, and failed look-ups."""
        failures = {self.name_of(address): failure for address, failure in self.failures.items()}
        causes = [f"seed {name} {failure}" for name, failure in failures.items()]
        causes += map(" ".join, self.failed_lookups.items())
        if len(causes) > MAX_EXPLAINED_SEEDS:
            causes[MAX_EXPLAINED_SEEDS:] = [f"{len(causes) - MAX_EXPLAINED_SEEDS} more failed likewise"]
        return "; ".join(causes) or "no node there sent its weights"
