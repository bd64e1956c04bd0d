"""``python -m tests.traces``: play every path, and write its trace."""

from tests.traces.paths import HERE, PATHS, played

for name in PATHS:
    (HERE / f"{name}.txt").write_text(played(name), encoding="utf-8")
