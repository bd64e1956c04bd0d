"""Several simulated connections of one link: opened where nodes open them, and as fast as measured ones."""

import math
import statistics

import pytest

from sim.world import striping
from sim.world.line import Line
from sim.world.tcp import Transport

RTT, MBIT_20, MBIT_100 = 0.05, 2.5e6, 12.5e6
MB = 1.03e6  # bytes of 1 MB of weights, with frames


def lossy(seed=1, loss=0.01):
    return Line(seed * 0x9E37_79B9_7F4A_7C15 & (2**64 - 1), 0.0, loss)


def exchanges(size, rate, connections, seeds=11, count=20):
    """Return the seconds of pairs of streams, both ways at once, with rests between them."""
    tcp, found = Transport("cubic", connections=connections), []
    for seed in range(1, seeds + 1):
        ends, now = [lossy(2 * seed), lossy(2 * seed + 1)], 0.0
        for end in ends:
            end.striped_from, end.connections = 0.0, connections
        for _ in range(count):
            found.append(max(tcp.seconds(end, size, rate, RTT, now) for end in ends))
            now += found[-1] + 1.5
    return statistics.median(found)


def test_a_link_is_wide_once_it_has_sent_enough_and_a_round_trip_or_three_later():
    tcp, line, now = Transport("cubic", connections=8), lossy(), 0.0
    line.back = lossy(2)
    while line.striped_from == math.inf:
        assert striping.lines_for(line, now) == (line,)
        now += tcp.seconds(line, MB, MBIT_20, RTT, now) + 1.0
        assert now < 60.0
    assert line.sent_segments >= 1_000
    assert line.sending_s >= striping.SENDING_S
    assert line.back.striped_from == line.striped_from, "a connection is one both ways"
    assert len(striping.lines_for(line, line.striped_from)) == 8
    assert len({each.key for each in striping.lines_for(line, line.striped_from)}) == 8


@pytest.mark.parametrize(("congestion", "loss", "connections", "rtt"), [
    ("bbr", 0.01, 8, RTT), ("cubic", 0.001, 8, RTT), ("cubic", 0.01, 1, RTT), ("cubic", 0.01, 8, 0.002),
    ("cubic", 0.0, 8, RTT),
])  # fmt: skip
def test_no_link_is_wide_where_nodes_open_none(congestion, loss, connections, rtt):
    tcp, line, now = Transport(congestion, connections=connections), lossy(loss=loss), 0.0
    for _ in range(30):
        now += tcp.seconds(line, MB, MBIT_20, rtt, now) + 1.0
    assert line.striped_from == math.inf
    assert line.more_lines == []


def test_eight_connections_carry_what_one_does_in_a_fifth_of_the_time_and_no_more_than_the_rate():
    one, eight = (exchanges(10 * MB, MBIT_100, connections) for connections in (1, 8))
    assert 5 < one / eight < 8
    assert exchanges(MB, 1e5, 8) >= MB / 1e5
