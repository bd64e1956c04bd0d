"""The `gossip plan` command, after `gossip.__main__` has parsed its options."""

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gossip.config import read_toml
from gossip.errors import LocalError
from gossip.ids import quantity
from sim.cli import ending_on_signals, print_table, results_of
from sim.interrupt import interrupt
from sim.planner.candidates import candidates, parse
from sim.planner.study import Study
from sim.planner.world import World
from sim.scenario.scenario import with_files_in
from sim.scenario.tables import toml_text


@ending_on_signals
def plan(  # noqa: PLR0913  The options of a command.
    file: Path | None,
    *,
    table: Mapping[str, Any] | None = None,
    model_mb: float | None = None,
    step_s: float | None = None,
    nodes: int | None = None,
    seed: int | None = None,
    seeds: int = 3,
    more: Sequence[str] = (),
    out: Path | None = None,
    as_json: bool = False,
    quiet: bool = False,
    jobs: int | None = None,
) -> int:
    """Simulate settings on the links of a file or table, and report which to take.

    Args:
        file: A scenario's file.
        table: Its tables, instead of a file.
        model_mb: The size of the model in MB of float32, in place of the file's, or of 10.
        step_s: Seconds per step, in place of the file's.
        nodes: Number of nodes, in place of the file's.
        seed: The first seed, in place of the file's.
        seeds: Number of seeds.
        more: Further settings to try.
        out: A file for the recommended settings.
        as_json: Print JSON.
        quiet: Show no progress.
        jobs: Simulations at once; None: one per core.

    Returns:
        The exit code, 130 after ^C.

    Raises:
        GossipError: As :func:`sim.cli.run`.
    """
    from sim.jobs import Assignment
    from sim.report.result import Result

    done: dict[int, Result] = {}  # The results of finished runs, by run number.
    if out is not None and (
        out.resolve() == (file or Path()).resolve() or not os.access(out.absolute().parent, os.W_OK)
    ):
        raise LocalError(f"The plan cannot be written to {out}: name another file, in a folder that is there.")
    try:
        tables = dict(table or {}) if file is None else with_files_in(file.parent, read_toml(file, "plan"))
        world = World.from_mapping(
            tables, str(file or "what was measured"), model_mb=model_mb, step_s=step_s, nodes=nodes, seed=seed
        )
        tried = candidates(world.scenario, world.exchange_steps, world.base_settings)
        study = Study(world, [*tried, *(parse(text, world.base_settings) for text in more)], seeds)
        todo = [
            Assignment(scenario, f"{outcome.candidate.name}, seed {scenario.seed}") for outcome, scenario in study.runs
        ]
        done.update(results_of(todo, jobs, quiet, {}))
    except KeyboardInterrupt:
        print("gossip: stopped before all was played: nothing can be said yet.", file=sys.stderr)
        return interrupt.exit_code
    study.take(done)
    if as_json:
        print(json.dumps(study.to_mapping(), allow_nan=False))
    else:
        print_study(study, out)
    if out is not None:
        try:
            out.write_text(study.to_toml(), encoding="utf-8")
        except OSError as error:
            raise LocalError(f"The plan cannot be written to {out} ({error.strerror}): name another file.") from None
    return 0


def print_study(study: Study, out: Path | None) -> None:
    """Print the table, the advice, and the section."""
    world = study.world.scenario
    heads, rows = study.table()
    where = f"{out} has it for gossip run --config."
    if out is None:
        section = toml_text({"gossip": study.settings()}).strip()
        where = f"\n{section}\n\n--out FILE writes this, for gossip run --config FILE."
    title = f"{world.name}: {quantity(world.peers, 'node')}, a model of {world.task.model_mb:g} MB"
    print_table(f"{title}, {quantity(study.seeds, 'seed')}", heads, rows, [*study.sentences, where])
