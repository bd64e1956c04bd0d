"""Scripts that stand in for training: they write the log that a node would write, through the same Progress."""

import textwrap
from pathlib import Path

# One pretended node: listens, logs a few rows, and ends with a JSON line.
PRETENDED = """
    import json, os, socket, sys, time
    from node import running
    from node.observe.console import Console
    from node.observe.figures import Reading

    running.note_made()
    host, port = os.environ["GOSSIP_LISTEN"].split(":")
    try:
        server = socket.create_server((host, int(port)))
    except OSError:
        print("gossip: Cannot listen on this port.", file=sys.stderr)
        sys.exit(3)
    seeds = os.environ.get("GOSSIP_SEEDS")
    progress = Console.from_environment(0.0, "ab" * 16, f"127.0.0.1:{server.getsockname()[1]}", os.environ)

    def figures(step, swarm_samples):
        return Reading(
            steps=step, samples=16 * step, swarm_samples=swarm_samples, loss=1 / (1 + step), members_alive=2,
            exchanges_done=step, exchanges_failed=0, exchange_seconds=0.01, bytes_sent=1000 * step, bytes_received=0,
            partner=None, alone=False,
        )
"""


def script_of(folder: Path, text: str, name: str = "train.py") -> Path:
    path = folder / name
    path.write_text(textwrap.dedent(text))
    return path


def pretended(folder: Path, text: str) -> Path:
    return script_of(folder, textwrap.dedent(PRETENDED) + textwrap.dedent(text))
