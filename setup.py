"""Parts of a build that pyproject.toml cannot express: the README's links, the manual page and the compiled passes.

GOSSIP_URL=https://HOST/OWNER/NAME names the place where this project is published. The README's pictures and links
then lead to the files of this version there. Without it pictures are left out, and a link to a file is its words alone.

Without a compiler or Python's headers the build leaves out the extension, and numpy computes the same results.
GOSSIP_KERNEL=numpy leaves it out as well, and makes a wheel for every machine.
"""

import os
import re
import tomllib
from pathlib import Path

from setuptools import Extension, setup

HERE = Path(__file__).parent
# Neither a product and a sum as one operation nor any other order: numpy's result, bit for bit.
AS_WRITTEN = ["-O3", "-ffp-contract=off", "-fno-fast-math"]
KERNEL = Extension(
    "gossip.kernel._passes", ["gossip/kernel/passes.c"], extra_compile_args=AS_WRITTEN, py_limited_api=True,
    optional=True,
)  # fmt: skip
LINK = re.compile(r"(!?)\[([^\]]*)\]\((?![a-z]+:|#)([^)\s]+)\)")  # what leads to a file beside this one


def long_description(readme: str, url: str, version: str) -> str:
    def lead(link: re.Match[str]) -> str:
        picture, words, path = link.groups()
        if url:
            return f"{picture}[{words}]({url}/{'raw' if picture else 'blob'}/v{version}/{path})"
        return "" if picture else words

    return LINK.sub(lead, readme)


if __name__ == "__main__":
    url = os.environ.get("GOSSIP_URL", "").rstrip("/")
    project = tomllib.loads((HERE / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    beneath = {"Source": "", "Changelog": f"/blob/v{project['version']}/CHANGELOG.md", "Issues": "/issues"}
    manual = Path("man/gossip.1")  # Made from docs/cli.md by make dist.
    setup(
        data_files=[("share/man/man1", [str(manual)])] if (HERE / manual).exists() else [],
        long_description=long_description((HERE / "README.md").read_text(encoding="utf-8"), url, project["version"]),
        long_description_content_type="text/markdown",
        ext_modules=[] if os.environ.get("GOSSIP_KERNEL") == "numpy" else [KERNEL],
        options={"bdist_wheel": {"py_limited_api": "cp311"}} if os.environ.get("GOSSIP_KERNEL") != "numpy" else {},
        project_urls={name: url + path for name, path in beneath.items()} if url else {},
    )
