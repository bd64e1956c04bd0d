"""The `gossip` command. Nothing heavy is imported before a command runs: `gossip --help` must answer at once."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from importlib import import_module
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from gossip.errors import ConfigError, FaultError, GossipError, IdentityError


class Commands(TyperGroup):
    """The command group. ``sim sweep`` and ``trace merge`` are single commands of two words."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Resolve a command as click does, and also commands of two words."""
        if args[:2] in (["sim", "sweep"], ["trace", "merge"]):
            args = [" ".join(args[:2]), *args[2:]]
        return super().resolve_command(ctx, args)


# Rich markup in the help would cost 60 ms of imports; pretty tracebacks would print the user's variables.
app = typer.Typer(
    name="gossip", cls=Commands, help="Train one model on many machines with nobody in charge.", no_args_is_help=True,
    rich_markup_mode=None, pretty_exceptions_enable=False,
)  # fmt: skip

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")

# Options after SCRIPT belong to the script.
SCRIPT_COMMAND = {"allow_interspersed_args": False}

Script = Annotated[
    Path, typer.Argument(metavar="SCRIPT", help="The training script, or with -m a module.", show_default=False)
]
IsModule = Annotated[bool, typer.Option("-m", help="SCRIPT names a module, as package.train, like python -m.")]
ScriptArgs = Annotated[list[str] | None, typer.Argument(metavar="ARGS", help="The script's own, options included.")]
SecretFile = Annotated[Path | None, typer.Option(metavar="FILE", help="The secret, as `gossip secret` made it.")]
Threads = Annotated[int | None, typer.Option(metavar="N", min=1, help="Threads of arithmetic.")]
NodeAddress = Annotated[str, typer.Argument(metavar="HOST:PORT", help="Where a node listens.", show_default=False)]
Json = Annotated[bool, typer.Option("--json", help="One JSON object instead of a table.")]
TimeoutS = Annotated[float, typer.Option("--timeout", min=0.1, help="Seconds to wait for the node.")]


def print_version(wanted: bool) -> None:
    """Print the version and end, if that is wanted."""
    if wanted:
        from importlib.metadata import version

        print(version("gossip-trainer"))
        raise typer.Exit


def find_node() -> None:
    """Import this package's neighbour `node`, whatever the current folder has of that name.

    `python -m gossip` searches the current folder first, and a script's helper may be called node.py. From here on the
    package is in `sys.modules`, so its modules are found wherever the search begins.
    """
    home = str(Path(__file__).resolve().parents[1])
    sys.path.insert(0, home)
    try:
        import_module("node")
    finally:
        sys.path.remove(home)


find_node()


def with_options(help_of: Callable[[Any], str]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command with ``**options`` a flag for each option of a node for which ``help_of(option)`` has a text."""
    from node.options import OPTIONS

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        parameters = [
            parameter
            for parameter in signature(command, eval_str=True).parameters.values()
            if parameter.kind is not parameter.VAR_KEYWORD
        ]
        for name, option in OPTIONS.items():
            if not (text := help_of(option)):
                continue
            kind, metavar = (option.kind | None, option.metavar) if option.metavar else (bool, None)
            flag = typer.Option(option.flag, metavar=metavar, min=option.least, help=text)
            default = None if option.metavar else False
            parameters.append(
                Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, flag])
            )
        command.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return command

    return decorate


@app.callback()
def gossip(
    version: Annotated[
        bool, typer.Option("--version", callback=print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Options of the command itself."""


@app.command(context_settings=SCRIPT_COMMAND)
@with_options(lambda option: option.help)
def run(
    script: Script, args: ScriptArgs = None, module: IsModule = False, threads: Threads = None, **options: Any
) -> None:
    """Run a training script as one node of a swarm."""
    if threads is not None:  # before numpy and torch are imported, which read these once
        os.environ.update(dict.fromkeys(THREAD_VARIABLES, str(threads)))
    from node.cli import main as cli

    raise typer.Exit(cli.run(script, args or [], options, module))


@app.command(context_settings=SCRIPT_COMMAND)
def inspect(script: Script, args: ScriptArgs = None, module: IsModule = False) -> None:
    """Run a training script up to its Node, print what of its model travels how, and end without joining."""
    from node.cli import main as cli

    raise typer.Exit(cli.inspect(script, args or [], module))


@app.command(context_settings=SCRIPT_COMMAND)
@with_options(lambda option: option.local_help)
def local(
    script: Script,
    args: ScriptArgs = None,
    module: IsModule = False,
    nodes: Annotated[int, typer.Option("--nodes", "-n", min=1, max=64, help="Processes to start.")] = 4,
    threads: Annotated[int, typer.Option(metavar="N", min=1, help="Threads of arithmetic a process.")] = 1,
    log_dir: Annotated[Path | None, typer.Option(metavar="DIR", help="Keeps each node's log and output.")] = None,
    **options: Any,
) -> None:
    """Start a swarm of processes on this machine, all running one script."""
    from node.cli.local import run_local

    code = run_local(
        script, args or [], options, module=module, nodes=nodes, threads=threads, log_dir=log_dir
    )  # fmt: skip
    raise typer.Exit(code)


@app.command(context_settings=SCRIPT_COMMAND)
@with_options(lambda option: option.help if option.local_help and not option.own else "")
def up(
    hosts: Annotated[Path, typer.Argument(metavar="HOSTS", help="A file with a host a line, as ssh takes it.")],
    script: Script,
    args: ScriptArgs = None,
    module: IsModule = False,
    ssh: Annotated[str, typer.Option(metavar="COMMAND", help="Runs a command on a host.")] = "ssh -o BatchMode=yes",
    secret_file: SecretFile = None,
    log_dir: Annotated[Path | None, typer.Option(metavar="DIR", help="Keeps each node's output.")] = None,
    **options: Any,
) -> None:
    """Start a node on each host of a file over ssh, show what they print, and end them with this command."""
    from node.cli.up import run_up

    code = run_up(
        hosts, script, args or [], options, module=module, ssh=ssh, secret_file=secret_file, log_dir=log_dir
    )  # fmt: skip
    raise typer.Exit(code)


@app.command()
def demo(
    nodes: Annotated[int, typer.Option(min=3, max=16, help="Processes to start with.")] = 4,
    json: Json = False,
    seconds_limit: Annotated[float, typer.Option(min=1, help="Give up after so many seconds.")] = 90.0,
    page: Annotated[bool, typer.Option("--page", help="A live page of the swarm, whose address is printed.")] = False,
    opens: Annotated[bool, typer.Option("--open", help="Open it in a browser.")] = False,
) -> None:
    """Train on real data, kill the first node half-way, let another join, and show that it did not matter."""
    from node.cli.demo import run_demo

    raise typer.Exit(run_demo(nodes=nodes, as_json=json, limit_s=seconds_limit, page=page or opens, opens=opens))


@app.command()
def status(
    address: NodeAddress,
    secret_file: SecretFile = None,
    json: Json = False,
    timeout_s: TimeoutS = 5.0,
    with_left: Annotated[bool, typer.Option("--all", help="Name the members that left as well.")] = False,
) -> None:
    """Ask a running node for its id, its members and its metrics."""
    from node.cli import main as cli

    cli.status(address, secret_file=secret_file, as_json=json, timeout_s=timeout_s, with_left=with_left)


@app.command()
def top(
    address: NodeAddress,
    secret_file: SecretFile = None,
    timeout_s: TimeoutS = 5.0,
    every_s: Annotated[float, typer.Option("--every", metavar="SECONDS", min=0.2, help="Between two looks.")] = 2.0,
) -> None:
    """Watch a swarm in the terminal, as one of its nodes tells it."""
    from node.cli.top import run_top

    raise typer.Exit(run_top(address, secret_file, timeout_s, every_s))


@app.command()
def doctor(
    addresses: Annotated[
        list[str] | None, typer.Argument(metavar="HOST:PORT...", help="Nodes of the swarm.", show_default=False)
    ] = None,
    secret_file: SecretFile = None,
    timeout_s: TimeoutS = 5.0,
) -> None:
    """Find what lies between this machine and a swarm: addresses, NAT, router, ways to its members."""
    from node.cli.doctor import doctor as examine

    examine(addresses or [], secret_file, timeout_s)


@app.command()
def fetch(
    seeds: Annotated[list[str], typer.Argument(metavar="SEED...", help="Nodes, or an invite.", show_default=False)],
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A safetensors file.", show_default=False)],
    secret_file: SecretFile = None,
    timeout_s: TimeoutS = 5.0,
    every_s: Annotated[float | None, typer.Option("--every", metavar="SECONDS", min=0.2, help="Go on.")] = None,
) -> None:
    """Write the weights of a live swarm to a file, without being one of its members."""
    from node.cli import main as cli

    cli.fetch(seeds, file, secret_file=secret_file, timeout_s=timeout_s, every_s=every_s)


@app.command()
def secret() -> None:
    """Make a swarm secret and print it."""
    from node.cli import main as cli

    cli.secret()


@app.command()
def invite(
    address: NodeAddress,
    secret_file: Annotated[Path, typer.Option(metavar="FILE", help="The swarm's secret.", show_default=False)],
    timeout_s: TimeoutS = 5.0,
) -> None:
    """Print one line that lets a newcomer join through the node at HOST:PORT."""
    from node.cli import main as cli

    cli.invite(address, secret_file=secret_file, timeout_s=timeout_s)


@app.command()
def methods(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="One of them, with its settings.")] = None,
) -> None:
    """List the published methods that are a configuration here, with their papers."""
    from gossip.config import reference

    print(reference.one_method(name) if name else reference.all_methods())


@app.command("config")
def config_command(
    key: Annotated[str | None, typer.Argument(metavar="KEY", help="One of them, explained.")] = None,
) -> None:
    """List the settings of a node: what each means, its default, its range, when to change it."""
    from gossip.config import reference

    print(reference.explained(key) if key else reference.all_keys())


SimSeed = Annotated[int | None, typer.Option("--seed", metavar="N", min=0, help="Instead of the scenario's own.")]
SimSet = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Another value, as gossip.mix_every_steps=4; may be repeated."),
]
SimJson = Annotated[bool, typer.Option("--json", help="One JSON object a run instead of a table.")]
SimJobs = Annotated[
    int | None,
    typer.Option("--jobs", metavar="N", min=1, help="Runs at once; as many as there are cores if not given."),
]
SimQuiet = Annotated[bool, typer.Option("--quiet", help="No progress.")]


@app.command()
def sim(
    scenarios: Annotated[
        list[Path], typer.Argument(metavar="SCENARIO.toml", help="Several are compared.", show_default=False)
    ],
    seed: SimSeed = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Writes report.html, pictures, history.csv, summary.json.")
    ] = None,
    jobs: SimJobs = None,
    settings: SimSet = None,
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Writes a timeline of all peers, for ui.perfetto.dev.")
    ] = None,
    json: SimJson = False,
    quiet: SimQuiet = False,
) -> None:
    """Simulate whole swarms in virtual time.

    Thousands of peers decide as real nodes do, and train for real. Over a grid of values: gossip sim sweep --help.
    """
    from sim import cli

    code = cli.run(
        scenarios, seed=seed, out=out, settings=settings or (), as_json=json, quiet=quiet, jobs=jobs, trace=trace
    )
    raise typer.Exit(code)


@app.command("sim sweep")
def sim_sweep(
    scenario: Annotated[Path, typer.Argument(metavar="SCENARIO.toml", show_default=False)],
    grid: Annotated[
        list[str],
        typer.Argument(
            metavar="KEY=V1,V2", help="What is swept; with several keys, all combinations.", show_default=False
        ),
    ],
    seed: SimSeed = None,
    seeds: Annotated[int, typer.Option(metavar="N", min=1, max=1000, help="Runs of each combination.")] = 1,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Writes sweep.csv, sweep.png and report.html.")
    ] = None,
    jobs: SimJobs = None,
    settings: SimSet = None,
    json: SimJson = False,
    quiet: SimQuiet = False,
) -> None:
    """Simulate over a grid of values.

    How large may mix_every_steps be? gossip sim sweep lan.toml gossip.mix_every_steps=2,8,32 --seeds 3
    """
    from sim import cli

    code = cli.sweep(
        scenario, grid, seed=seed, seeds=seeds, out=out, settings=settings or (), as_json=json, quiet=quiet, jobs=jobs
    )
    raise typer.Exit(code)


@app.command("trace merge")
def trace_merge(
    files: Annotated[list[Path], typer.Argument(metavar="FILE", help="What --trace has written.", show_default=False)],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="The timeline of all.", show_default=False)],
) -> None:
    """Merge the timelines of several nodes into one, with their clocks aligned by their exchanges."""
    from gossip.timeline import merge

    merged = merge(files, out)
    print(f"{out} holds {merged.events:,} events: open it at https://ui.perfetto.dev.")
    for file, shift_s in zip(files, merged.shifts_s, strict=True):
        if shift_s is None:
            print(f"{file} shares no exchange with {files[0]}: its clock is as its machine had it.")
        elif abs(shift_s) > 0.001:
            print(f"{file}: {shift_s:+.3f} s, so that its clock agrees with that of {files[0]}.")


@app.command()
def plan(  # noqa: PLR0913  The options of a command.
    links: Annotated[
        Path | None, typer.Argument(metavar="LINKS.toml", help="As a scenario's file: links, machines.")
    ] = None,
    measure: Annotated[
        list[str] | None,
        typer.Option(metavar="HOST:PORT", help="In its place: a running node that is asked; repeat for several."),
    ] = None,
    secret_file: SecretFile = None,
    model_mb: Annotated[
        float | None, typer.Option(metavar="MB", min=1e-6, max=1e6, help="In float32, instead of the file's, or of 10.")
    ] = None,
    step_s: Annotated[
        float | None, typer.Option(metavar="SECONDS", min=1e-6, help="One training step, in place of the file's.")
    ] = None,
    nodes: Annotated[
        int | None, typer.Option(metavar="N", min=2, max=1000, help="In place of the file's, or of 8.")
    ] = None,
    seed: SimSeed = None,
    seeds: Annotated[int, typer.Option(metavar="N", min=1, max=100, help="Runs of each candidate.")] = 3,
    more: Annotated[
        list[str] | None,
        typer.Option("--try", metavar="SETTINGS", help="Another to try, as 'mix_every_steps=4 codec=int8'."),
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Writes the [gossip] section for --config.")] = None,
    jobs: SimJobs = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON object instead of a table.")] = False,
    quiet: SimQuiet = False,
) -> None:
    """Say which settings suit given links, before machines are rented.

    A small model that stands for yours learns on them with a dozen settings; the cheapest that does is named.
    """
    if (links is None) == (not measure):
        raise ConfigError("Name the file of your links, or running nodes by --measure HOST:PORT: one of the two.")
    if secret_file is not None and not measure:
        raise ConfigError("--secret-file is for --measure, whose nodes ask for it: leave it out.")
    from sim.planner import command

    table = None
    if measure:
        from node.cli.links import measured_links

        table = measured_links(measure, secret_file)
    code = command.plan(
        links, table=table, model_mb=model_mb, step_s=step_s, nodes=nodes, seed=seed, seeds=seeds, more=more or (),
        out=out, as_json=json, quiet=quiet, jobs=jobs,
    )  # fmt: skip
    raise typer.Exit(code)


def main() -> None:
    """Run the command line.

    Exit codes: 0 done, 1 the script raised, 2 usage, 3 could not start or save, 4 a fault of this library with
    ``--on-fault raise``, and 128 + n after signal n.
    """
    try:
        app(prog_name="gossip")
    except GossipError as error:
        print(f"gossip: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, ConfigError | IdentityError) else 4 if isinstance(error, FaultError) else 3)


if __name__ == "__main__":
    main()
