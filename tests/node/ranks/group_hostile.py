"""One rank of a group of two, of which one is hostile: `python group_hostile.py HOSTILE RANK PORT FOLDER [SEED...]`.

``HOSTILE`` is the rank that attacks. Both play all attacks on that rank's list, one Node after another in the same two
processes, over torch's own TCPStore and gloo. The honest rank writes down how each of its nodes ended.
"""

import contextlib
import json
import os
import pickle
import random
import resource
import sys
import time
from datetime import timedelta
from pathlib import Path

import msgpack
import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from gossip.config import Config
from gossip.errors import LocalError
from gossip.ids import PeerId
from node import Node, running
from node.observe.members import SwarmView
from node.ranks import plain
from node.ranks.boundary import MomentsTold, UpdateTold
from node.ranks.channel import REASON_KEY, Channel
from node.ranks.optimizers import Place
from node.ranks.ranks import FRAME_BYTES, Call, Ranks, StepSummary
from node.ranks.report import SwarmReport
from node.ranks.sharded.memory import MemoryName
from node.ranks.sharded.work import Operation

PATIENCE_S = 15.0  # The timeout of the group, for a rank that stops and, on a busy machine, for one that is late.
FULL_STEPS = 30  # The steps of an honest loop that no attack ends.
ELEMENTS = 6 * 3 + 3
ESCAPES = "\x1b[2J\x1b]0;owned\x07\r\nTraceback: no"


class Trap:
    """An object whose pickle would leave a mark."""

    def __init__(self, folder):
        self.folder = folder

    def __reduce__(self):
        return Path.touch, (self.folder / "ran",)


# -- by rank 0, which all others obey ------------------------------------------------------------------------------
def frame(ranks, size, data=b""):
    """Send the first part of a message, which states its size."""
    row = np.zeros(FRAME_BYTES, np.uint8)
    row[:8] = np.frombuffer(size.to_bytes(8, "little"), np.uint8)
    row[8 : 8 + len(data)] = np.frombuffer(data, np.uint8)
    ranks.broadcast_array(row)


def raw(data):
    """Return an attack that sends ``data`` as a message."""

    def attack(ranks, folder):
        frame(ranks, len(data), data[: FRAME_BYTES - 8] if len(data) <= FRAME_BYTES - 8 else b"")
        if len(data) > FRAME_BYTES - 8:
            ranks.broadcast_array(np.frombuffer(bytearray(data), np.uint8))

    return attack


def says(kind, what=None):
    return raw(msgpack.packb([kind, None])[:-1] + plain.pack(what, 0))


def record(name, *values):
    """Return a packed record, whose fields may have any type."""
    return msgpack.ExtType(plain.RECORD, msgpack.packb([name, *values]))


def layers(levels, size):
    """Return ``size`` bytes inside nested extension types, each of which is copied to be decoded."""
    data = msgpack.packb(bytes(size))
    for _ in range(levels):
        data = msgpack.packb(msgpack.ExtType(plain.TUPLE, b"\x91" + data))
    return data


def many(element):
    """Return a message with an array of ``element``, repeated as often as there is room."""
    count = (plain.MAX_BYTES - 100) // len(element)
    return b"\x92\xa4wait\xdd" + count.to_bytes(4, "big") + element * count


def positions(*places):
    def attack(ranks, folder):
        says("change", UpdateTold(len(places), True, None))(ranks, folder)
        ranks.broadcast_array(np.ones(len(places), np.float32))
        ranks.broadcast_array(np.array(places, np.int64))

    return attack


def mirrored(described):
    """Return an attack that sends valid weights, and then ``described`` as the optimizers."""

    def attack(ranks, folder):
        says("weights")(ranks, folder)
        for size in (ELEMENTS - 3, 3):
            ranks.broadcast_array(np.ones(size, np.float32))
        says("optimizers", described)(ranks, folder)

    return attack


def other_length(size):
    """Return an attack that broadcasts ``size`` bytes, while the other rank awaits another length."""
    return lambda ranks, folder: ranks.broadcast_array(np.zeros(size, np.uint8))


def lies_about_size(ranks, folder):
    frame(ranks, 100_000)
    ranks.broadcast_array(np.zeros(10, np.uint8))


def trained(samples=0, **told):
    """Return an attack that behaves until the other rank trains, and then sends this summary."""

    def attack(ranks, folder):
        news = SwarmReport(
            PeerId(b"i" * 16), "127.0.0.1:1", SwarmView((PeerId(b"o" * 16),)), False, {}, (),
            {"exchanges_done": 0},
        )  # fmt: skip
        says("done", (None, None, news))(ranks, folder)
        ranks.begin_summary(Call.STEP, samples, announced=StepSummary(**({"sharers": 1, "gap_steps": 1} | told)))
        ranks.finish_summary()

    return attack


def stands_still(_, folder):
    time.sleep(PATIENCE_S + 2.0)


def pickled(ranks, folder):
    raw(pickle.dumps(["done", Trap(folder)]))(ranks, folder)


def place(name):
    return b"\x92\xa4wait" + msgpack.packb(msgpack.ExtType(plain.TYPE, name))


GROUPS = ([{"lr": 0.1, "momentum": 0.9}], [{}, {}])
TERABYTE, NEGATIVE = Place((1 << 38,), torch.float32, False), Place((-4,), torch.float32, False)
random.seed(7)

BY_RANK_0 = {
    "a size of 2**63": lambda ranks, folder: frame(ranks, 2**63),
    "a size of a terabyte": lambda ranks, folder: frame(ranks, 1 << 40),
    "less than the size it states": lies_about_size,
    "a shorter frame": other_length(100),
    "nothing in it": raw(b""),
    "random bytes": raw(random.randbytes(400)),
    "a pickle": pickled,
    "no list": raw(msgpack.packb({"kind": "done"})),
    "a kind that is a number": raw(msgpack.packb([7, None])),
    "an unknown kind": says("explode"),
    "a mapping with a list for a key": raw(b"\x92\xa4wait\x81\x90\xc0"),
    "texts that are no UTF-8": raw(b"\x92\xa4wait\xa2\xff\xfe"),
    "an integer of many digits": raw(b"\x92\xa4wait" + msgpack.packb(msgpack.ExtType(plain.INTEGER, b"9" * 100_000))),
    "lists in lists": raw(b"\x92\xa4wait" + b"\x91" * 5000 + b"\xc0"),
    "many layers of much": lambda ranks, folder: raw(b"\x92\xa4wait" + layers(20, 30 << 20))(ranks, folder),
    "many lists": raw(many(b"\x90")),
    "many mappings": raw(many(b"\x80")),
    "many numbers": raw(many(b"\xcd\xff\xff")),
    "many texts": raw(many(b"\xa2ab")),
    "a function of torch for a type": raw(place(b"load")),
    "a module of torch for a type": raw(place(b"_inductor")),
    "an unknown record": raw(msgpack.packb(["change", record("Path", "/etc/passwd")])),
    "a record of few fields": raw(msgpack.packb(["change", record("UpdateTold", 1)])),
    "a record of other types": raw(msgpack.packb(["change", record("UpdateTold", "many", [], {})])),
    "hello of numbers": says("hello", (1, 2, 3)),
    "a change of another type": says("change", [1, 2]),
    "a change of a terabyte": says("change", UpdateTold(1 << 38, False, None)),
    "a change of a negative size": says("change", UpdateTold(-1, True, None)),
    "a change of no weight": says("change", UpdateTold(ELEMENTS, False, float("nan"))),
    "moments of a terabyte": says("moments", MomentsTold(("momentum_buffer",), 0, 1 << 38)),
    "moments before the first": says("moments", MomentsTold(("momentum_buffer",), -4, 2)),
    "moments of a thousand names": says("moments", MomentsTold(tuple(map(str, range(1000))), 0, 2)),
    "an operation on a whole model": says("operation", Operation("read", 0, ELEMENTS, 1)),
    "memory for a whole model": says("map", MemoryName(1, "/proc/self/fd/0", 8, "gossip-vector-0")),
    "positions outside": positions(0, 10**12),
    "positions below": positions(-(2**62), 0),
    "positions in no order": positions(0, 10**9, 3),
    "optimizers that are none": mirrored(7),
    "optimizers of others": mirrored([([], [])]),
    "a tensor of a terabyte": mirrored([(GROUPS[0], [{"momentum_buffer": TERABYTE}, {}])]),
    "a tensor of a negative size": mirrored([(GROUPS[0], [{"momentum_buffer": NEGATIVE}, {}])]),
    "other parameters": mirrored([([{"params": [1]}], GROUPS[1])]),
    "a result without its news": says("done", (None, None)),
    "an error that is none": says("done", (None, "a text", None)),
    "news of other types": raw(
        msgpack.packb(
            ["done", msgpack.ExtType(plain.TUPLE, msgpack.packb([None, None, record("SwarmReport", *range(8))]))]
        )
    ),
    "an error of many lines": says("done", (None, LocalError(ESCAPES + "x" * 10**5), None)),
    "a sum that is never looked at again": trained(gap_steps=2**62),
    "a sum of fewer than none": trained(samples=-(10**15)),
    "a sum of a finished run": trained(sharers=-1, finished=True),
    "silence": stands_still,
}  # fmt: skip


# -- by another rank, which takes part in sums -----------------------------------------------------------------------
def row_of(tensor):
    """Return an attack that sends ``tensor(row)`` in place of this rank's row of each sum."""

    def attack(node, folder):
        channel = node._training.ranks.channel
        plain_sum = channel.sum
        channel.sum = lambda row: plain_sum(tensor(row))
        for _ in range(40):
            node.step(samples=4)
            time.sleep(0.005)

    return attack


def changed(row, index, value):
    row = row.clone()
    row[index] = value
    return row


def writes(text):
    """Return an attack that writes ``text`` as the reason of its end, and then leaves."""

    def attack(node, folder):
        channel = node._training.ranks.channel
        channel.store.set(REASON_KEY, text)
        ranks = node._training.ranks
        ranks.is_open, ranks.pending_sum = False, None  # Leave without telling the other rank.
        channel.close()

    return attack


def speaks(node, folder):
    """Broadcast while the other rank sums."""
    for _ in range(40):
        channel = node._training.ranks.channel
        options = dist.BroadcastOptions()
        options.rootRank = 1
        channel.wait(channel.control.broadcast([torch.zeros(10_000, dtype=torch.uint8)], options))


def other_call(node, folder):
    node._training.knowledge.begin_summary(Call.REDUCE) if node._training.ranks.pending_sum is None else None
    node.reduce({})


def raises(node, folder):
    raise LocalError(ESCAPES + "y" * 10**5)


BY_RANK_1 = {
    "the largest number of samples": row_of(lambda row: changed(row, 2, 2**63 - 1)),
    "a negative number of samples": row_of(lambda row: changed(row, 2, -(2**62))),
    "a gap of years": row_of(lambda row: changed(row, 9, 2**62)),
    "another call": row_of(lambda row: changed(changed(row, 0, 99), 1, 99 * 99)), "another call of its own": other_call,
    "broadcasts": speaks, "an error of many lines": raises, "a reason of many lines": writes(ESCAPES),
    "a reason that is no text": writes(b"\xff\xfe\x80" * 1000), "a reason of megabytes": writes("z" * (4 << 20)),
    "silence": stands_still,
}  # fmt: skip

ABORTED_BY_0 = {"a longer frame": other_length(100_000)}
ABORTED_BY_1 = {
    "a longer row": row_of(lambda row: torch.cat([row] * 1000)), "a shorter row": row_of(lambda row: row[:3].clone()),
}  # fmt: skip
"""After these gloo itself ends the process that waits for less, by ``abort``: each is played alone. After a shorter row
that is the one that sent it."""


def opened():
    """Start a node's ranks as far as the START call."""
    ranks = Ranks(Channel(dist.group.WORLD))
    ranks.open()
    ranks.begin_summary(Call.START)
    ranks.finish_summary()
    return ranks


def node_of(seeds):
    running.trained_runs().clear()  # As in another process: in this one a later Node begins a run of its own.
    torch.manual_seed(3)
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    config = Config(mix_every_steps=2, join_timeout_s=3.0)
    return Node(model, optimizer, seeds=seeds, config=config, group=dist.group.WORLD)


def honest(seeds):
    """Run a loop as documented, and return how it ended."""
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
    kind, text, taken = "", "", 0
    try:
        with node_of(seeds) as node:
            began = time.monotonic()
            for taken in range(1, FULL_STEPS + 1):  # noqa: B007 - how many were taken is told
                node.step(loss=1.0, samples=4)
                time.sleep(0.005)
            node.settle(0.0)
    except Exception as error:
        kind, text = type(error).__name__, str(error)
        if isinstance(error, LocalError):
            kind = "LocalError"
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return {"kind": kind, "text": text, "steps": taken, "seconds": time.monotonic() - began, "grown_mb": grown / 1024}


def hostile(rank, attack, folder, seeds):
    """Attack. On rank 0, return the reason that the honest rank gave, if it gave one."""
    if rank == 0:
        ranks = opened()
        with contextlib.suppress(LocalError, RuntimeError):
            attack(ranks, folder)
            while True:  # Take part in sums until the other rank has left.
                ranks.begin_summary(Call.STEP, announced=StepSummary())
                ranks.finish_summary()
        reason = ranks.channel.read_reason()
        ranks.leave(None)
        return reason
    with contextlib.suppress(LocalError, RuntimeError), node_of(seeds) as node:
        for _ in range(5):
            node.step(samples=4)
        attack(node, folder)
    return ""


def together(folder, name, rank):
    """Wait for the other rank, which may need several timeouts: in a sum, in a step and at its end."""
    (folder / f"{rank} {name.replace('*', '')}").touch()
    end = time.monotonic() + 6 * PATIENCE_S
    while not (folder / f"{1 - rank} {name.replace('*', '')}").exists():
        assert time.monotonic() < end, f"the other rank did not come to {name!r}"
        time.sleep(0.005)


def main():
    attacker, rank, port, folder, seeds = *map(int, sys.argv[1:4]), Path(sys.argv[4]), sys.argv[5:]
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, 2, rank == 0, timeout=timedelta(seconds=60))  # A busy machine is slow.
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=PATIENCE_S))
    attacks, aborting = (BY_RANK_1, ABORTED_BY_1) if attacker else (BY_RANK_0, ABORTED_BY_0)
    if "ONLY" in os.environ:
        attacks = {os.environ["ONLY"]: (attacks | aborting)[os.environ["ONLY"]]}
    ended, reasons = {}, {}
    for name, attack in attacks.items():
        together(folder, name, rank)
        if rank == attacker:
            reasons[name] = hostile(rank, attack, folder, seeds)
        else:
            ended[name] = honest(seeds)
            (folder / "ended").write_text(json.dumps(ended))
    if "ONLY" in os.environ:
        return
    together(folder, "last", rank)
    if rank == attacker:
        (folder / "reasons").write_text(json.dumps(reasons))
    last = honest(seeds)  # Finally, both ranks are honest.
    (folder / f"last-{rank}").write_text(json.dumps(last))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
