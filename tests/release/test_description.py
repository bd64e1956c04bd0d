"""README.md as the description of a package, without the repository's files, and facts stated in two places."""

import importlib.util
import re
import tomllib

import pytest

from tests.release.environments import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
AWAY = re.compile(r"\]\((?!https://)[^)]*\)")


@pytest.fixture(scope="module")
def long_description():
    spec = importlib.util.spec_from_file_location("setup_of_gossip_trainer", ROOT / "setup.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.long_description


def test_pictures_and_links_lead_to_where_the_project_is_published(long_description):
    text = long_description(README, "https://host.invalid/us/gossip-trainer", "0.1.0")
    at = "https://host.invalid/us/gossip-trainer"
    assert f"]({at}/raw/v0.1.0/docs/pictures/run.svg)" in text
    assert f"[docs/cli.md]({at}/blob/v0.1.0/docs/cli.md)" in text
    assert not AWAY.findall(text)


def test_without_a_place_of_publication_nothing_is_broken_and_no_host_is_invented(long_description):
    text = long_description(README, "", "0.1.0")
    assert "![" not in text
    assert not AWAY.findall(text)
    assert "docs/cli.md" in text
    assert "https://" not in text.replace("https://", "", README.count("https://"))


def test_pages_of_others_and_places_on_the_same_page_are_left_alone(long_description):
    for text in ("[a](https://host.invalid/b)", "[a](#b)", "[a](mailto:b@host.invalid)", "a[0](x, y) is code"):
        assert long_description(text, "https://host.invalid", "1") == text


def test_the_citation_names_this_version_and_licence():
    citation = dict(re.findall(r"^([\w-]+): (.+)$", (ROOT / "CITATION.cff").read_text(encoding="utf-8"), re.MULTILINE))
    assert citation["title"] == PROJECT["name"]
    assert citation["version"] == PROJECT["version"]
    assert citation["license"] in PROJECT["license"]


def test_the_pages_that_an_issue_template_names_exist():
    templates = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
    assert len(templates) == 4
    for template in templates:
        for path in re.findall(r"\b[\w/]+\.md\b", template.read_text(encoding="utf-8")):
            assert (ROOT / path).exists(), f"{template.name} names {path}"
