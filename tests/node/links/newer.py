"""A program that runs nodes of the next version.

Its protocol range goes one version further, it has one more message and one more field in a message, and its records
end with additional data. Everything else is this version's.

A line ``[LISTEN, SEED...]`` in JSON on its standard input starts a node. A node's number ends that node, and the end of
the input ends all nodes. Each node prints its view as one JSON object per line.
"""

import json
import sys
import threading
import time
from typing import Any

from gossip.wire import messages
from gossip.wire.messages import added_field, integer, message, wire_field

messages.VERSION_MAX = 2


@message("offer")
class Offer(messages.Offer):
    colour: str = added_field("text", 16, default="grey")


@message("dance")
class Dance:
    steps: int = integer()
    tune: tuple[str, ...] = wire_field("names", 4)


messages.Offer = Offer  # Replace it before any other module imports it.

import torch  # noqa: E402
from torch import nn  # noqa: E402

import node.network.service  # noqa: E402
from gossip.config import Config  # noqa: E402
from gossip.effects import Send  # noqa: E402
from gossip.ids import MemberRecord  # noqa: E402
from gossip.peer import Peer  # noqa: E402
from node import Node  # noqa: E402

EXTRA = ("blue", 7, None, 2.5, b"\0\xff")
seen: dict[str, Any] = {"dances": 0, "colours": []}


def record_of_newer(*args: Any, **fields: Any) -> MemberRecord:
    return MemberRecord(*args, **fields, extra=EXTRA)


class NewerPeer(Peer):
    def on_linked(self, peer, record, now, sighting=None):
        return [*super().on_linked(peer, record, now, sighting), Send(peer, Dance(3, ("waltz",)))]

    def tick(self, now):
        if self.view.ready and self.membership.me.extra != EXTRA:
            self.membership.update_me(now, extra=EXTRA)
        return super().tick(now)

    def receive(self, sender, message, now):
        if isinstance(message, Dance):
            seen["dances"] += 1
            return []
        if isinstance(message, Offer):
            seen["colours"].append(message.colour)
        return super().receive(sender, message, now)


def train(number: int, listen: str, seeds: list[str], stop: threading.Event) -> None:
    config = Config(mix_every_steps=2, join_timeout_s=30.0)
    with Node(nn.Linear(4, 2), seeds=seeds, listen=listen, config=config) as trained:
        said = 0.0
        while not stop.is_set():
            trained.step(loss=0.5, samples=4)
            time.sleep(0.005)
            if time.monotonic() > said + 0.2:
                said = time.monotonic()
                records = [record for record, _ in trained._training.network.peer.membership.members()]
                extra = {record.id.hex(): repr(record.extra) for record in records}
                mixes = trained.metrics().exchanges_done
                said_now = json.dumps(seen | {
                    "number": number, "id": trained.id, "address": trained.address, "mixes": mixes, "extra": extra,
                    "links": [peer.hex() for peer in list(trained._training.network.runtime.links.by_peer)],
                })  # fmt: skip
                sys.stdout.write(said_now + "\n")  # Write in one call, since other nodes print as well.
                sys.stdout.flush()


def main() -> None:
    node.network.service.MemberRecord, node.network.service.Peer = record_of_newer, NewerPeer
    torch.manual_seed(9)
    torch.set_num_threads(1)
    nodes: list[tuple[threading.Thread, threading.Event]] = []
    for line in sys.stdin:
        asked = json.loads(line)
        if isinstance(asked, int):
            nodes[asked][1].set()
            continue
        listen, *seeds = asked
        stop = threading.Event()
        thread = threading.Thread(target=train, args=(len(nodes), listen, seeds, stop))
        nodes.append((thread, stop))
        thread.start()
    for thread, stop in nodes:
        stop.set()
        thread.join(10)


if __name__ == "__main__":
    main()
