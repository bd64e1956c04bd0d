"""Peers come and go as their distributions or their trace say, each by its own name."""

import itertools
import math

import numpy as np
import pytest

from gossip.errors import ConfigError, DataError
from sim.scenario.scenario import ChurnSpec
from sim.world.churn import Uptime, churn_of

SPOT = ChurnSpec.of("spot_v100_2023_02")
HOUR = 3600.0


def first(spec, count, name="a", *, seed=1, index=0):
    return list(itertools.islice(churn_of(spec, seed, 10).sessions(name, index), count))


def test_without_churn_everybody_stays_and_without_a_time_down_nobody_comes_back():
    assert first(None, 9) == [Uptime(0.0, math.inf, False)]
    assert len(first(ChurnSpec.of("volunteer_ipfs"), 9)) == 1


@pytest.mark.parametrize("start", ["together", "steady"])
def test_sessions_follow_each_other_in_time(start):
    for name in map(str, range(50)):
        sessions = first(ChurnSpec.of("spot_v100_2023_02", start=start), 20, name)
        times = [time for session in sessions for time in session[:2]]
        assert all(earlier < later for earlier, later in itertools.pairwise(times))
        assert start == "steady" or times[0] == 0


def test_only_names_and_seeds_tell_peers_apart():
    assert first(SPOT, 9, index=1) == first(SPOT, 9, index=7)
    assert first(SPOT, 9) != first(SPOT, 9, name="b")
    assert first(SPOT, 9) != first(SPOT, 9, seed=2)


def test_a_steady_swarm_is_as_large_at_the_start_as_later():
    spec = ChurnSpec.of("spot_v100_2023_02", start="steady")
    peers, looks = 4_000, [0.0, 0.2 * HOUR, HOUR, 5 * HOUR]
    up = np.zeros((peers, len(looks)))
    for peer in range(peers):
        for session in first_until(spec, str(peer), looks[-1]):
            up[peer] += [session.from_s <= look < session.until_s for look in looks]
    assert spec.up is not None
    assert spec.down is not None
    share = spec.up.mean / (spec.up.mean + spec.down.mean)
    error = math.sqrt(share * (1 - share) / peers)
    assert (abs(up.mean(axis=0) - share) < 4 * error).all()
    # Started together, the swarm of these long-tailed sessions is far from it after an hour.
    together = [any(s.from_s <= HOUR < s.until_s for s in first_until(SPOT, str(peer), HOUR)) for peer in range(1_000)]
    assert abs(np.mean(together) - share) > 0.02


def first_until(spec, name, until_s):
    return itertools.takewhile(lambda session: session.from_s <= until_s, churn_of(spec, 1, 1).sessions(name, 0))


def test_the_stated_share_says_goodbye():
    farewells = [s.farewell for s in first(ChurnSpec(up=1, down=1, farewell=0.3), 5_000)]
    assert abs(np.mean(farewells) - 0.3) < 5 * math.sqrt(0.3 * 0.7 / 5_000)
    assert not any(session.farewell for session in first(SPOT, 50))


# -- traces ----------------------------------------------------------------------------------------------------------
def traced(tmp_path, text, **changes):
    path = tmp_path / "sessions.csv"
    path.write_text(text)
    return churn_of(ChurnSpec(trace=str(path), **changes), 1, 3)


def test_a_trace_is_followed(tmp_path):
    churn = traced(tmp_path, "from_s,peer,until_s\n20,0,30.5\n0,0,10\n5,2,\n")
    assert list(churn.sessions("x", 0)) == [Uptime(0, 10, False), Uptime(20, 30.5, False)]
    assert list(churn.sessions("y", 1)) == []
    assert list(churn.sessions("z", 2)) == [Uptime(5, math.inf, False)]
    leaving = traced(tmp_path, "peer,from_s,until_s\n0,0,9\n0,10,inf\n", farewell=1)
    assert [session.farewell for session in leaving.sessions("x", 0)] == [True, False]


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ("peer,from_s\n0,1\n", "has no column until_s"),
        ("", "has no column peer"),
        ("peer,from_s,until_s\n0,1,2\nx,1,2\n", "line 3: each line must give a peer's number"),
        ("peer,from_s,until_s\n0,1\n", "line 2: each line must give"),  # a line cut short, perhaps of a broken file
        ("peer,from_s,until_s\n0,0,5,9\n", "line 2: each line must give"),  # a decimal comma
        (f"peer,from_s,until_s\n0,{1:0200000},2\n", "line 2: field larger than field limit"),
        ("peer,from_s,until_s\n3,1,2\n", r"line 2: there is no peer 3: peers = 3"),
        ("peer,from_s,until_s\n0,2,1\n", "line 2: until_s must be above from_s"),
        ("peer,from_s,until_s\n0,nan,1\n", "line 2: until_s must be above from_s"),
        ("peer,from_s,until_s\n0,0,5\n1,0,9\n0,4,6\n", "line 4: peer 0 comes at 4 s and is still up from line 2"),
        ("peer,from_s,until_s\n0,0,5\n0,5,9\n", "line 3: peer 0 comes at 5 s and is still up from line 2"),
    ],
)
def test_a_trace_that_cannot_be_is_refused_by_its_line(tmp_path, rows, words):
    with pytest.raises(ConfigError, match=words):
        traced(tmp_path, rows)


def test_machines_of_a_trace_lose_their_power_as_often_as_the_scenario_says(tmp_path):
    rows = "peer,from_s,until_s\n" + "".join(f"0,{10 * number},{10 * number + 9}\n" for number in range(200))
    silent = traced(tmp_path, rows, silent=0.5)
    assert 60 < sum(uptime.silent for uptime in silent.sessions("a", 0)) < 140
    assert not any(uptime.silent for uptime in traced(tmp_path, rows).sessions("a", 0))


def test_an_absent_trace_is_named(tmp_path):
    said = r"churn.trace: cannot read .*absent.csv .No such file.*name a CSV file of peer"
    with pytest.raises(DataError, match=said):
        churn_of(ChurnSpec(trace=str(tmp_path / "absent.csv")), 1, 3)
