"""Where a node's settings come from: arguments win over the environment, which is how the command line passes them."""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import socket
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from gossip.config import Config
from gossip.errors import ConfigError
from gossip.ids import Address, PeerId, parse_address
from node.identity.keys import is_invite, keep_secret, kept_secret, parse_invite, read_secret
from node.transport.tcp import is_loopback

__all__ = ["Settings", "advertised"]

SIOCGIFADDR = 0x8915  # of Linux; elsewhere it fails as on an interface without an address


@dataclass(frozen=True, slots=True)
class Settings:
    """All a node needs to know before it starts. ``listen`` None: it only dials out."""

    seeds: tuple[Address, ...]
    expected: Mapping[Address, PeerId]  # ids that seeds from an invite must prove
    listen: Address | None
    advertise: Address | None
    secret: bytes | None
    state_dir: Path | None
    config: Config
    join_or_fail_s: float | None = None  # fail unless the weights of a swarm are here by then

    @classmethod
    def gather(
        cls,
        seeds: Iterable[str] | None,
        listen: str | None,
        advertise: str | None,
        secret: str | os.PathLike[str] | None,
        state_dir: str | os.PathLike[str] | None,
        config: Config | None,
        environment: Mapping[str, str] = os.environ,
        join_or_fail_s: float | None = None,
    ) -> Settings:
        """Raises ConfigError or IdentityError, one sentence, for what cannot work."""
        given = [seeds] if isinstance(seeds, str) else list(seeds or ())
        if not given:
            given = [text for text in environment.get("GOSSIP_SEEDS", "").split(",") if text.strip()]
        addresses: list[Address] = []
        expected: dict[Address, PeerId] = {}
        key: bytes | None = None
        for text in given:
            if is_invite(text):
                invite = parse_invite(text)
                key = invite.secret
                addresses += invite.seeds
                expected |= dict.fromkeys(invite.seeds, invite.seed_id)
                continue
            where, mark, wanted = text.partition("#")
            address = parse_address(where)
            addresses.append(address)
            if mark:
                expected[address] = peer_id(wanted, text)
        file = secret if secret is not None else environment.get("GOSSIP_SECRET_FILE")
        folder = state_dir if state_dir is not None else environment.get("GOSSIP_STATE_DIR")
        if key is not None and folder:
            keep_secret(key, Path(folder))  # an invite is used once: the next start has no seed, and the secret still
        elif not file and folder and not environment.get("GOSSIP_INSECURE"):
            file = kept_secret(Path(folder))
        if file:
            key = read_secret(Path(file))
        where = listen or environment.get("GOSSIP_LISTEN") or "127.0.0.1:0"
        bound = None if where == "none" else parse_address(where)
        if bound is not None and key is None and not is_loopback(bound.host) and not environment.get("GOSSIP_INSECURE"):
            raise ConfigError(
                f"Listening on {bound} without a secret would let anybody change this model: make one with "
                "'gossip secret' and give it with --secret-file, or say --insecure on a network you trust."
            )
        shown = advertise or environment.get("GOSSIP_ADVERTISE")
        if config is None:
            path = environment.get("GOSSIP_CONFIG")
            config = Config.from_toml(path) if path else Config()
        return cls(
            tuple(dict.fromkeys(addresses)), expected, bound, parse_address(shown) if shown else None, key,
            Path(folder) if folder else None, config,
            seconds(environment.get("GOSSIP_MUST_JOIN", "")) if join_or_fail_s is None else join_or_fail_s,
        )  # fmt: skip


def seconds(text: str) -> float | None:
    """Of GOSSIP_MUST_JOIN; None where nothing is said."""
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise ConfigError(f"GOSSIP_MUST_JOIN is {text!r}: give a number of seconds, as 30.")
    return value


def peer_id(text: str, seed: str) -> PeerId:
    try:
        value = bytes.fromhex(text)
    except ValueError:
        value = b""
    if len(value) != 16:
        raise ConfigError(f"{seed!r} is not a seed: after # belong the 32 hexadecimal digits of a node's id.")
    return PeerId(value)


def advertised(settings: Settings, bound: Address | None) -> Address | None:
    """What others should dial: what was said, else where we listen; for "any address" the one that routes outwards."""
    if settings.advertise is not None or bound is None:
        return settings.advertise
    if bound.host not in ("0.0.0.0", "::"):
        return bound
    target = settings.seeds[0] if settings.seeds else Address("192.0.2.1", 9)  # reserved for documentation
    host = routed(target, bound.host == "::" and ":" in target.host)
    # Without a default route, as in a closed network. The machine's name would not do: it often means loopback.
    return Address(host or next((own for own in own_addresses() if not is_loopback(own)), "127.0.0.1"), bound.port)


def routed(target: Address, v6: bool = False) -> str | None:
    """Our address on the way to ``target``; None where there is no way."""
    with socket.socket(socket.AF_INET6 if v6 else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(tuple(target))  # chooses a route; a datagram socket sends nothing by it
            return str(probe.getsockname()[0])
        except OSError:
            return None


def own_addresses() -> Iterator[str]:
    """The first IPv4 address of each interface, as the kernel lists them; nothing where it cannot be asked."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # an interface without one
                answer = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                yield socket.inet_ntoa(answer[20:24])
