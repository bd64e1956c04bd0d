"""Seeds as users give them, and their look-up: host names, files, and functions of the program."""

from __future__ import annotations

import contextlib
import ipaddress
import itertools
import random
import socket
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import trio

from gossip.errors import ConfigError, LocalError
from gossip.ids import Address, PeerId, from_hex, parse_address
from node.identity.keys import is_invite, parse_invite
from node.transport.tcp import is_loopback, routed

__all__ = ["Found", "Seed", "SeedLookup", "SeedSource", "parse_seed", "read_seeds", "source_of"]

SeedSource = Path | Callable[[], Iterable[str]]
"""A source of seed texts, which is polled."""

LOOK_S = 10.0  # Limit for files and functions, and again for names: a resolver retries 5 s after a lost packet.
NAMES_AT_ONCE = 8  # Threads that resolve names: one that hangs keeps its own until the system gives up.
MOST_TEXTS = 1_000  # Texts from one file, function or name: more than one look-up uses.
FILE_BYTES = 1 << 18  # Bytes of a file that are read: enough for that many texts, invites included.
# Addresses of one look-up: twice the concurrent dials. One that answers is enough. Nodes of a large service draw
# different ones, so that together they still find one swarm.
MOST_FOUND = 32
MOST_OWN = 64  # Addresses at which this node found itself: more than a machine has.
LONGEST = 300  # Characters of a text other than an invite: a host name has at most 253, and an id 32.


@dataclass(frozen=True, slots=True)
class Seed:
    """A parsed seed: addresses to dial, the id that must answer there, and the secret of an invite."""

    addresses: tuple[Address, ...]
    expected: PeerId | None = None
    secret: bytes | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class Found:
    """The outcome of a look-up.

    Attributes:
        addresses: The addresses to dial.
        expected: The id that must answer at an address.
        names: The name under which users know a resolved address.
        missing: For each source that gave no address: the reason.
    """

    addresses: tuple[Address, ...]
    expected: Mapping[Address, PeerId]
    names: Mapping[Address, str]
    missing: Mapping[str, str]


def parse_seed(text: object) -> Seed:
    """Parse ``host:port``, ``host:port#id`` or an invite. Raises ConfigError or IdentityError in one sentence."""
    if not isinstance(text, str):
        raise ConfigError(f"A seed of type {type(text).__name__} is none: give texts, as '10.0.0.5:7700'.")
    if is_invite(text):
        invite = parse_invite(text)
        return Seed(invite.seeds, invite.seed_id, invite.secret)
    where, mark, wanted = text.partition("#")
    return Seed((parse_address(where),), peer_id(wanted.strip(), text) if mark else None)


def peer_id(text: str, seed: str) -> PeerId:
    value = from_hex(text)
    if value is None:
        raise ConfigError(f"{seed!r} is not a seed: after # belong the 32 hexadecimal digits of a node's id.")
    return PeerId(value)


def source_of(text: object) -> SeedSource | None:
    """Return the source to poll, a function or the file of ``@path``; None for a plain seed. Raises ConfigError."""
    if callable(text):
        return text
    if not isinstance(text, str) or not text.strip().startswith("@"):
        return None
    path = text.strip()[1:]
    if not path or "\0" in path:
        raise ConfigError(f"{text!r} names no file of seeds: write its path after the @, as in @/shared/seeds.")
    return Path(path).expanduser().absolute()  # Programs may change their directory.


def read_seeds(path: Path) -> list[str]:
    """Return the lines of a seed file, without blank ones and comments. Raises OSError."""
    with open(path, "rb") as file:
        text = file.read(FILE_BYTES).decode("utf-8", errors="replace")
    lines = (line.strip() for line in text.splitlines())
    return [line for line in lines if line and not line.startswith("#")][:MOST_TEXTS]


def asked(source: Callable[[], Iterable[str]]) -> list[str]:
    """Call a seed function of the program. Raises ConfigError, and anything that the function raises."""
    given = source()
    if isinstance(given, str):
        return [given]
    if not isinstance(given, Iterable):
        raise ConfigError(f"returned {type(given).__name__}, and not a list of texts")
    texts = list(itertools.islice(given, MOST_TEXTS))
    for text in texts:
        if not isinstance(text, str):
            raise ConfigError(f"named {type(text).__name__} as a seed, and not a text")
    return texts


def numbers_of(host: str, port: int) -> list[str]:
    """Return all IPv4 and IPv6 addresses of a name, as this machine resolves it. Raises OSError."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except UnicodeError as error:  # For example ``a..b`` is no valid name.
        raise OSError(f"{host!r} is not a name that can be looked up") from error
    return [str(where[0]) for *_, where in found[:MOST_TEXTS]]


class SeedLookup:
    """The poll for a node's seeds, in threads, so that it delays nothing else.

    A source that fails or answers too late keeps its last result.

    Args:
        given: The addresses that the user named.
        expected: The ids that must answer at them.
        sources: Files and functions to poll.
        secret: The swarm's secret, which an invite must have too.
        bound: The address on which this node listens.
        tell: Logs a sentence.
    """

    def __init__(
        self, given: Iterable[Address], expected: Mapping[Address, PeerId], sources: Iterable[SeedSource],
        secret: bytes | None, bound: Address | None, tell: Callable[[str], None] = lambda sentence: None,
    ) -> None:  # fmt: skip
        self.given, self.expected, self.sources = tuple(given), dict(expected), tuple(sources)
        self.secret, self.bound, self.tell = secret, bound, tell
        self.own: set[Address] = set()  # Addresses that turned out to be this node's.
        self.texts: dict[SeedSource, list[str]] = {}  # The last texts of each source.
        self.numbers: dict[Address, list[str]] = {}  # The last addresses of each name.
        self.missing: dict[str, str] = {}
        self.told: set[str] = set()  # Sources that fail or name an invalid seed, already logged.
        self.turns = {source: trio.CapacityLimiter(1) for source in self.sources}  # One that hangs occupies one thread.
        self.names_at_once = trio.CapacityLimiter(NAMES_AT_ONCE)
        self.rng = random.Random()

    @property
    def needed(self) -> bool:
        """Return True if there is anything to look up; numeric addresses need none."""
        return bool(self.sources) or len(self.fixed) < len(self.given)

    @property
    def fixed(self) -> tuple[Address, ...]:
        """Return the given addresses that need no look-up."""
        return tuple(address for address in self.given if not is_name(address.host))

    def met_itself(self, address: Address) -> None:
        """Note an address at which this node answered itself."""
        if len(self.own) < MOST_OWN:
            self.own.add(address)

    def is_own(self, address: Address) -> bool:
        """Return True if this node itself listens there, as far as the machine can tell."""
        bound = self.bound
        if address in self.own or address == bound:
            return True
        if bound is None or address.port != bound.port or bound.host not in ("0.0.0.0", "::"):
            return False
        return is_loopback(address.host) or routed(address, ":" in address.host) == address.host

    async def look(self) -> Found:
        """Poll every source once, for at most twice :data:`LOOK_S`."""
        self.missing = {}
        with trio.move_on_after(LOOK_S):
            async with trio.open_nursery() as nursery:
                for source in self.sources:
                    nursery.start_soon(self.ask, source)
        for name, why in self.missing.items():
            self.say(name, f"{name} {why}; it is asked for seeds again and again.")
        wanted: dict[Address, PeerId | None] = {address: self.expected.get(address) for address in self.given}
        for source in self.sources:
            texts = list(dict.fromkeys(self.texts.get(source, ())))
            for text in self.drawn(texts):
                for address, who in self.read(text, called(source)).items():
                    wanted[address] = who or wanted.get(address)
            if not texts:
                self.missing.setdefault(called(source), "names no node yet")
        names = [address for address in wanted if is_name(address.host)]
        self.numbers = {each: self.numbers[each] for each in names if each in self.numbers}
        with trio.move_on_after(LOOK_S):
            async with trio.open_nursery() as nursery:
                for each in names:
                    nursery.start_soon(self.resolve, each)
        return self.found(wanted)

    def drawn(self, texts: list[str]) -> list[str]:
        """Return at most MOST_FOUND texts, a fresh random sample each time if there are more."""
        return texts if len(texts) <= MOST_FOUND else self.rng.sample(texts, MOST_FOUND)

    async def ask(self, source: SeedSource) -> None:
        """Poll a file or a function for its texts."""
        name = called(source)
        self.missing[name] = f"did not answer within {LOOK_S:.0f} s"
        if not self.turns[source].available_tokens:  # It still hangs from an earlier poll; do not wait for it again.
            return
        try:
            texts = await trio.to_thread.run_sync(
                texts_of, source, abandon_on_cancel=True, limiter=self.turns[source]
            )  # fmt: skip
        except (Exception, SystemExit) as error:  # The function is the program's, and this thread is ours.
            self.missing[name] = trouble(error)
        else:
            del self.missing[name]
            self.told.discard(name)
            self.texts[source] = texts

    def read(self, text: str, name: str) -> dict[Address, PeerId | None]:
        """Parse a text of a source. An invalid seed is logged and left out."""
        try:
            seed = parse_seed(text if is_invite(text) else text[:LONGEST])
        except LocalError as error:
            self.say(f"a text of {name}", f"{name} names something that is no seed, and is left out: {error}")
            return {}
        if seed.secret is not None and seed.secret != self.secret:
            self.say(
                f"an invite of {name}",
                f"{name} names an invite with another secret than this node began with, which is left out: give the "
                "swarm's secret when the node starts.",
            )
            return {}
        return dict.fromkeys(seed.addresses, seed.expected)

    def say(self, about: str, sentence: str) -> None:
        """Log a sentence about a source once, until its trouble ends."""
        if about not in self.told:
            self.told.add(about)
            self.tell(sentence)

    async def resolve(self, name: Address) -> None:
        with contextlib.suppress(OSError, ValueError):  # A null byte in a name raises ValueError.
            self.numbers[name] = await trio.to_thread.run_sync(
                numbers_of, *name, abandon_on_cancel=True, limiter=self.names_at_once
            )

    def found(self, wanted: Mapping[Address, PeerId | None]) -> Found:
        """Return all addresses of all ``wanted`` seeds, except our own.

        A name without an address stays as it is: dialling it reports the reason.
        """
        whose, names, others = dict[Address, PeerId](), dict[Address, str](), list[Address]()
        fixed = [address for address in self.fixed if not self.is_own(address)]
        for address, who in wanted.items():
            for host in self.numbers.get(address) or [address.host]:
                seed = Address(host, address.port)
                others.append(seed)
                if seed != address:
                    names.setdefault(seed, str(address))
                if who is not None:
                    whose[seed] = who
        others = list(dict.fromkeys(others))
        self.rng.shuffle(others)
        drawn = (seed for seed in others if seed not in fixed and not self.is_own(seed))
        addresses = (*fixed, *itertools.islice(drawn, MOST_FOUND))
        if not addresses and others:
            self.missing.setdefault(str(others[0]), "is this node itself")
        return Found(addresses, whose, names, dict(self.missing))


def is_name(host: str) -> bool:
    """Return True if a host must be looked up because it is no numeric address."""
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return True
    return False


def called(source: SeedSource) -> str:
    """Return the name under which users know a source."""
    return f"@{source}" if isinstance(source, Path) else "seeds()"


def texts_of(source: SeedSource) -> list[str]:
    """Read a source; called in a thread."""
    return read_seeds(source) if isinstance(source, Path) else asked(source)


def trouble(error: BaseException) -> str:
    """Return in a clause why a source gave nothing."""
    if isinstance(error, ConfigError):
        return str(error)
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"cannot be read ({error.strerror.lower()})"
    said = str(error).partition("\n")[0][:LONGEST]
    return f"raised {type(error).__name__}" + (f" ({said})" if said else "")
