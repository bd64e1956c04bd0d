"""The traces next to this file match the protocol, so that a change of the protocol shows in their diff."""

from difflib import unified_diff

import pytest

from tests.traces.paths import HERE, PATHS, played


@pytest.mark.parametrize("name", PATHS)
def test_a_path_is_played_as_its_trace_tells(name: str) -> None:
    path = HERE / f"{name}.txt"
    told, now = (path.read_text(encoding="utf-8") if path.exists() else ""), played(name)
    if told != now:
        diff = list(
            unified_diff(told.splitlines(), now.splitlines(), f"tests/traces/{name}.txt", "played", "", "", 1, "")
        )
        more = [f"... and {len(diff) - 30} lines more"] if len(diff) > 30 else []
        meant = "If this is meant, write the traces anew: python -m tests.traces. Then read what changed: git diff."
        pytest.fail("\n".join([meant, *diff[:30], *more]), pytrace=False)


def test_no_trace_is_left_of_a_path_that_nobody_plays() -> None:
    assert {path.stem for path in HERE.glob("*.txt")} == PATHS.keys()
