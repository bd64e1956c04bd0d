"""TCP's effect on a link: as slow as Linux was over emulated links, and no message lost or out of order."""

import csv
import math
import statistics
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.world.line import Line
from sim.world.tcp import ACK_FACTOR, PACKET_BYTES, SEGMENT_BYTES, Back, Transport, syn_again_s

MEASURED = Path(__file__).parents[3] / "benchmarks"
PING_MORE_S = 0.0004  # extra time of a ping over an emulated link, beyond twice the latency
DRAWS = 400  # samples of the model if packets are lost

RTT = 0.05
MBIT_20 = 20e6 / 8
KINDS = pytest.mark.parametrize("congestion", ["cubic", "bbr"])


def line(key=7, loss=0.0):
    return Line(key * 0x1234_5678_9ABC_DEF1, 0.0, loss)


def name(row):
    return f"{row.latency_ms:g}ms-{row.mbit_s:g}Mbit-{row.loss:g}-{row.congestion}-{row.bytes / 1e6:g}MB"


def measured():
    """Yield the rows of tcp_kernel.csv, measured over emulated links.

    These are two network namespaces, joined by TUN devices and a router in user space. The router limits the rate,
    with a tail-drop queue of 100 ms, delays packets, and drops a share at random. Seconds are from the first byte
    written to the last one read, over successive connections.
    """
    with (MEASURED / "tcp_kernel.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            numbers = {key: float(value) for key, value in row.items() if key != "congestion"}
            yield SimpleNamespace(congestion=row["congestion"], **numbers)


def modelled(row):
    """Return the model's seconds, sorted: one value, or DRAWS samples if packets are lost."""
    transport = Transport(row.congestion)
    rtt = 2e-3 * row.latency_ms + PING_MORE_S
    lines = [line(number, row.loss) for number in range(1, 1 + (DRAWS if row.loss else 1))]
    return sorted(transport.seconds(each, row.bytes, row.mbit_s * 1e6 / 8, rtt, 0.0) for each in lines)


ROWS = list(measured())


# -- beside the kernel's ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("row", [row for row in ROWS if not row.loss and row.bytes >= 1e6], ids=name)
def test_a_fresh_stream_takes_as_long_as_linux_took(row):
    """Within 10 %; at a latency of 1 ms, where the emulated link itself was 10 ms late now and then, within 20 %."""
    [seconds] = modelled(row)
    assert seconds == pytest.approx(row.median_s, rel=0.1 if row.latency_ms > 1 else 0.2)


@pytest.mark.parametrize("row", [row for row in ROWS if row.loss and row.bytes >= 1e6], ids=name)
def test_a_fresh_stream_over_a_lossy_link_takes_what_linux_took(row):
    """The model's median lies within a third of the range of the two to six measured runs.

    bbr varies little: its median lies within a fifth of theirs.
    """
    middle = statistics.median(modelled(row))
    assert row.low_s / 1.33 < middle < 1.33 * row.high_s
    if row.congestion == "bbr":
        assert middle == pytest.approx(row.median_s, rel=0.2)


@pytest.mark.parametrize("row", [row for row in ROWS if row.bytes < 1e6], ids=name)
def test_seventy_segments_take_a_round_more_or_less_than_linux_needed(row):
    """Seventy segments just fill three windows, so one segment decides about a round."""
    rtt = 2e-3 * row.latency_ms
    middle = statistics.median(modelled(row))
    assert row.low_s - rtt < middle < row.high_s + rtt


# -- windows ---------------------------------------------------------------------------------------------------------
def test_ten_segments_go_at_once():
    tcp = Transport()
    wire_bytes = 10 * PACKET_BYTES
    assert tcp.seconds(line(), 10 * SEGMENT_BYTES, MBIT_20, RTT, 0.0) == pytest.approx(RTT / 2 + wire_bytes / MBIT_20)
    assert tcp.seconds(line(), 11 * SEGMENT_BYTES, MBIT_20, RTT, 0.0) > 1.5 * RTT


def test_without_a_round_trip_a_stream_takes_what_its_packets_take():
    tcp = Transport()
    assert tcp.stream(line(), 1448e3, 1e6, 0.0, 0.0) == (1.5e6, math.inf, 0.0)


@KINDS
def test_what_comes_the_other_way_costs_its_acknowledgements(congestion):
    backs = None, Back(line(), MBIT_20)
    one, both = (Transport(congestion).stream(line(), 1e7, MBIT_20, RTT, 0.0, back) for back in backs)
    assert both.wire_bytes == pytest.approx(one.wire_bytes * ACK_FACTOR)


def test_bbr_keeps_its_window_while_it_idles_and_cubic_does_not():
    seconds = {}
    for congestion in ("cubic", "bbr"):
        tcp, one = Transport(congestion), line()
        one.until_probe_s = 9.0  # longer in use than these three streams take
        first = tcp.seconds(one, 1e6, MBIT_20, RTT, 0.0)
        soon = tcp.seconds(one, 1e6, MBIT_20, RTT, one.used_at)
        late = tcp.seconds(one, 1e6, MBIT_20, RTT, one.used_at + 60.0)
        seconds[congestion] = first, soon, late
    assert seconds["bbr"][1] == seconds["bbr"][2] < seconds["bbr"][0]
    assert seconds["cubic"][1] < seconds["cubic"][2] == seconds["cubic"][0]


def test_under_loss_a_long_stream_of_cubic_runs_at_mathis_rate_and_one_of_bbr_hardly_slower():
    mathis = SEGMENT_BYTES / RTT * math.sqrt(1.5 / 0.01)
    rates = {}
    for congestion in ("cubic", "bbr"):
        tcp = Transport(congestion)
        rates[congestion] = 1e8 / tcp.seconds(line(loss=0.01), 1e8, 12.5e6, RTT, 0.0)
    assert rates["cubic"] == pytest.approx(mathis, rel=0.15)
    assert rates["bbr"] > 0.9 * 12.5e6 * SEGMENT_BYTES / PACKET_BYTES


def test_bbr_stops_for_a_fifth_of_a_second_every_ten_seconds_of_use():
    tcp, one = Transport("bbr"), line()
    streams = [tcp.stream(one, 1e6, MBIT_20, RTT, 2.0 * number) for number in range(400)]
    probed = [each.delay_s for each in streams[1:] if each.delay_s > 0.15]
    used_s = sum(each.wire_bytes for each in streams) / MBIT_20
    assert len(probed) == pytest.approx(used_s / 10.0, abs=1.5)
    assert all(0.2 <= delay < 0.21 for delay in probed)


# -- loss ------------------------------------------------------------------------------------------------------------
@KINDS
def test_a_lost_message_is_late_and_the_share_that_is_late_is_the_loss(congestion):
    tcp, one = Transport(congestion), line(loss=0.05)
    late = [tcp.late_s(one, RTT) for _ in range(20_000)]
    share = sum(each > 0 for each in late) / len(late)
    assert abs(share - 0.05) < 5 * math.sqrt(0.05 * 0.95 / len(late))
    # A retransmission comes after a round trip and 200 ms, the next one twice as long after that, and so on.
    assert {round(each, 9) for each in late} <= {round((2**times - 1) * 0.25, 9) for times in range(8)}
    again = sum(each > 0.3 for each in late) / sum(each > 0 for each in late)
    assert again == pytest.approx(0.05, abs=0.04)


@KINDS
@given(st.floats(0.001, 0.9), st.integers(1, 2**64 - 1), st.floats(1, 1e9), st.floats(1e3, 1e10), st.floats(0, 1))
def test_whatever_the_loss_everything_arrives(congestion, loss, key, size, rate, rtt):
    tcp, one = Transport(congestion), Line(key, 0.0, loss)
    assert 0 <= tcp.late_s(one, rtt) < math.inf
    passage = tcp.stream(one, size, rate, rtt, 1.0, Back(Line(key + 1, 0.0, loss), rate))
    assert passage.ceiling_bytes_s > 0
    assert -1e-6 * size / rate <= passage.delay_s < math.inf
    assert one.window > 0


@pytest.mark.parametrize("size", [330_000, 1_000_000])
def test_lossy_cubics_first_stream_takes_what_linux_took(size):
    """Forty streams to new addresses at 25 ms, 20 Mbit/s and 1 % loss: median and mean are within 15 %.

    Before, they took a third too long: slow start goes on in the round in which a packet is lost.
    """
    with (MEASURED / "tcp_strangers.csv").open(newline="") as file:
        took = [float(row["seconds"]) for row in csv.DictReader(file) if int(row["bytes"]) == size]
    lines = [line(number, 0.01) for number in range(1, 1001)]
    seconds = [Transport("cubic").seconds(each, size, MBIT_20, 0.0504, 0.0) for each in lines]
    assert statistics.median(seconds) == pytest.approx(statistics.median(took), rel=0.15)
    assert statistics.mean(seconds) == pytest.approx(statistics.mean(took), rel=0.15)


def test_a_dial_knocks_again_as_linux_does():
    """SYNs into a cut went out after 1.02, 2.04, 3.07, 4.09, 5.11, 7.13 and 11.3 s (Linux 6.18, medians of three)."""
    assert [syn_again_s(tries) for tries in range(6)] == pytest.approx([1.02, 2.04, 3.07, 4.09, 5.11, 7.13], abs=0.015)
    assert syn_again_s(6) == pytest.approx(11.3, abs=0.1)
