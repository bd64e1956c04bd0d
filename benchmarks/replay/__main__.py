"""Play scenarios with real processes on emulated links, next to the simulator's predictions of them.

    python -m benchmarks.replay SCENARIO.toml... [--runs N] [--seeds N] [--seed N] [--set KEY=VALUE]... [--out DIR]

Needs root, Linux, gcc and /dev/net/tun, and runs in real time. From the repository: the package that users install
does not contain it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.replay import cli
from gossip.errors import ConfigError, GossipError

__all__ = ["main"]


def main(words: Sequence[str] | None = None) -> int:
    """Read the command line and replay its scenarios.

    Args:
        words: The arguments; those of the process if None.

    Returns:
        The exit code: 0 when all were played, 2 for a mistake in a scenario, 3 where nothing can be played, 130 after
        Ctrl-C.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks.replay", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("scenarios", nargs="+", type=Path, metavar="SCENARIO.toml")
    parser.add_argument("--seed", type=positive_or_zero, help="instead of the scenario's own")
    parser.add_argument("--seeds", type=positive, default=5, help="predictions, each with the next seed")
    parser.add_argument("--runs", type=positive, default=1, help="real runs, each with the next seed")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="another value for a setting")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder for one JSON file per scenario, and gaps.md")
    parser.add_argument("--json", action="store_true", help="one JSON object per scenario instead of a table")
    parser.add_argument("--quiet", action="store_true", help="no progress line")
    arguments = parser.parse_args(words)
    try:
        return cli.replay(
            arguments.scenarios, seed=arguments.seed, seeds=arguments.seeds, runs=arguments.runs,
            settings=arguments.set, out=arguments.out, as_json=arguments.json, quiet=arguments.quiet,
        )  # fmt: skip
    except GossipError as error:
        print(error, file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 3


def positive(text: str) -> int:
    """Return the whole number above 0 that ``text`` says; argparse turns the ValueError into its message."""
    number = int(text)
    if number < 1:
        raise ValueError(text)
    return number


def positive_or_zero(text: str) -> int:
    """Return the whole number from 0 that ``text`` says; argparse turns the ValueError into its message."""
    return positive(text) if text.strip() != "0" else 0


if __name__ == "__main__":
    sys.exit(main())
