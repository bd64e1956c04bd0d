"""Seeds as users give them, and their look-up: host names, files, and functions of the program."""

import contextlib
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
from node.transport.tcp import is_loopback, is_name, routed

SeedSource = Path | Callable[[], Iterable[str]]
"""A source of seed texts, which is polled: a file, or a function of the program."""

POLL_S = 10.0  # Time limit for files and functions, and again for names: a resolver retries 5 s after a lost packet.
NAMES_AT_ONCE = 8  # Threads that resolve names. One that hangs is busy until the system gives up.
MAX_TEXTS = 1_000  # Texts from one file, function or name, more than a look-up uses.
FILE_BYTES = 1 << 18  # Bytes of a file that are read, enough for MAX_TEXTS texts, invites included.
# Addresses that a look-up returns, twice as many as dials run at once. One that answers is enough. Nodes of a large
# service draw different ones, so that together they still find one swarm.
MAX_FOUND = 32
MAX_OWN = 64  # Addresses at which this node has found itself, more than a machine has.
MAX_CHARACTERS = 300  # Characters of a text other than an invite: a host name has at most 253, and an id 32.


@dataclass(frozen=True, slots=True)
class Seed:
    """A parsed seed: addresses to dial, the id that must answer there, and the secret of an invite."""

    addresses: tuple[Address, ...]
    expected: PeerId | None = None  # None: any member may answer.
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
    address, mark, wanted_id = text.partition("#")
    return Seed((parse_address(address),), peer_id(wanted_id.strip(), text) if mark else None)


def peer_id(text: str, seed: str) -> PeerId:
    """Return the id in a seed's text. Raises ConfigError, which quotes the seed."""
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
    return [line for line in lines if line and not line.startswith("#")][:MAX_TEXTS]


def call_source(source: Callable[[], Iterable[str]]) -> list[str]:
    """Call a seed function of the program. Raises ConfigError, and anything that the function raises."""
    result = source()
    if isinstance(result, str):
        return [result]
    if not isinstance(result, Iterable):
        raise ConfigError(f"returned {type(result).__name__}, and not a list of texts")
    texts = list(itertools.islice(result, MAX_TEXTS))
    for text in texts:
        if not isinstance(text, str):
            raise ConfigError(f"named {type(text).__name__} as a seed, and not a text")
    return texts


def resolve_host(host: str, port: int) -> list[str]:
    """Return all IPv4 and IPv6 addresses of a name, as this machine resolves it. Raises OSError."""
    try:
        answers = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except UnicodeError as error:  # For example ``a..b`` is no valid name.
        raise OSError(f"{host!r} is not a name that can be looked up") from error
    return [str(socket_address[0]) for *_, socket_address in answers[:MAX_TEXTS]]


class SeedLookup:
    """The look-up of a node's seeds. Threads ask files, functions and resolvers, so that nothing else is delayed.

    If a source fails or answers too late, its last result still counts.

    Args:
        given: The addresses that the user named.
        expected: The ids that must answer at them.
        sources: Files and functions to poll.
        secret: The swarm's secret, which an invite must have too.
        bound: The address on which this node listens.
        log: Logs a sentence.
    """

    def __init__(
        self, given: Iterable[Address], expected: Mapping[Address, PeerId], sources: Iterable[SeedSource],
        secret: bytes | None, bound: Address | None, log: Callable[[str], None] = lambda sentence: None,
    ) -> None:  # fmt: skip
        self.given, self.expected, self.sources = tuple(given), dict(expected), tuple(sources)
        self.secret, self.bound, self.log = secret, bound, log
        self.own: set[Address] = set()  # Addresses at which this node has found itself.
        self.texts: dict[SeedSource, list[str]] = {}  # The last texts of each source.
        self.resolved: dict[Address, list[str]] = {}  # The last numeric addresses of each name.
        # For each source or address that gave no address at this poll: the reason.
        self.missing: dict[SeedSource | str, str] = {}
        self.logged: set[SeedSource | str] = set()  # Sources whose failure or invalid seed was logged.
        # One thread for each source, which stays busy if the source hangs.
        self.source_limiters = {source: trio.CapacityLimiter(1) for source in self.sources}
        self.name_limiter = trio.CapacityLimiter(NAMES_AT_ONCE)
        self.rng = random.Random()

    @property
    def is_needed(self) -> bool:
        """Return True if there is anything to look up, which numeric addresses are not."""
        return bool(self.sources) or len(self.fixed) < len(self.given)

    @property
    def fixed(self) -> tuple[Address, ...]:
        """Return the given addresses that need no look-up."""
        return tuple(address for address in self.given if not is_name(address.host))

    def on_own_address(self, address: Address) -> None:
        """Handle an address at which this node has found itself."""
        if len(self.own) < MAX_OWN:
            self.own.add(address)

    def is_own(self, address: Address) -> bool:
        """Return True if this node itself listens there, as far as the machine can tell."""
        bound = self.bound
        if address in self.own or address == bound:
            return True
        if bound is None or address.port != bound.port or bound.host not in ("0.0.0.0", "::"):
            return False
        return is_loopback(address.host) or routed(address, ":" in address.host) == address.host

    async def poll(self) -> Found:
        """Ask every source once, and resolve all names. Takes at most twice :data:`POLL_S`."""
        self.missing = {}
        with trio.move_on_after(POLL_S):
            async with trio.open_nursery() as nursery:
                for source in self.sources:
                    nursery.start_soon(self.poll_source, source)
        for name, reason in self.missing.items():
            self.log_once(name, f"{source_name(name)} {reason}; it is asked for seeds again and again.")
        # By address: the id that must answer there; None if any member may.
        wanted: dict[Address, PeerId | None] = {address: self.expected.get(address) for address in self.given}
        for source in self.sources:
            texts = list(dict.fromkeys(self.texts.get(source, ())))
            for text in self.sample(texts):
                for address, expected in self.parse(text, source_name(source)).items():
                    wanted[address] = expected or wanted.get(address)
            if not texts:
                self.missing.setdefault(source, "names no node yet")
        names = [address for address in wanted if is_name(address.host)]
        self.resolved = {name: self.resolved[name] for name in names if name in self.resolved}
        with trio.move_on_after(POLL_S):
            async with trio.open_nursery() as nursery:
                for name_address in names:
                    nursery.start_soon(self.resolve, name_address)
        return self.make_found(wanted)

    def sample(self, texts: list[str]) -> list[str]:
        """Return at most ``MAX_FOUND`` texts, a fresh random sample each time if there are more."""
        return texts if len(texts) <= MAX_FOUND else self.rng.sample(texts, MAX_FOUND)

    async def poll_source(self, source: SeedSource) -> None:
        """Ask a file or a function for its texts."""
        self.missing[source] = f"did not answer within {POLL_S:.0f} s"  # This holds until it answers.
        if not self.source_limiters[source].available_tokens:  # It hangs since an earlier poll: do not wait again.
            return
        try:
            texts = await trio.to_thread.run_sync(
                texts_of, source, abandon_on_cancel=True, limiter=self.source_limiters[source]
            )  # fmt: skip
        except (Exception, SystemExit) as error:  # The function is the program's, and this thread is ours.
            self.missing[source] = describe_error(error)
        else:
            del self.missing[source]
            self.logged.discard(source)
            self.texts[source] = texts

    def parse(self, text: str, name: str) -> dict[Address, PeerId | None]:
        """Return the addresses in a source's text, with the ids expected there. An invalid text has none."""
        try:
            seed = parse_seed(text if is_invite(text) else text[:MAX_CHARACTERS])
        except LocalError as error:
            self.log_once(f"a text of {name}", f"{name} names something that is no seed, and is left out: {error}")
            return {}
        if seed.secret is not None and seed.secret != self.secret:
            self.log_once(
                f"an invite of {name}",
                f"{name} names an invite with another secret than this node began with, which is left out: give the "
                "swarm's secret when the node starts.",
            )
            return {}
        return dict.fromkeys(seed.addresses, seed.expected)

    def log_once(self, about: SeedSource | str, sentence: str) -> None:
        """Log a sentence about a source once, until its trouble ends."""
        if about not in self.logged:
            self.logged.add(about)
            self.log(sentence)

    async def resolve(self, name: Address) -> None:
        with contextlib.suppress(OSError, ValueError):  # A null byte in a name raises ValueError.
            self.resolved[name] = await trio.to_thread.run_sync(
                resolve_host, *name, abandon_on_cancel=True, limiter=self.name_limiter
            )

    def make_found(self, wanted: Mapping[Address, PeerId | None]) -> Found:
        """Return the addresses of all ``wanted`` seeds, except our own.

        A name that was not resolved stays a name, because dialling it reports the reason.
        """
        expected, names, seeds = dict[Address, PeerId](), dict[Address, str](), list[Address]()
        fixed = [address for address in self.fixed if not self.is_own(address)]
        for address, peer in wanted.items():
            for host in self.resolved.get(address) or [address.host]:
                seed = Address(host, address.port)
                seeds.append(seed)
                if seed != address:
                    names.setdefault(seed, str(address))
                if peer is not None:
                    expected[seed] = peer
        seeds = list(dict.fromkeys(seeds))
        self.rng.shuffle(seeds)
        drawn = (seed for seed in seeds if seed not in fixed and not self.is_own(seed))
        addresses = (*fixed, *itertools.islice(drawn, MAX_FOUND))
        if not addresses and seeds:
            self.missing.setdefault(str(seeds[0]), "is this node itself")
        return Found(addresses, expected, names, {source_name(one): reason for one, reason in self.missing.items()})


def source_name(source: SeedSource | str) -> str:
    """Return the name under which users know a source; a text is one."""
    return f"@{source}" if isinstance(source, Path) else source if isinstance(source, str) else "seeds()"


def texts_of(source: SeedSource) -> list[str]:
    """Read a source; called in a thread."""
    return read_seeds(source) if isinstance(source, Path) else call_source(source)


def describe_error(error: BaseException) -> str:
    """Return in a clause why a source gave nothing."""
    if isinstance(error, ConfigError):
        return str(error)
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"cannot be read ({error.strerror.lower()})"
    first_line = str(error).partition("\n")[0][:MAX_CHARACTERS]
    return f"raised {type(error).__name__}" + (f" ({first_line})" if first_line else "")
