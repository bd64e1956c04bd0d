"""The configuration of the documentation site, which make docs builds.

Its source is the repository's own folder, so every page reads the same there, and a link from one page to another is
the path from one file to another.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

from docutils import nodes

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

project = PROJECT["name"]
copyright = f"{PROJECT['authors'][0]['name']}, {PROJECT['license']}"
release = version = PROJECT["version"]

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]  # napoleon reads Google-style docstrings
root_doc = "docs/index"
include_patterns = [
    "docs/**", "examples/notebooks/*.ipynb", "ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md",
    "gossip/CONTRACT.md",
]  # fmt: skip
exclude_patterns = [".*", "build", "dist", "data", "runs", "**/.ipynb_checkpoints"]

myst_heading_anchors = 4  # Headings get the anchors that they have on a repository's pages, so links are checked.
myst_links_external_new_tab = False
nb_execution_mode = "off"  # Show the output that make notebooks has saved.

# Adapters import these, and the documentation needs none of them.
autodoc_mock_imports = ["jax", "keras", "lightning", "opentelemetry", "transformers"]
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_class_signature = "mixed"
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 100
add_module_names = False

html_theme = "furo"
html_title = "gossip-trainer"
html_static_path = ["site"]
html_css_files = ["site.css"]
html_show_sphinx = False
html_copy_source = False
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#00639c", "color-brand-content": "#00639c"},
    "dark_css_variables": {"color-brand-primary": "#6cbcf0", "color-brand-content": "#6cbcf0"},
}
man_pages = [("docs/cli", "gossip", "train one model on many machines with nobody in charge", [], 1)]  # By make dist.
highlight_language = "text"  # a block that does not say what it is
pygments_style, pygments_dark_style = "friendly", "github-dark"


def without_links(app: Any, tree: nodes.document, _page: str) -> None:
    """Leave the words of links to other pages, which a manual page cannot follow."""
    for link in list(tree.findall(nodes.reference)) if app.builder.format == "man" else ():
        link.replace_self(link.children)


def front_door(app: Any, error: Exception | None) -> None:
    """The site's own address leads to the first page, which lies where its file does."""
    if error is None and app.builder.format == "html":
        first = "docs/index.html"
        text = f'<!doctype html><meta charset="utf-8"><title>{project}</title>'
        text += f'<meta http-equiv="refresh" content="0; url={first}"><a href="{first}">{project}</a>\n'
        (Path(app.outdir) / "index.html").write_text(text, encoding="utf-8")


def for_language_models(app: Any, error: Exception | None) -> None:
    """Write llms.txt, a list of all pages, and llms-full.txt, all of them in one (https://llmstxt.org)."""
    if error is not None or app.builder.format != "html":
        return
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    start = index.partition("\n\n")[2].partition("\n\n")[0].replace("\n", " ")
    heads, full = [f"# {project}\n\n> {start}\n"], []
    for caption, block in re.findall(r"```{toctree}\n:hidden:\n:caption: (.*?)\n\n(.*?)```", index, re.DOTALL):
        heads.append(f"\n## {caption}\n\n")
        for page in block.split():
            source = next((path for path in (ROOT / "docs").glob(f"{page}.*") if path.suffix == ".md"), None)
            if source is not None:
                text = source.read_text(encoding="utf-8")
                url = (Path("docs") / page).with_suffix(".html").as_posix().replace("docs/../", "")
                heads.append(f"- [{text.partition(chr(10))[0].removeprefix('# ')}]({url})\n")
                full.append(text)
    Path(app.outdir, "llms.txt").write_text("".join(heads), encoding="utf-8")
    Path(app.outdir, "llms-full.txt").write_text("\n\n".join(full), encoding="utf-8")


def setup(app: Any) -> None:
    app.connect("doctree-resolved", without_links)
    app.connect("build-finished", front_door)
    app.connect("build-finished", for_language_models)
