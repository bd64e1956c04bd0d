"""hivemind's DecentralizedAverager with two peers on loopback: seconds of an averaging round.

    python benchmarks/peers/hivemind_round.py [megabytes=40] [rounds=4]

Run it with the Python of an environment of its own that holds ``torch==2.13.0`` and ``hivemind==1.1.12``. Prints one
JSON line with the median and the best seconds, and whether both peers ended with the mean.
"""

import json
import statistics
import subprocess
import sys
import time


def peer(rank, elements, rounds, first):
    import hivemind
    import torch
    from hivemind.averaging import DecentralizedAverager

    torch.set_num_threads(1)
    dht = hivemind.DHT(host_maddrs=["/ip4/127.0.0.1/tcp/0"], initial_peers=[first] if first else [], start=True)
    print(dht.get_visible_maddrs()[0], flush=True)
    averager = DecentralizedAverager(
        [torch.full((elements,), float(rank))], dht, prefix="bench", target_group_size=2, min_group_size=2,
        min_matchmaking_time=1.0, request_timeout=1.0, start=True, initial_group_bits="",
    )  # fmt: skip
    sys.stdin.readline()
    for _ in range(rounds):
        begin = time.perf_counter()
        averager.step(timeout=60, allow_retries=False)
        seconds = time.perf_counter() - begin
        with averager.get_tensors() as tensors:
            print(json.dumps([seconds, float(tensors[0][0])]), flush=True)
    sys.stdin.readline()
    averager.shutdown()
    dht.shutdown()


def main():
    if sys.argv[1:2] == ["peer"]:
        peer(int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), sys.argv[5] if len(sys.argv) > 5 else "")
        return
    megabytes = float(sys.argv[1]) if len(sys.argv) > 1 else 40.0
    rounds = int(sys.argv[2]) if len(sys.argv) > 2 else 4
    peers, first = [], []
    for rank in range(2):
        command = [sys.executable, __file__, "peer", str(rank), str(int(megabytes * 1e6) // 4), str(rounds), *first]
        process = subprocess.Popen(command, stdin=-1, stdout=-1, stderr=subprocess.DEVNULL, text=True)
        first = [process.stdout.readline().strip()]
        peers.append(process)
    time.sleep(6)  # for the averagers to declare themselves
    for process in peers:
        process.stdin.write("go\n")
        process.stdin.flush()
    rows = [[json.loads(process.stdout.readline()) for process in peers] for _ in range(rounds)]
    for process in peers:
        process.stdin.write("end\n")
        process.stdin.flush()
    for process in peers:
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()
    seconds = [max(row[0] for row in rows_of) for rows_of in rows]
    right = all(abs(row[1] - 0.5) < 0.02 for row in rows[-1])
    print(json.dumps({"median_s": statistics.median(seconds), "best_s": min(seconds), "right": right}))


if __name__ == "__main__":
    main()
