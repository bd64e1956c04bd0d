"""Fresh environments for a wheel.

They link to this environment's torch and its dependencies, which are gigabytes on some machines and are not under test.
Everything else is installed as a user installs it.
"""

import os
import re
import subprocess
import sys
from importlib.metadata import Distribution, distribution
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LENT = "torch"
TIMEOUT_S = 1_500.0  # The timeout of pip and of the demo, long enough for a busy machine.


def closure(name: str, found: dict[str, Distribution] | None = None) -> dict[str, Distribution]:
    """Return a distribution and all of its installed requirements, by name."""
    found = {} if found is None else found
    if name not in found:
        found[name] = distribution(name)
        for requirement in found[name].requires or ():
            needed, _, marker = requirement.partition(";")
            if not marker:  # Requirements with a marker are for other systems or for extras.
                closure(re.split(r"[^\w.-]", needed.strip(), maxsplit=1)[0], found)
    return found


def lend(folder: Path) -> None:
    """Fill a folder with links to torch and its requirements."""
    folder.mkdir()
    for one in closure(LENT).values():
        for top in {file.parts[0] for file in one.files or () if file.parts[0] not in ("..", "__pycache__")}:
            if not (folder / top).is_symlink():
                (folder / top).symlink_to(Path(str(one.locate_file(top))).resolve())


class Environment:
    """A new environment in ``folder`` with a wheel, and with extras if given ("page,sim").

    ``run`` runs its programs in a folder outside this repository.
    """

    def __init__(self, folder: Path, wheel: Path, extras: str = "") -> None:
        self.folder, self.work = folder / "environment", folder / "work"
        self.work.mkdir(parents=True)
        subprocess.run([sys.executable, "-m", "venv", str(self.folder)], check=True, timeout=TIMEOUT_S)
        (packages,) = self.folder.glob("lib/python*/site-packages")
        lend(folder / "lent")
        (packages / "lent.pth").write_text(f"{folder / 'lent'}\n")
        wanted = f"{wheel}[{extras}]" if extras else str(wheel)
        quiet = "--quiet", "--disable-pip-version-check"
        done = self.run("python", "-m", "pip", "install", *quiet, "-c", str(ROOT / "constraints.txt"), wanted)
        assert done.returncode == 0, done.stderr

    def run(self, program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        plain = {name: value for name, value in os.environ.items() if not name.startswith(("GOSSIP_", "PYTHON"))}
        command = [str(self.folder / "bin" / program), *arguments]
        return subprocess.run(
            command, cwd=self.work, env=plain, check=False, capture_output=True, text=True, timeout=TIMEOUT_S
        )
