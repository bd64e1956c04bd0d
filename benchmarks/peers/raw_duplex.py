"""The limit of a pairwise exchange: two processes on loopback, blocking sockets, both directions at once, nothing else.

    python benchmarks/peers/raw_duplex.py [megabytes=40] [rounds=15]

No framing, no checksum, no averaging: a program that does more cannot be faster on the same machine. Prints one JSON
line with the median and the best seconds of a round.
"""

import json
import multiprocessing
import socket
import statistics
import sys
import threading
import time

PIECE_BYTES = 1 << 20


def send(sock, data):
    for start in range(0, len(data), PIECE_BYTES):
        sock.sendall(data[start : start + PIECE_BYTES])


def receive(sock, buffer):
    filled = 0
    while filled < len(buffer):
        count = sock.recv_into(buffer[filled : filled + PIECE_BYTES])
        if not count:
            raise ConnectionError("the other side closed")
        filled += count


def side(pipe, size, rounds, listens):
    if listens:
        with socket.create_server(("127.0.0.1", 0)) as server:
            pipe.send(server.getsockname()[1])
            sock, _ = server.accept()
    else:
        sock = socket.create_connection(("127.0.0.1", pipe))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    ours, theirs = memoryview(bytearray(b"\1") * size), memoryview(bytearray(b"\2") * size)  # touched: no page faults
    seconds = []
    for _ in range(rounds + 2):
        sock.sendall(b".")  # both begin together
        sock.recv(1)
        begin = time.perf_counter()
        sender = threading.Thread(target=send, args=(sock, ours))
        sender.start()
        receive(sock, theirs)
        sender.join()
        seconds.append(time.perf_counter() - begin)
    if listens:
        pipe.send(seconds[2:])


def main():
    megabytes = float(sys.argv[1]) if len(sys.argv) > 1 else 40.0
    rounds = int(sys.argv[2]) if len(sys.argv) > 2 else 15
    size = int(megabytes * 1e6)
    here, there = multiprocessing.Pipe()
    first = multiprocessing.Process(target=side, args=(there, size, rounds, True))
    first.start()
    second = multiprocessing.Process(target=side, args=(here.recv(), size, rounds, False))
    second.start()
    seconds = here.recv()
    first.join()
    second.join()
    print(json.dumps({"median_s": statistics.median(seconds), "best_s": min(seconds)}))


if __name__ == "__main__":
    main()
