"""Seeds as people give them, and how they are looked up: names of hosts, files, and functions of the program."""

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
"""Where texts of seeds come from, asked again and again."""

LOOK_S = 10.0  # for files and functions, and as long again for names: a resolver asks again 5 s after a lost packet
NAMES_AT_ONCE = 8  # threads in which names are resolved: one that hangs keeps its own until the system gives up
MOST_TEXTS = 1_000  # that a file, a function or a name gives: more than one look uses of any
FILE_BYTES = 1 << 18  # of a file that are read: so many texts, invites among them
MOST_FOUND = 32  # addresses that a look brings: twice what is dialled at once. One that answers is enough, and of the
# thousand of a large service every node draws others, so that together they still find one swarm
MOST_OWN = 64  # addresses at which this node met itself: more than a machine has
LONGEST = 300  # characters of a text that is no invite: a host's name has 253 at most, and an id 32


@dataclass(frozen=True, slots=True)
class Seed:
    """One text: where to dial, who must prove to be there, and the secret of an invite."""

    addresses: tuple[Address, ...]
    expected: PeerId | None = None
    secret: bytes | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class Found:
    """What a look brought. ``names``: what people call an address that is not in its own text; ``missing``: why a
    source gave none, by its name."""

    addresses: tuple[Address, ...]
    expected: Mapping[Address, PeerId]
    names: Mapping[Address, str]
    missing: Mapping[str, str]


def parse_seed(text: object) -> Seed:
    """``host:port``, ``host:port#id`` or an invite. Raises ConfigError or IdentityError in one sentence."""
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
    """What is asked again and again: a function, or the file of ``@path``; None for a seed. Raises ConfigError."""
    if callable(text):
        return text
    if not isinstance(text, str) or not text.strip().startswith("@"):
        return None
    path = text.strip()[1:]
    if not path or "\0" in path:
        raise ConfigError(f"{text!r} names no file of seeds: write its path after the @, as in @/shared/seeds.")
    return Path(path).expanduser().absolute()  # programs change their directory


def read_seeds(path: Path) -> list[str]:
    """The lines of a file of seeds, without blank ones and those that begin with #. Raises OSError."""
    with open(path, "rb") as file:
        text = file.read(FILE_BYTES).decode("utf-8", errors="replace")
    lines = (line.strip() for line in text.splitlines())
    return [line for line in lines if line and not line.startswith("#")][:MOST_TEXTS]


def asked(source: Callable[[], Iterable[str]]) -> list[str]:
    """What a function of the program gives. Raises ConfigError, and whatever that raises."""
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
    """All addresses of a name, of IPv4 and IPv6, as this machine resolves it. Raises OSError."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except UnicodeError as error:  # ``a..b`` is no name
        raise OSError(f"{host!r} is not a name that can be looked up") from error
    return [str(where[0]) for *_, where in found[:MOST_TEXTS]]


class SeedLookup:
    """Asks for a node's seeds, in threads that hold up nobody: what does not answer in time, or fails, is as it was
    the last time. ``given`` are the addresses that people named, whose ids are in ``expected``; ``sources`` what else
    is asked; ``secret`` the swarm's, which an invite must have too; ``tell`` tells people, once for each sentence."""

    def __init__(
        self, given: Iterable[Address], expected: Mapping[Address, PeerId], sources: Iterable[SeedSource],
        secret: bytes | None, bound: Address | None, tell: Callable[[str], None] = lambda sentence: None,
    ) -> None:  # fmt: skip
        self.given, self.expected, self.sources = tuple(given), dict(expected), tuple(sources)
        self.secret, self.bound, self.tell = secret, bound, tell
        self.own: set[Address] = set()  # addresses that turned out to be this node's
        self.texts: dict[SeedSource, list[str]] = {}  # what each source gave last
        self.numbers: dict[Address, list[str]] = {}  # what each name stood for last
        self.missing: dict[str, str] = {}
        self.told: set[str] = set()  # sources that fail, or name what is no seed
        self.turns = {source: trio.CapacityLimiter(1) for source in self.sources}  # one that hangs keeps one thread
        self.names_at_once = trio.CapacityLimiter(NAMES_AT_ONCE)
        self.rng = random.Random()

    @property
    def needed(self) -> bool:
        """Whether there is anything to look up: numbers stay as they are."""
        return bool(self.sources) or len(self.fixed) < len(self.given)

    @property
    def fixed(self) -> tuple[Address, ...]:
        """Those that need no looking up."""
        return tuple(address for address in self.given if not is_name(address.host))

    def met_itself(self, address: Address) -> None:
        """Who answered there was this node."""
        if len(self.own) < MOST_OWN:
            self.own.add(address)

    def is_own(self, address: Address) -> bool:
        """Whether this node listens there itself, as far as its machine can say."""
        bound = self.bound
        if address in self.own or address == bound:
            return True
        if bound is None or address.port != bound.port or bound.host not in ("0.0.0.0", "::"):
            return False
        return is_loopback(address.host) or routed(address, ":" in address.host) == address.host

    async def look(self) -> Found:
        """Ask everybody once, for two times :data:`LOOK_S` at most."""
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
        """As many as a look brings, and others at every look where there are more."""
        return texts if len(texts) <= MOST_FOUND else self.rng.sample(texts, MOST_FOUND)

    async def ask(self, source: SeedSource) -> None:
        """Have a file or a function give its texts."""
        name = called(source)
        self.missing[name] = f"did not answer within {LOOK_S:.0f} s"
        if not self.turns[source].available_tokens:  # it hangs since an earlier look: nobody waits for it again
            return
        try:
            texts = await trio.to_thread.run_sync(
                texts_of, source, abandon_on_cancel=True, limiter=self.turns[source]
            )  # fmt: skip
        except (Exception, SystemExit) as error:  # it is the program's own, and this thread is not
            self.missing[name] = trouble(error)
        else:
            del self.missing[name]
            self.told.discard(name)
            self.texts[source] = texts

    def read(self, text: str, name: str) -> dict[Address, PeerId | None]:
        """A text of a source; what is no seed is told, and left out."""
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
        """Once, until that is over."""
        if about not in self.told:
            self.told.add(about)
            self.tell(sentence)

    async def resolve(self, name: Address) -> None:
        with contextlib.suppress(OSError, ValueError):  # a null byte in a name is one
            self.numbers[name] = await trio.to_thread.run_sync(
                numbers_of, *name, abandon_on_cancel=True, limiter=self.names_at_once
            )

    def found(self, wanted: Mapping[Address, PeerId | None]) -> Found:
        """All addresses of all that is ``wanted``, without our own. A name that stands for none stays as it is:
        dialling it says why."""
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
    """Whether a host has to be looked up: it is no number."""
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return True
    return False


def called(source: SeedSource) -> str:
    """What people know a source by."""
    return f"@{source}" if isinstance(source, Path) else "seeds()"


def texts_of(source: SeedSource) -> list[str]:
    """In a thread of its own."""
    return read_seeds(source) if isinstance(source, Path) else asked(source)


def trouble(error: BaseException) -> str:
    """Why a source gave nothing, for people: in a clause."""
    if isinstance(error, ConfigError):
        return str(error)
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"cannot be read ({error.strerror.lower()})"
    said = str(error).partition("\n")[0][:LONGEST]
    return f"raised {type(error).__name__}" + (f" ({said})" if said else "")
