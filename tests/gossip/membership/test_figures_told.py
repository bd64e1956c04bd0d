"""Extra figures in a record: signed soon, told as progress is, and dropped together with their run."""

from __future__ import annotations

import dataclasses

from gossip.wire.records import is_progress_only
from tests.gossip.membership.members import acquainted, member, record_of

TOLD = (b"figures",)


def test_figures_are_signed_as_soon_as_progress_that_is_off():
    me = acquainted(50, run_id=b"g" * 16)
    me.update_me(0.0, run_id=b"g" * 16)
    me.update_me(1.0, extra=TOLD)
    assert me.me.extra == ()  # 0.1 s for each of the 51 have not passed
    me.tick(5.2)
    assert me.me.extra == TOLD


def test_without_figures_nothing_is_due():
    me = acquainted(50, run_id=b"g" * 16)
    me.update_me(0.0, run_id=b"g" * 16)
    sequence = me.me.sequence
    me.update_me(1.0, steps=1)
    me.tick(5.2)
    assert me.me.sequence == sequence


def test_figures_go_with_their_run():
    me = member(run_id=b"g" * 16)
    me.update_me(100.0, extra=TOLD)
    assert me.me.extra == TOLD
    me.update_me(101.0, run_id=b"h" * 16)
    assert me.me.extra == ()
    me.update_me(300.0, extra=TOLD)
    me.update_me(301.0, run_id=b"h" * 16)
    assert me.me.extra == TOLD


def test_figures_are_mere_progress_and_fields_of_a_newer_version_are_news():
    before = record_of(1, extra=(b"figures", 1))
    for extra, mere in [((b"other", 1), True), ((b"figures", 2), False), ((b"figures",), False)]:
        assert is_progress_only(dataclasses.replace(before, extra=extra), before) is mere
    assert is_progress_only(dataclasses.replace(before, extra=TOLD), dataclasses.replace(before, extra=()))
