"""Stalls of a training loop alone, and of the whole process."""

from types import SimpleNamespace

from node.observe.stalls import STALL_AFTER_S, Stalls


def stalls():
    """Return a Stalls, its peer, and its notices as kinds and sentences."""
    view, joining = SimpleNamespace(boundary_at=0.0, ready=True), SimpleNamespace(missing_elements=0, is_starved=False)
    peer, said = SimpleNamespace(view=view, joining=joining), []
    one = Stalls(
        peer, lambda: True, lambda event: said.append((event.kind, str(event))), lambda *notice: said.append(notice)
    )
    return one, peer, said


def test_a_process_that_stood_still_does_not_blame_its_loop():
    one, peer, said = stalls()
    for now in (1.0, 2.25):
        peer.view.boundary_at = now
        one.check(now)
    one.check(62.25)  # Stopped for a minute; the loop has had no time since.
    one.check(63.5)
    assert [kind for kind, _ in said] == ["asleep"]
    assert "stood still for 60 s" in said[0][1]
    peer.view.boundary_at = 63.6
    one.check(64.75)
    assert len(said) == 1, "and nothing is taken back"


def test_a_loop_that_stands_after_its_process_woke_is_told_from_then_on():
    one, _, said = stalls()
    one.check(1.0)
    one.check(61.0)
    for look in range(1, 6):
        one.check(61.0 + look * STALL_AFTER_S / 4)
    assert [kind for kind, _ in said] == ["asleep", "stalled"]
    assert "no step boundary for 5 s" in said[1][1]
