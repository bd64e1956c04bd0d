"""The duration of raw TCP streams on emulated links, by latency, rate, loss, congestion control and size.

Each condition measures streams of fixed sizes over fresh connections. Seconds are from the connection to the arrival of
the last byte; ``share`` is the stream's share of the link's rate. In a run marked "disturbed" more than one packet in
twenty came over 5 ms late: it measured this machine and not the link. Needs root, gcc and /dev/net/tun.

    sudo .venv/bin/python benchmarks/links.py --repeats 3 --csv links.csv
    sudo .venv/bin/python benchmarks/links.py --exchanges 24 --csv benchmarks/tcp_exchanges.csv

With ``--exchanges`` the two ends of one connection exchange as much as a pair of nodes, repeatedly. After each exchange
comes a pause of 1.2 to 3.6 s with small messages. The initiator is drawn each time. Seconds are from the answer to the
last byte on both sides.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import random
import socket
import statistics
import sys
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.replay.links import DISTURBED, EmulatedLinks, missing

CONDITIONS = ((1, 100, 0.0), (25, 20, 0.0), (25, 100, 0.0), (25, 100, 0.01), (75, 20, 0.005), (50, 100, 0.01))
SIZES = (100_000, 1_000_000, 10_000_000)
EXCHANGES = (
    (25, 20, 0.0, 100_000), (25, 10, 0.0, 1_000_000), (25, 20, 0.0, 1_000_000), (25, 100, 0.0, 1_000_000),
    (75, 20, 0.0, 1_000_000), (25, 20, 0.01, 100_000), (25, 20, 0.01, 1_000_000),
    (75, 20, 0.005, 100_000), (75, 20, 0.005, 1_000_000),
)  # fmt: skip
REST_S = 1.2, 3.6
MESSAGE_BYTES, MESSAGE_EVERY_S = 60, 0.7
NOT_SENT_BYTES = 131_072  # the node's TCP_NOTSENT_LOWAT
LONGEST_S = 120.0  # limit of a stream; cubic with 1 % loss needs a minute for 10 MB over 50 ms
PORTS = itertools.count(5_000)


def stream_s(links: EmulatedLinks, size: int) -> float:
    port = next(PORTS)
    with links.inside(1):
        server = socket.create_server((links.address(1), port))
    with links.inside(0):
        client = socket.socket()
    with server, client:
        client.settimeout(LONGEST_S)
        server.settimeout(LONGEST_S)
        client.connect((links.address(1), port))
        begun = time.monotonic()
        threading.Thread(target=client.sendall, args=(bytes(size),), daemon=True).start()
        conn, _ = server.accept()
        with conn:
            conn.settimeout(LONGEST_S)
            buffer, left = bytearray(1 << 18), size
            while left:
                left -= conn.recv_into(buffer)
        return time.monotonic() - begun


def measure(latency_ms: float, mbit_s: float, loss: float, sizes: list[int], repeats: int) -> list[dict[str, Any]]:
    rows = []
    available = Path("/proc/sys/net/ipv4/tcp_available_congestion_control").read_text().split()
    with EmulatedLinks(2) as links:
        links.rate(-1, mbit_s, mbit_s)
        links.latency(-1, -1, latency_ms / 1e3)
        links.loss(-1, -1, loss)
        print(f"{latency_ms:g} ms, {mbit_s:g} Mbit/s, {loss:.1%} lost", flush=True)
        for congestion in [name for name in ("cubic", "bbr") if name in available]:
            for node in range(2):
                links.congestion(node, congestion)
            for size in sizes:
                before = links.stats()
                times = [stream_s(links, size) for _ in range(repeats)]
                late = links.stats().late_since(before)
                median_s = statistics.median(times)
                rows.append({
                    "latency_ms": latency_ms, "mbit_s": mbit_s, "loss": loss, "congestion": congestion, "bytes": size,
                    "runs": repeats, "seconds": round(median_s, 4), "low": round(min(times), 4),
                    "high": round(max(times), 4), "share": round(8e-6 * size / median_s / mbit_s, 3),
                    "late_share": round(late, 4), "disturbed": late > DISTURBED,
                })  # fmt: skip
                print(f"  {congestion:5} {size / 1e6:5g} MB  {median_s:7.3f} s ({min(times):.3f} to {max(times):.3f})  "
                      f"{rows[-1]['share']:4.0%} of the rate  {late:.1%} late{'  disturbed' * (late > DISTURBED)}",
                      flush=True)  # fmt: skip
    return rows


# -- exchanges -------------------------------------------------------------------------------------------------------
def connected(links: EmulatedLinks, begins: int = 0, answers: int = 1) -> tuple[socket.socket, socket.socket]:
    """Connect two nodes, and return both ends with a node's socket options."""
    port = next(PORTS)
    with links.inside(answers):
        server = socket.create_server((links.address(answers), port))
    with links.inside(begins):
        near = socket.socket()
    with server:
        near.connect((links.address(answers), port))
        far, _ = server.accept()
    for end in (near, far):
        end.settimeout(LONGEST_S)
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, NOT_SENT_BYTES)
    return near, far


def read_bytes(end: socket.socket, size: int) -> float:
    """Read ``size`` bytes, and return the time of the last one."""
    buffer = bytearray(1 << 18)
    while size:
        size -= end.recv_into(buffer, min(size, len(buffer)))
    return time.monotonic()


def stream_both(end: socket.socket, size: int) -> float:
    """Send and read ``size`` bytes, and return the time at which the last one was read."""
    sender = threading.Thread(target=end.sendall, args=(bytes(size),), daemon=True)
    sender.start()
    until = read_bytes(end, size)
    sender.join()
    return until


def exchange_s(asker: socket.socket, asked: socket.socket, size: int) -> float:
    """Play one exchange, and return the seconds from the answer to the last byte on both sides."""
    begun, until = [0.0], [0.0]

    def answer() -> None:
        read_bytes(asked, MESSAGE_BYTES)
        asked.sendall(bytes(MESSAGE_BYTES))
        begun[0] = time.monotonic()
        until[0] = stream_both(asked, size)

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    asker.sendall(bytes(MESSAGE_BYTES))
    read_bytes(asker, MESSAGE_BYTES)
    other = stream_both(asker, size)
    thread.join()
    return max(until[0], other) - begun[0]


def exchanges(
    latency_ms: float, mbit_s: float, loss: float, size: int, congestion: str, count: int
) -> list[dict[str, Any]]:
    rng, rows = random.Random(1), []
    with EmulatedLinks(2) as links:
        links.rate(-1, mbit_s, mbit_s)
        links.latency(-1, -1, latency_ms / 1e3)
        links.loss(-1, -1, loss)
        for node in range(2):
            links.congestion(node, congestion)
        ends = connected(links)
        with ends[0], ends[1]:
            for number in range(count):
                first, before = rng.randrange(2), links.stats()
                seconds = exchange_s(ends[first], ends[1 - first], size)
                after = links.stats()
                rows.append({
                    "latency_ms": latency_ms, "mbit_s": mbit_s, "loss": loss, "congestion": congestion, "bytes": size,
                    "exchange": number, "seconds": round(seconds, 4), "dropped": after.full - before.full,
                    "late_share": round(after.late_since(before), 4),
                })  # fmt: skip
                until = time.monotonic() + rng.uniform(*REST_S)
                while (left_s := until - time.monotonic()) > 0:
                    time.sleep(min(left_s, MESSAGE_EVERY_S))
                    if left_s > MESSAGE_EVERY_S:
                        for end, other in (ends, ends[::-1]):
                            end.sendall(bytes(MESSAGE_BYTES))
                            read_bytes(other, MESSAGE_BYTES)
    times = sorted(row["seconds"] for row in rows[1:])
    print(f"{latency_ms:g} ms, {mbit_s:g} Mbit/s, {loss:.1%} lost, {congestion}, {size / 1e6:g} MB both ways: first "
          f"{rows[0]['seconds']:.3f} s, then {times[0]:.3f} to {times[-1]:.3f}, median {statistics.median(times):.3f}; "
          f"{statistics.mean(row['late_share'] for row in rows):.1%} late", flush=True)  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--largest", type=int, default=SIZES[-1], help="bytes; longer streams are left out")
    parser.add_argument("--exchanges", type=int, help="so many over one connection, in place of fresh streams")
    parser.add_argument("--csv", type=Path)
    arguments = parser.parse_args()
    if obstacle := missing():
        sys.exit(f"links: {obstacle}")
    sizes = [size for size in SIZES if size <= arguments.largest]
    if arguments.exchanges:
        kinds = [(*exchange, name) for exchange in EXCHANGES for name in ("cubic", "bbr")]
        rows = [row for kind in kinds for row in exchanges(*kind, arguments.exchanges)]
    else:
        rows = [row for conditions in CONDITIONS for row in measure(*conditions, sizes, arguments.repeats)]
    if arguments.csv is not None:
        with arguments.csv.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
