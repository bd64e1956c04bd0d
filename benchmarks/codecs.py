"""The speed of each codec on one core, called chunk by chunk as in a transfer.

    python benchmarks/codecs.py [--megabytes 64] [--chunk 131072] [--rounds 5] [--json]

A vector of normal weights (64 MB, larger than the caches) is encoded, quantised and decoded in chunks of 512 KiB.
Speeds are GB of float32 input (encode, quantised) or output (decode) per second of CPU time. They are the best of
several rounds, because other work on the machine only adds time.
"""

import argparse
import json
import os
import time

os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}

import numpy as np

from gossip.codecs import ALIGN, CODECS, Spread
from gossip.codecs.values import block_peaks

DISAGREEMENT = 0.01  # standard deviation of the partner's difference, relative to that of the weights


def best_gb_s(work, gigabytes, rounds):
    work()
    seconds = []
    for _ in range(rounds):
        begin = time.process_time()
        work()
        seconds.append(time.process_time() - begin)
    return gigabytes / min(seconds)


def on_host(codec, weights, partner, chunk, rounds):
    """Measure a codec on the host; return bits a value, and the speeds of encode, quantised and decode in GB/s."""
    if codec.needs_spread:
        spread = Spread(weights.size)
        spread.learn(block_peaks(partner - weights, ALIGN), np.zeros_like(spread.peaks))
        codec = codec.with_bounds(spread)
    cuts = [slice(first, min(first + chunk, weights.size)) for first in range(0, weights.size, chunk)]
    bodies = [bytearray(codec.encoded_bytes(cut.stop - cut.start)) for cut in cuts]
    out = np.empty(chunk, np.float32)

    def encode():
        for cut, body in zip(cuts, bodies, strict=True):
            codec.encode(weights[cut], body, 1, cut.start)

    def quantised():
        for cut in cuts:
            codec.quantised(weights[cut], out[: cut.stop - cut.start], 1, cut.start)

    def decode():
        for cut, body in zip(cuts, bodies, strict=True):
            codec.decode(body, out[: cut.stop - cut.start], partner[cut], 1, cut.start)

    gigabytes = weights.nbytes / 1e9
    speeds = [best_gb_s(work, gigabytes, rounds) for work in (encode, quantised, decode)]
    return [8 * sum(map(len, bodies)) / weights.size, *speeds]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=64.0)
    parser.add_argument("--chunk", type=int, default=131_072, help="elements, a multiple of 256")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rng = np.random.default_rng(0)
    elements = max(1, round(args.megabytes * 1e6 / 4 / args.chunk)) * args.chunk
    weights = rng.standard_normal(elements, dtype=np.float32)
    partner = weights + np.float32(DISAGREEMENT) * rng.standard_normal(elements, dtype=np.float32)

    columns = ["bits a value", "encode", "quantised", "decode"]
    rows = {}
    for name, codec in CODECS.items():
        figures = on_host(codec, weights, partner, args.chunk, args.rounds)
        rows[name] = dict(zip(columns, figures, strict=True))
    if args.json:
        print(json.dumps(rows))
        return
    print(f"GB/s of float32, one core, {elements * 4 / 1e6:.0f} MB in chunks of {args.chunk:,}")
    print(f"{'codec':10}" + "".join(f"{column:>14}" for column in columns))
    for name, row in rows.items():
        print(f"{name:10}" + "".join(f"{value:14.2f}" for value in row.values()))


if __name__ == "__main__":
    main()
