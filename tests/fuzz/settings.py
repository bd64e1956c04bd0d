"""Targets: texts that a user writes. Configurations, scenarios, addresses, seeds, parts, graphs."""

from pathlib import Path
from random import Random
from typing import Any

from gossip.arithmetic.subsets import Subset, check_part
from gossip.codecs import get_codec
from gossip.config import Config
from gossip.config.methods import METHODS
from gossip.config.setting import settings_of
from gossip.errors import ConfigError, IdentityError
from gossip.ids import parse_address
from gossip.selection.graphs import Graph
from node.options import NodeOptions
from node.settings import Settings
from sim.scenario.scenario import Scenario
from sim.scenario.tables import toml_text
from tests.fuzz.engine import Input, Target
from tests.fuzz.files import OnDisk
from tests.fuzz.mutations import EDGE_FLOATS, EDGE_INTS, edge_value, mutated_bytes, mutated_text, mutated_value

HUGE = (10**25, 10**400, -(10**400), 1 << 20_000)  # TOML and JSON have no largest number.
WORDS = (
    "uniform", "ring", "torus", "graph", "exponential", "grid", "nearest", "pair", "group", "push-sum",
    "row-stochastic",
    "auto", "none", "clip", "balance", "trimmed", "fp32", "bf16", "int8", "moniqua4", "moniqua8", "all", "mask 0.1",
    "top 0.1", "fragments 8", "lan", "wan", "datacentre", *METHODS,
)  # fmt: skip
NAMES = tuple(settings_of(Config))


def setting(rng: Random) -> Any:
    match rng.randrange(7):
        case 0 | 1:
            return rng.choice(WORDS)
        case 2:
            return rng.choice((*EDGE_INTS, *HUGE))
        case 3:
            return rng.choice(EDGE_FLOATS)
        case 4:
            return rng.choice((0, 1, 2, 4, 8, 16, 0.1, 0.5, 0.9, 2.0, True, False, None))
    return edge_value(rng)


class Configs(Target):
    """A mapping of settings: it gives a valid Config, or a ConfigError."""

    name, share, declared = "configs", 0.05, (ConfigError,)

    def prepare(self, rng: Random) -> Input:
        names = (*NAMES, "preset", "method", "", "selectoin", "internal", "bench_s")
        table = {rng.choice(names): setting(rng) for _ in range(rng.choice((1, 1, 2, 3, 5)))}

        def act() -> None:
            config = Config.from_mapping(table)
            assert Config.from_mapping({name: getattr(config, name) for name in NAMES}) == config
            config.for_training()

        return table, act


class Tomls(OnDisk):
    """The bytes of a configuration's file."""

    name, share, declared = "tomls", 0.02, (ConfigError,)

    def prepare(self, rng: Random) -> Input:
        text = "\n".join(f"{name} = {toml(setting(rng))}" for name in rng.sample(NAMES, rng.choice((1, 2, 4))))
        text = rng.choice(("", "[gossip]\n", 'preset = "wan"\n', "[[gossip]]\n")) + text
        if rng.random() < 0.7:
            text = mutated_text(
                rng, text, (*NAMES, *WORDS, "[gossip]", "{ a = ", "[", "= ", "1_0", "0x", "1979-05-27", '"""')
            )
        data = text.encode("utf-8", "replace")
        if rng.random() < 0.2:
            data = mutated_bytes(rng, data)

        def act() -> None:
            (self.folder / "a.toml").write_bytes(data)
            Config.from_toml(self.folder / "a.toml")

        return data, act


def toml(value: Any) -> str:
    match value:
        case bool():
            return str(value).lower()
        case str():
            return repr(value)
        case int() if abs(value) > 1 << 64:
            return hex(value).replace("-", "")  # Python refuses thousands of decimal digits, but not hexadecimal ones.
        case list() | dict():
            return "[1, 2]"
    return str(value)


SCENARIOS = sorted(Path(__file__).parents[2].glob("examples/**/*.toml"))
FALLBACK = """
peers = 8
duration_s = 20.0
[task]
dataset = "averaging"
[gossip]
mix_every_steps = 4
[compute]
step_s = { lognormal = [0.1, 0.5] }
[network]
latency = "5 ms"
"""


class Scenarios(OnDisk):
    """A scenario's file and its tables, with overrides from the command line."""

    name, share, declared = "scenarios", 0.005, (ConfigError,)

    def __init__(self, rng: Random) -> None:
        super().__init__(rng)
        texts = [path.read_text(encoding="utf-8") for path in SCENARIOS]
        self.texts = [text for text in texts if "peers" in text and "task" in text] or [FALLBACK]
        self.tables = []
        for text in self.texts:
            try:
                self.tables.append(self.read(text.encode(), None).to_mapping())
            except ConfigError:  # This file belongs to another program.
                continue
        self.tables = self.tables or [{"peers": 8, "rounds": 4}]

    def read(self, data: bytes, changes: dict[str, str] | None) -> Scenario:
        (self.folder / "a.toml").write_bytes(data)
        return Scenario.from_toml(self.folder / "a.toml", changes=changes)

    def prepare(self, rng: Random) -> Input:
        way = rng.random()
        if way < 0.5:
            table = mutated_value(rng, rng.choice(self.tables))
            if rng.random() < 0.3 and isinstance(table, dict):
                table["gossip"] = {rng.choice(NAMES): setting(rng)}
            return table, lambda: again(Scenario.from_mapping(table))
        data = rng.choice(self.texts).encode()
        if way < 0.75:
            changes = {rng.choice(KEYS): rng.choice((toml(setting(rng)), "none", "10 ms", "1 Gbit/s", "[", ""))}
            return (data, changes), lambda: again(self.read(data, changes))
        if rng.random() < 0.5:
            data = mutated_bytes(rng, data)
        else:
            data = mutated_text(rng, data.decode(), TOKENS).encode("utf-8", "replace")
        return data, lambda: again(self.read(data, None))


KEYS = (
    "peers", "seed", "rounds", "duration_s", "gossip.codec", "gossip.part", "gossip.group_size", "task.dataset",
    "task.model", "task.optimizer.name", "task.optimizer.lr", "task.partition", "network.latency", "network.loss",
    "network.congestion", "network.tls", "fleet", "fleet.number", "churn.silent", "churn.farewell",
    "churn.trace", "churn.model", "attackers.share", "compute.step_s", "compute.stragglers.share",
    "report.every_s", "a.b.c", ".", "",
)  # fmt: skip
TOKENS = (
    *KEYS, *WORDS, "[task]", "[network]", "[[network.partitions]]", "[[fleet]]", "number = 3", "bbr", "lognormal",
    "5 ms", "1 Gbit/s", "inf", "nan", "1e400",
)  # fmt: skip


def again(scenario: Scenario) -> None:
    """Assert that an accepted scenario can be written and read again."""
    assert Scenario.from_mapping(scenario.to_mapping()) == scenario
    toml_text(scenario.to_mapping())


PARTS = ("all", "mask 0.005", "top 0.01", "fragment 3/8", "fragments 8", "mask 1e-06", "int8", "moniqua4")


class Parts(Target):
    """The text of a part or a codec, from a setting or an offer, and the positions of a part's elements."""

    name, share, declared = "parts", 0.05, (ConfigError,)

    def prepare(self, rng: Random) -> Input:
        text = rng.choice(PARTS)
        if rng.random() < 0.8:
            text = mutated_text(rng, text, ("mask ", "top ", "fragment ", "/", ".", "e-", "0", "9"))
        size, session = rng.choice((0, 1, 2, 255, 1_000, 70_001)), rng.choice(EDGE_INTS) % 2**63
        parse = rng.choice((check_part, get_codec))

        def act() -> None:
            part = Subset.parse(text)
            if part is not None:
                assert Subset.parse(str(part)) == part
                count = part.elements(size)
                assert 0 <= count <= max(1, size)
                if part.kind in ("mask", "fragment") and size:
                    positions = part.positions(size, session)
                    assert positions is not None
                    assert positions.size == count
                    if count:
                        assert 0 <= positions[0] <= positions[-1] < size
                        assert (positions[1:] > positions[:-1]).all()
                return
            parse(text)

        return (text, size, session), act


class Addresses(Target):
    """Seeds and addresses from the command line and the environment."""

    name, share, declared = "addresses", 0.05, (ConfigError, IdentityError)

    def prepare(self, rng: Random) -> Input:
        sample = rng.choice(
            ("10.0.0.5:7700", "[::1]:7700", "node.example:1", "127.0.0.1:0", "none", "10.0.0.1:1#" + "0f" * 16)
        )
        text = mutated_text(
            rng, sample, (":", "[", "]", "#", "//", "none", "0.0.0.0", "::", "localhost", "65535", "65536")
        )
        if rng.random() < 0.4:
            return text, lambda: str(parse_address(text))
        key = rng.choice(("GOSSIP_SEEDS", "GOSSIP_LISTEN", "GOSSIP_ADVERTISE", "GOSSIP_SECRET_FILE"))
        environment = {key: text, "GOSSIP_LISTEN": text if key == "GOSSIP_LISTEN" else "none"}

        def act() -> None:
            Settings.gather(NodeOptions(config=Config()), environment)

        return environment, act


class Graphs(Target):
    """A file of links between members."""

    name, share, declared = "graphs", 0.03, (ConfigError,)

    def prepare(self, rng: Random) -> Input:
        sample = rng.choice((
            "0 1\n1 2\n2 0\n", "10.0.0.1:7700 10.0.0.2:7700\n", "0123abcd 89abcdef\n# end\n", "0 1\n" * 40,
            "\n".join(f"{n} {n + 1}" for n in range(rng.choice((3, 30, 300)))),
        ))  # fmt: skip
        text = mutated_text(
            rng, sample, ("0 ", "1", "\n", "#", "abcdef01", "10.0.0.1:1 ", "99999999 ", "0 0\n"), most=4_000
        )

        def act() -> None:
            graph = Graph.from_text(text)
            assert all(node in graph.links[other] for node, links in enumerate(graph.links) for other in links)

        return text, act
