"""cubic where only queues lose packets: exchanges take what they took over Linux, and why."""

import csv
import math
import random
import statistics
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.world.cubic import LOSS_FACTOR, note_loss, send_together, shrink_idle
from sim.world.line import FIRST_SEGMENTS, Line
from sim.world.tcp import Back, Transport

MEASURED = Path(__file__).parents[3] / "benchmarks" / "tcp_exchanges.csv"
REST_S = 1.2, 3.6  # the rests of benchmarks/links.py
RTT, MBIT_20 = 0.0504, 20e6 / 8
PACKETS = 1640.0  # packets a second of 20 Mbit/s, next to the other stream's acknowledgements
SEGMENTS = 690.0  # segments of 1 MB


def measured():
    """Return the seconds of each exchange, by latency, rate, loss, congestion control and size."""
    found = {}
    with MEASURED.open(newline="") as file:
        for row in csv.DictReader(file):
            key = (float(row["latency_ms"]), float(row["mbit_s"]), float(row["loss"]), row["congestion"])
            found.setdefault((*key, int(row["bytes"])), []).append(float(row["seconds"]))
    return found


def modelled(latency_ms, mbit_s, loss, congestion, size, count, seed=1):
    """Play exchanges as benchmarks/links.py measured them: one connection, a random asker, a rest after each."""
    rng, tcp = random.Random(seed), Transport(congestion)
    lines = [Line(key * 0x1234_5678_9ABC_DEF1 * seed, 0.0, loss) for key in (3, 5)]
    now, rtt, rate, found = 0.0, 2e-3 * latency_ms + 0.0004, mbit_s * 1e6 / 8, []
    for _ in range(count):
        asker, asked = rng.sample(lines, 2)
        answer = tcp.seconds(asked, size, rate, rtt, now, Back(asker, rate))
        ask = tcp.seconds(asker, size, rate, rtt, now + rtt / 2, Back(asked, rate))
        found.append(max(answer, ask + rtt / 2))
        now += found[-1] + rng.uniform(*REST_S)
    return found


ROWS = [pytest.param(*key, took, id="-".join(map(str, key))) for key, took in measured().items()]


@pytest.mark.parametrize(("latency_ms", "mbit_s", "loss", "congestion", "size", "took"), ROWS)
def test_exchanges_over_one_connection_take_what_linux_took(latency_ms, mbit_s, loss, congestion, size, took):
    """The median of all but the first is within 10 %; cubic's first is within 20 %.

    At 100 Mbit/s cubic's median is within 20 %, since it left slow start sooner on the machine that measured. With lost
    packets it is within 20 % too, with two dozen draws.
    """
    runs = [modelled(latency_ms, mbit_s, loss, congestion, size, len(took), seed) for seed in range(1, 6)]
    later = statistics.median(each for run in runs for each in run[1:])
    fast = congestion == "cubic" and mbit_s >= 100
    assert later == pytest.approx(statistics.median(took[1:]), rel=0.2 if loss or fast else 0.1)
    if congestion == "cubic" and not loss:
        assert statistics.median(run[0] for run in runs) == pytest.approx(took[0], rel=0.2)


def test_exchanges_become_shorter_as_the_smaller_window_grows():
    """On Linux the first took 0.77 s, the twentieth 0.69 s."""
    runs = [modelled(25, 20, 0.0, "cubic", 1e6, 24, seed) for seed in range(1, 6)]
    first, last = (statistics.median(run[place] for run in runs) for place in (0, -1))
    assert 0.05 < first - last < 0.12


@pytest.mark.parametrize(
    ("congestion", "mbit_s", "size", "first_ms", "later_ms"),
    [
        ("cubic", 20, 1e6, 14.0, 21.0), ("bbr", 20, 1e6, 10.0, 20.0), ("bbr", 10, 1e6, None, 36.0),
        ("cubic", 2, 1e5, None, 60.0), ("bbr", 2, 1e5, None, 46.0),
    ],
)  # fmt: skip
def test_packets_beside_an_exchange_find_the_queue_that_they_found_over_linux(
    congestion, mbit_s, size, first_ms, later_ms
):
    """Datagrams go to a third node from one end of a dozen exchanges, at 25 ms.

    Their mean extra delay is within a third, and that of the first within 10 ms where it is known.
    """
    rng, tcp, waits_ms, rate = random.Random(1), Transport(congestion), [], mbit_s * 125_000
    lines, now = [Line(key * 0x1234_5678_9ABC_DEF1, 0.0) for key in (3, 5)], 0.0
    for _ in range(12):
        asker, asked = rng.sample(lines, 2)
        tcp.stream(asked, size, rate, RTT, now, Back(asker, rate))
        tcp.stream(asker, size, rate, RTT, now + RTT / 2, Back(asked, rate))
        waits_ms.append(1e3 * lines[0].queue_delay_s)
        now += 1.6
    if first_ms is not None:
        assert waits_ms[0] == pytest.approx(first_ms, abs=10)
    assert statistics.mean(waits_ms[1:]) == pytest.approx(later_ms, rel=0.33)


# -- two windows -----------------------------------------------------------------------------------------------------
def settled(window):
    """Return a line that has left slow start."""
    line = Line(1, 0.0)
    line.window = line.threshold = window
    return line


def test_the_smaller_window_has_its_share_of_the_rate_until_the_larger_ones_stream_ends():
    """Both have the rounds of the larger one, of 200 segments; the smaller one sends half as many."""
    larger, smaller = send_together([settled(200.0), settled(100.0)], SEGMENTS, [PACKETS, PACKETS], RTT, 0.1)
    alone = send_together([settled(200.0)], SEGMENTS, [PACKETS], RTT, 0.1)[0]
    assert alone == pytest.approx(SEGMENTS / PACKETS)
    assert 1.05 * alone < larger < 1.2 * alone
    assert 1.5 * alone < smaller < 1.8 * alone


def test_a_window_that_the_queue_cannot_hold_overflows_it():
    most = PACKETS * (RTT + 0.1)
    below, above = settled(0.95 * most), settled(1.05 * most)
    send_together([below], 2 * SEGMENTS, [PACKETS], RTT, 0.1)
    send_together([above], 1.1 * above.window, [PACKETS], RTT, 0.1)
    assert below.peak == 0.0 or below.peak > most
    assert above.peak == pytest.approx(1.05 * most)
    assert above.window == above.threshold == pytest.approx(LOSS_FACTOR * above.peak)


def test_after_a_loss_a_window_comes_back_to_its_peak_on_cubics_curve():
    """RFC 9438, equation 2: after the third root of 0.3 peaks over 0.4, in seconds of sending."""
    line = settled(200.0)
    note_loss(line)
    back_s = (0.3 * 200.0 / 0.4) ** (1 / 3)
    rtt = 0.2  # long enough for Reno to be slower
    count = int(back_s / rtt)
    for _ in range(count):
        send_together([line], line.window + 0.5, [1e6], rtt, 0.1)
    assert line.window == pytest.approx(200.0, rel=0.02)


def test_a_rested_window_is_halved_each_timeout_and_remembered_by_the_threshold():
    line = settled(200.0)
    line.threshold = 120.0
    shrink_idle(line, 2)
    assert (line.window, line.threshold) == (50.0, 150.0)
    shrink_idle(line, 9)
    assert line.window == FIRST_SEGMENTS


def test_the_second_of_two_streams_takes_what_the_first_found_and_windows_grow_once():
    tcp, one, other = Transport("cubic"), Line(1, 0.0), Line(2, 0.0)
    tcp.stream(one, 1e6, MBIT_20, RTT, 1.0, Back(other, MBIT_20))
    windows = one.window, other.window
    behind = tcp.stream(other, 1e6, MBIT_20, RTT, 1.0 + RTT / 2, Back(one, MBIT_20))
    assert (one.window, other.window) == windows
    assert behind.delay_s > tcp.stream(Line(3, 0.0), 1e6, MBIT_20, RTT, 1.0).delay_s
    # A stream that comes much later meets no other.
    tcp.stream(one, 1e6, MBIT_20, RTT, 10.0, Back(other, MBIT_20))
    windows = one.window, other.window
    tcp.stream(other, 1e6, MBIT_20, RTT, 20.0)
    assert other.window != windows[1]
    assert other.prediction is None


@given(
    st.lists(st.floats(2.0, 1e5), min_size=1, max_size=2), st.floats(1, 1e6), st.floats(1e-4, 1), st.floats(1, 1e6),
    st.floats(0, 1),
)  # fmt: skip
def test_no_stream_is_faster_than_its_rate_and_each_ends(windows, segments, rtt, rate, queue_s):
    lines = [settled(window) for window in windows]
    for took_s in send_together(lines, segments, [rate] * len(lines), rtt, queue_s):
        assert segments / rate * (1 - 1e-9) <= took_s < math.inf
    assert all(2.0 <= line.window < math.inf for line in lines)
