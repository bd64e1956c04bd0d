"""The speed of each codec on one core, called chunk by chunk as in a transfer.

    python benchmarks/codecs.py [--megabytes 64] [--chunk 131072] [--rounds 5] [--json]

A vector of normal weights (64 MB, larger than the caches) is encoded, quantised and decoded in chunks of 512 KiB.
Speeds are GB of float32 input (encode, quantised) or output (decode) per second of CPU time. They are the best of
several rounds, because other work on the machine only adds time. If torch finds an accelerator, the last column is the
same encoding with torch operations on it, by wall clock, without the copy to the host.
"""

import argparse
import json
import os
import time

os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}

import numpy as np
import torch

from gossip.codecs import ALIGN, CODECS, Spread
from gossip.codecs.values import block_peaks

DISAGREEMENT = 0.01  # standard deviation of the partner's difference, relative to that of the weights


def best_gb_s(work, gigabytes, rounds, clock=time.process_time):
    work()
    seconds = []
    for _ in range(rounds):
        begin = clock()
        work()
        seconds.append(clock() - begin)
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


def torch_encode(name, weights, noise):
    """Encode a tensor of whole blocks with torch operations; return None if the codec has no such version."""
    if name in ("bf16", "fp16"):
        return weights.to(torch.bfloat16 if name == "bf16" else torch.float16)
    if name not in ("int8", "int4"):
        return None
    codec = CODECS[name]
    blocks = weights.view(-1, codec.block)  # (blocks, block)
    largest = blocks.abs().amax(1) / (codec.centre - 2.0**-8)
    bits = largest.view(torch.int32)
    scales = ((bits + (1 << 21) - 1) >> 21 << 21).view(torch.float32)
    codes = torch.round(blocks / scales[:, None] + noise.view(-1, codec.block)).to(torch.uint8)
    if name == "int8":
        return codes.view(-1)
    low, high = codes.view(-1).chunk(2)  # packed over the whole chunk; packing.py packs over a segment
    return low | high << 4


def on_accelerator(name, weights, chunk, rounds):
    """Return the speed of encoding on the accelerator in GB/s, or None."""
    on_device = torch.from_numpy(weights).cuda()
    noise = torch.rand(chunk, device="cuda") - 0.5 + getattr(CODECS[name], "centre", 0.0)
    if torch_encode(name, on_device[:chunk], noise) is None:
        return None

    def work():
        for piece in on_device.split(chunk):
            torch_encode(name, piece, noise)
        torch.cuda.synchronize()

    return best_gb_s(work, weights.nbytes / 1e9, rounds, time.perf_counter)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=64.0)
    parser.add_argument("--chunk", type=int, default=131_072, help="elements, a multiple of 256")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    elements = max(1, round(args.megabytes * 1e6 / 4 / args.chunk)) * args.chunk
    weights = rng.standard_normal(elements, dtype=np.float32)
    partner = weights + np.float32(DISAGREEMENT) * rng.standard_normal(elements, dtype=np.float32)
    accelerator = torch.cuda.is_available()

    columns = ["bits a value", "encode", "quantised", "decode"] + ["accelerator"] * accelerator
    rows = {}
    for name, codec in CODECS.items():
        figures = on_host(codec, weights, partner, args.chunk, args.rounds)
        if accelerator:
            figures.append(on_accelerator(name, weights, args.chunk, args.rounds))
        rows[name] = dict(zip(columns, figures, strict=True))
    if args.json:
        print(json.dumps(rows))
        return
    print(f"GB/s of float32, one core, {elements * 4 / 1e6:.0f} MB in chunks of {args.chunk:,}")
    if accelerator:
        print(f"accelerator: {torch.cuda.get_device_name()}")
    print(f"{'codec':10}" + "".join(f"{column:>14}" for column in columns))
    for name, row in rows.items():
        print(f"{name:10}" + "".join(f"{'-' if v is None else format(v, '.2f'):>14}" for v in row.values()))


if __name__ == "__main__":
    main()
