"""A table that compares the TCP model of sim/world/tcp.py with Linux: python benchmarks/tcp_model.py

tcp_kernel.csv was measured over emulated links: two network namespaces, joined by TUN devices and a router in user
space. The router limits the rate (with a tail-drop queue of 100 ms), delays packets by the latency, and drops a share
at random. Successive connections sent 0.1, 1 or 10 MB from one namespace to the other. Seconds are from the first byte
written to the last one read. Pings took 0.4 ms longer than twice the latency, which the model adds here. Figures are
medians, with the minimum and maximum of the runs.
"""

from __future__ import annotations

import csv
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from sim.world.line import Line
from sim.world.tcp import Transport

HERE = Path(__file__).parent
PING_MORE_S = 0.0004
DRAWS = 400  # samples of the model if packets are lost


class Row(NamedTuple):
    latency_ms: float
    mbit_s: float
    loss: float
    congestion: str
    bytes: int
    median_s: float
    low_s: float
    high_s: float
    runs: int


def measured() -> Iterator[Row]:
    with (HERE / "tcp_kernel.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            numbers = (float(row["latency_ms"]), float(row["mbit_s"]), float(row["loss"]))
            seconds = (float(row["median_s"]), float(row["low_s"]), float(row["high_s"]))
            yield Row(*numbers, row["congestion"], int(row["bytes"]), *seconds, int(row["runs"]))


def modelled(row: Row) -> list[float]:
    """Return the model's seconds, sorted: one value, or DRAWS samples if packets are lost."""
    transport = Transport(row.congestion)  # type: ignore[arg-type]
    rtt = 2e-3 * row.latency_ms + PING_MORE_S
    count = DRAWS if row.loss else 1
    lines = [Line(0x1234_5678_9ABC_DEF1 * (number + 1), 0.0, row.loss) for number in range(count)]
    return sorted(transport.seconds(line, row.bytes, row.mbit_s * 1e6 / 8, rtt, 0.0) for line in lines)


def main() -> None:
    print("| one way | Mbit/s | loss | | MB | measured, s | modelled, s | |")
    print("|---|---|---|---|---|---|---|---|")
    for row in measured():
        seconds = modelled(row)
        median_s = statistics.median(seconds)
        spread = f" ({seconds[len(seconds) // 20]:.3g} to {seconds[-len(seconds) // 20]:.3g})" if row.loss else ""
        link = f"{row.latency_ms:g} ms | {row.mbit_s:g} | {100 * row.loss:g} % | {row.congestion} | {row.bytes / 1e6:g}"
        linux = f"{row.median_s:.3g} ({row.low_s:.3g} to {row.high_s:.3g})"
        print(f"| {link} | {linux} | {median_s:.3g}{spread} | {100 * (median_s / row.median_s - 1):+.0f} % |")


if __name__ == "__main__":
    main()
