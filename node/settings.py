"""A node's settings. Arguments win over environment variables, by which the command line passes its options."""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import math
import os
import socket
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from gossip.config import Config
from gossip.errors import ConfigError, IdentityError
from gossip.ids import Address, PeerId, parse_address
from node.identity.keys import is_invite, kept_secret, parse_invite, read_secret
from node.options import OPTIONS, NodeOptions
from node.transport.launch import other_hosts
from node.transport.seeds import SeedSource, parse_seed, read_seeds, source_of
from node.transport.tcp import is_loopback, routed

WAIT_S = 60.0  # Time to wait for members: jobs that are launched together begin within a minute, or not at all.
LOOPBACK = "127.0.0.1"
OUTSIDE = Address("192.0.2.1", 9)  # Outside every local network, since it is reserved for documentation.
SIOCGIFADDR = 0x8915  # Linux's number; elsewhere the call fails as on an interface without an address.


@dataclass(frozen=True, slots=True)
class Settings:
    """All settings a node needs before it starts. With ``listen`` None it only dials out."""

    seeds: tuple[Address, ...]
    expected: Mapping[Address, PeerId]  # The ids that must answer at seeds that name one, as invites do.
    listen: Address | None
    advertise: Address | None
    secret: bytes | None
    state_dir: Path | None
    config: Config
    join_or_fail_s: float | None = None  # Fail unless the weights of a swarm arrive within these seconds.
    sources: tuple[SeedSource, ...] = ()  # Files and functions, polled for seeds while there is no member to dial.
    wait_for: int = 1  # Members to wait for before training begins, this one included.
    wait_s: float = WAIT_S  # The most seconds to wait for them.
    page: Address | None = None  # Where the web page listens.
    others: Address | None = None  # The coordinator of a launch on several hosts, on the way to the others.
    trace: Path | None = None  # A file for the timeline of this node.
    grace_s: float = 0.0  # The most seconds for last mixes before this node leaves.
    on_fault: str = "restart"  # Or "raise": how to react to a fault of this library in the network side.
    place: int = 0  # Among the open Nodes of this process, which share the variables (:func:`beside`).
    shares_address: bool = True  # The program named no address: it is that of the variables.
    follows_first: bool = False  # It listens next to this process's first Node, whose port is not known before.

    @property
    def joins(self) -> bool:
        """Return True if there may be a swarm to join: there are seeds, or members of an earlier life."""
        return bool(self.seeds or self.sources or self.state_dir)

    @classmethod
    def gather(
        cls, options: NodeOptions, environment: Mapping[str, str] = os.environ, launched: bool = False, place: int = 0
    ) -> Settings:
        """Read the settings and write nothing: the service later keeps the secret in the state directory.

        With ``launched``, if a launcher started members on other hosts, listen where those can reach this node unless
        ``listen`` says otherwise. ``place`` counts the other Nodes of this process that share the environment. Raises
        ConfigError or IdentityError, one sentence, for settings that cannot work.
        """
        environment = environment_at(place, environment)
        given = values_of(options, environment)
        addresses, expected, sources, invited_secret = gather_seeds(seeds_of(options, environment))
        if place and not options.get("seeds"):
            addresses, expected = [beside(address, place) for address in addresses], {}
            if sources:
                raise ConfigError(
                    f"This is Node {place + 1} of the process, and the file of seeds names the first Nodes of others: "
                    "give it listen= and seeds= of its own."
                )
        needs_secret = not is_insecure(environment)  # Unless the user trusts the network.
        state_dir = Path(given["state_dir"]).absolute() if given["state_dir"] else None
        secret_file = given["secret"]
        if not secret_file and invited_secret is None and state_dir and needs_secret:
            secret_file = kept_secret(state_dir)  # That of an earlier start.
        secret = read_secret(Path(secret_file)) if secret_file else invited_secret  # A file wins over an invite.
        others = other_hosts(environment) if launched else None
        # A node with seeds elsewhere and a secret is meant for other machines, and they should find it too.
        remote = [seed for seed in addresses if secret is not None and not is_loopback(seed.host)]
        listen = listen_address(given["listen"], others or next(iter(remote), None), secret, needs_secret)
        names_address = bool(options.get("listen"))
        is_seed = not (addresses or options.get("seeds"))  # Others look for it next to this process's first Node.
        follows_first = place > 0 and is_seed and not names_address and listen is not None and listen.port == 0
        config = config_of(options, environment)
        tunnels = checked_count(
            "tunnels", given["tunnels"], config.internal.max_tunnels, "how many links of others to carry at once, as 2"
        )  # fmt: skip
        opens_ports = checked_word("map_port", given["map_port"], ("auto", "off")) == "auto"
        opens_ports = opens_ports and secret is not None and not given["advertise"]  # Which names another port.
        internal = replace(config.internal, max_tunnels=tunnels, opens_ports=opens_ports)
        config = replace(config, internal=internal)
        times = {
            name: checked_seconds(option.variable if options.get(name) is None else name, given[name], not option.least)
            for name, option in OPTIONS.items()
            if option.kind is float and given[name] is not None
        }
        return cls(
            seeds=tuple(dict.fromkeys(addresses)), expected=expected, sources=tuple(sources), listen=listen,
            advertise=parse_address(given["advertise"]) if given["advertise"] else None,
            state_dir=state_dir, secret=secret, config=config, others=others,
            wait_for=checked_count(
                "wait_for", given["wait_for"], 1, "how many members to wait for, this one included, as 4"
            ),
            page=page_address(given["page"], secret),
            trace=timeline_file(given["trace"]),
            on_fault=checked_word("on_fault", given["on_fault"], ("restart", "raise")),
            place=place, shares_address=not names_address,
            follows_first=follows_first and OPTIONS["quiet"].variable in environment,
            **({"grace_s": config.internal.grace_s} | times),
        )  # fmt: skip


def environment_at(place: int, environment: Mapping[str, str]) -> Mapping[str, str]:
    """Return the variables for the Node at this place in its process, where the first has place 0.

    The Nodes of one process, as a generator and a discriminator, are nodes of different swarms. Each finds the others
    of its kind one port further than the Node before it, if all processes make their Nodes in one order.
    """
    if not place:
        return environment
    moved = dict(environment)
    for option in OPTIONS.values():
        text = environment.get(option.variable)
        if not option.own or not text:
            continue
        if option.metavar == "DIR":
            text = os.path.join(text, f"node-{place + 1}")
        elif option.metavar == "FILE":
            text = str(Path(text).with_stem(f"{Path(text).stem}-{place + 1}"))
        elif text != "none":
            text = str(beside(parse_address(text), place))
        moved[option.variable] = text
    folder = environment.get("GOSSIP_STATE_DIR")
    if folder and (secret := kept_secret(Path(folder))) is not None and not is_insecure(environment):
        moved.setdefault("GOSSIP_SECRET_FILE", str(secret))  # The first Node has kept it for all.
    return moved


def values_of(options: NodeOptions, environment: Mapping[str, str]) -> dict[str, Any]:
    """Return what was given for each option, in the program or else in its variable; None for nothing.

    Times are numbers, unless their text is none.
    """
    values: dict[str, Any] = {}
    for name, option in OPTIONS.items():
        value: Any = options.get(name)
        is_text = option.metavar in ("HOST:PORT", "DIR") or (option.metavar == "FILE" and name != "config")
        if is_text and not isinstance(value, str | os.PathLike | None):
            raise ConfigError(f"{name} is {value!r}: give {option.metavar} as a text.")
        if value is None or value == "":
            value = environment.get(option.variable) or None
            if option.kind is float and value is not None:
                with contextlib.suppress(ValueError):
                    value = float(value)
        values[name] = value
    return values


def is_insecure(environment: Mapping[str, str]) -> bool:
    """Return True if the user says that no secret is needed. Raises ConfigError for another word than 0 or 1."""
    text = environment.get("GOSSIP_INSECURE") or "0"
    if text not in ("0", "1"):
        raise ConfigError(f"GOSSIP_INSECURE is {text!r}: give 1 on a network you trust, else 0.")
    return text == "1"


def beside(address: Address, place: int) -> Address:
    """Return the address ``place`` ports further. Port 0, which takes any free one, stays."""
    return Address(address.host, address.port + place if address.port else 0)


def seeds_of(options: NodeOptions, environment: Mapping[str, str]) -> list[object]:
    """Return the seeds as the user gave them: texts, or a function that returns some."""
    seeds = options.get("seeds")
    if not (seeds is None or callable(seeds) or isinstance(seeds, Iterable)):
        raise ConfigError(
            f"seeds is {seeds!r}: give 'host:port', '@path' of a file, a list of such texts or a function."
        )
    from_program: list[object] = [seeds] if isinstance(seeds, str) or callable(seeds) else list(seeds or ())
    return from_program or [text for text in environment.get("GOSSIP_SEEDS", "").split(",") if text.strip()]


def gather_seeds(
    texts: Iterable[object],
) -> tuple[list[Address], dict[Address, PeerId], list[SeedSource], bytes | None]:
    """Return the seeds' addresses, the ids that must answer there, the sources to poll, and an invite's secret."""
    addresses: list[Address] = []
    expected: dict[Address, PeerId] = {}
    sources: list[SeedSource] = []
    secret: bytes | None = None
    for text in texts:
        source = source_of(text)
        if source is not None:
            sources.append(source)
            secret = secret or secret_of_invite(source)
            continue
        seed = parse_seed(text)
        addresses += seed.addresses
        secret = seed.secret or secret
        if seed.expected is not None:
            expected |= dict.fromkeys(seed.addresses, seed.expected)
    return addresses, expected, sources, secret


def listen_address(
    text: str | None, others: Address | None, secret: bytes | None, needs_secret: bool
) -> Address | None:
    """Return the address to listen on; None to dial out only. Raises ConfigError if it needs a secret and has none."""
    if text:
        listen = None if text == "none" else parse_address(text)
    else:
        listen = Address(LOOPBACK if others is None else outward_address(others), 0)
    if listen is None or secret is not None or is_loopback(listen.host) or not needs_secret:
        return listen
    if not text:
        raise ConfigError(
            f"The launcher started members on other hosts ({others} is one of them), which need a secret to "
            "reach each other: make one with 'gossip secret', copy it to every host and name its file in "
            "GOSSIP_SECRET_FILE, or set GOSSIP_INSECURE=1 on a network you trust."
        )
    raise ConfigError(
        f"Listening on {listen} without a secret would let anybody change this model: make one with "
        "'gossip secret' and give it with --secret-file, or say --insecure on a network you trust."
    )


def config_of(options: NodeOptions, environment: Mapping[str, str]) -> Config:
    """Return the given configuration, else that of the named file, else the default. Raises ConfigError."""
    config, path = options.get("config"), environment.get("GOSSIP_CONFIG")
    if config is None:
        return Config.from_toml(path) if path else Config()
    if not isinstance(config, Config):
        raise ConfigError(
            f"config is a {type(config).__name__}: give a gossip.Config, as Config(mix_every_steps=4), "
            "Config(**settings) of a mapping or Config.from_toml(path) of a file."
        )
    return config


def checked_seconds(name: str, seconds: object, may_be_zero: bool = False) -> float:
    """Return a time unchanged. Raises ConfigError unless it is a finite number above 0, or 0 if it ``may_be_zero``."""
    if not isinstance(seconds, bool) and isinstance(seconds, Real):
        value = float(seconds)
        if 0 < value < math.inf or (may_be_zero and value == 0):
            return value
    raise ConfigError(f"{name} is {seconds!r}: give a number of seconds, as 30.")


def checked_count(name: str, count: object, default: int, example: str) -> int:
    """Return the number that was given for an option, the default if none was. Raises ConfigError with the example."""
    with contextlib.suppress(ValueError):
        count = default if count is None else int(count) if isinstance(count, str) else count
    if isinstance(count, bool) or not isinstance(count, Integral) or count < (OPTIONS[name].least or 0):
        raise ConfigError(f"{name} is {count!r}: give {example}.")
    return int(count)


def checked_word(name: str, given: object, words: tuple[str, str]) -> str:
    """Return one of the two words that an option takes, the first if none is given. Raises ConfigError for another."""
    if given is not None and given not in words:
        raise ConfigError(f"{name} is {given!r}: give {words[0]!r} or {words[1]!r}.")
    return words[0] if given is None else str(given)


def timeline_file(file: str | os.PathLike[str] | None) -> Path | None:
    """Return the file for a timeline. Raises ConfigError if its folder does not exist."""
    path = Path(file).resolve() if file else None
    if path is not None and not path.parent.is_dir():
        raise ConfigError(f"The timeline's folder {path.parent} does not exist: make it first.")
    return path


def page_address(text: str | None, secret: bytes | None) -> Address | None:
    """Return the page's address. Raises ConfigError if the page cannot exist or cannot be protected."""
    if not text:
        return None
    address = parse_address(text)
    if any(importlib.util.find_spec(name) is None for name in ("h11", "prometheus_client")):
        raise ConfigError("The page needs h11 and prometheus-client: pip install 'gossip-trainer[page]'.")
    if secret is None and not is_loopback(address.host):
        raise ConfigError(
            f"The page on {address} could be read by anybody: give the swarm a secret, whose link opens it, or listen "
            "on 127.0.0.1 and forward the port, as ssh -L does."
        )
    return address


def secret_of_invite(source: SeedSource) -> bytes | None:
    """Return the secret of an invite in a seed file that exists already.

    A later invite is too late, since a node uses a secret or none from its first connection on.
    """
    texts: list[str] = []
    if isinstance(source, Path):
        with contextlib.suppress(OSError):  # The file may come later.
            texts = read_seeds(source)
    for text in texts:
        if is_invite(text):
            with contextlib.suppress(IdentityError):  # Reported when the file is looked up.
                return parse_invite(text).secret
    return None


def advertised_address(settings: Settings, bound: Address | None, known: Iterable[Address] = ()) -> Address | None:
    """Return the address that others should dial, or None where this node does not listen.

    Args:
        settings: The settings of this node; a given ``advertise`` wins.
        bound: Where this node listens. For "any address" the result is this machine's address on the way to another
            host. That is a seed, else another host of the launch, else a known member, else any host outside.
        known: Addresses of members that this node knew in an earlier life.
    """
    if settings.advertise is not None or bound is None:
        return settings.advertise
    if bound.host not in ("0.0.0.0", "::"):
        return bound
    known_address = next((address for address in known if not is_loopback(address.host)), OUTSIDE)
    target = settings.seeds[0] if settings.seeds else settings.others or known_address
    host = routed(target, bound.host == "::" and ":" in target.host)
    return Address(host or outward_address(OUTSIDE), bound.port)


def outward_address(target: Address) -> str:
    """Return this machine's address on the way to ``target``, which is loopback only if the machine has no other."""
    host = routed(target, ":" in target.host)
    if host is None or is_loopback(host):  # A machine's own name often means loopback.
        host = routed(OUTSIDE, False)
    # A closed network may have no route to outside: take the address of an interface.
    return host or next((address for address in own_addresses() if not is_loopback(address)), LOOPBACK)


def own_addresses() -> Iterator[str]:
    """Yield the first IPv4 address of each interface, as the kernel lists them; nothing where it cannot be asked."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # An interface without one.
                answer = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                yield socket.inet_ntoa(answer[20:24])
