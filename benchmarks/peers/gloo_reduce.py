"""torch.distributed's all_reduce over gloo between processes on loopback: seconds of one.

    python benchmarks/peers/gloo_reduce.py [processes=4] [megabytes=40] [rounds=15]

Prints one JSON line with the median and the best seconds. Needs torch alone.
"""

import json
import os
import socket
import statistics
import sys
import time

os.environ["GLOO_SOCKET_IFNAME"] = "lo"

import torch
from torch import distributed, multiprocessing


def process(rank: int, processes: int, port: int, megabytes: float, rounds: int) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=processes)
    vector = torch.ones(int(megabytes * 1e6) // 4)
    seconds = []
    for _ in range(rounds + 2):
        vector.fill_(1.0)
        distributed.barrier()
        begin = time.perf_counter()
        distributed.all_reduce(vector)
        seconds.append(time.perf_counter() - begin)
        assert float(vector[-1]) == processes
    if rank == 0:
        print(json.dumps({"median_s": statistics.median(seconds[2:]), "best_s": min(seconds[2:])}), flush=True)
    distributed.barrier()
    distributed.destroy_process_group()


def main() -> None:
    processes = int(sys.argv[1]) if len(sys.argv) > 1 else 4
    megabytes = float(sys.argv[2]) if len(sys.argv) > 2 else 40.0
    rounds = int(sys.argv[3]) if len(sys.argv) > 3 else 15
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    multiprocessing.spawn(process, (processes, port, megabytes, rounds), nprocs=processes)


if __name__ == "__main__":
    main()
