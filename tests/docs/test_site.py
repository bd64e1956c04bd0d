"""The site that make docs built: every internal link leads to a page that exists, and to an anchor on it."""

import functools
import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

pytestmark = pytest.mark.built

SITE = Path(__file__).resolve().parents[2] / "build" / "site"
MADE_BY_SCRIPTS = {"search.html", "genindex.html"}


class Page(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.places: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        for name, value in attributes:
            if name in ("href", "src") and value:
                self.links.append(value)
            elif name == "id" and value:
                self.places.add(value)


@functools.cache
def page(path: Path) -> Page:
    return Page(path.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def pages():
    found = [path for path in SITE.rglob("*.html") if path.name not in MADE_BY_SCRIPTS]
    assert len(found) > 80, "make docs builds the site"
    return found


def test_every_link_to_the_site_itself_leads_somewhere(pages):
    broken, checked = [], 0
    for source in pages:
        for link in page(source).links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue  # Another site's page, or a data: URL.
            checked += 1
            target = (source.parent / unquote(parts.path)).resolve() if parts.path else source
            if target.is_dir():
                target /= "index.html"
            there = target.exists() and (
                not parts.fragment
                or target.suffix != ".html"
                or target.name in MADE_BY_SCRIPTS
                or unquote(parts.fragment) in page(target).places
            )
            if not there:
                broken.append(f"{source.relative_to(SITE)}: {link}")
    assert checked > 5_000
    assert not broken, "\n".join(broken)


def test_the_site_needs_nothing_of_others_to_be_read(pages):
    for source in pages:
        text = source.read_text(encoding="utf-8")
        for marker in ('<script src="http', '<link rel="stylesheet" type="text/css" href="http', "@import url(http"):
            assert marker not in text, source


def test_the_sites_own_address_leads_to_the_first_page():
    assert 'url=docs/index.html"' in (SITE / "index.html").read_text(encoding="utf-8")


def test_the_api_is_there_with_its_docstrings():
    text = (SITE / "docs" / "api.html").read_text(encoding="utf-8")
    for name in (
        "gossip.Node",
        "gossip.Node.step",
        "gossip.Config.published",
        "node.local.LocalSwarm.kill",
        "gossip.simulate",
    ):
        assert f'id="{name}"' in text, name
    assert "never waits for the network" in text


def test_language_models_find_every_page_listed_and_all_text_in_one_file(pages):
    listed = re.findall(r"^- \[.+\]\((.+)\)$", (SITE / "llms.txt").read_text(encoding="utf-8"), re.MULTILINE)
    assert len(listed) > 25
    assert all((SITE / page).is_file() for page in listed)
    assert "with Node(model, optimizer) as node:" in (SITE / "llms-full.txt").read_text(encoding="utf-8")
