"""Ranks of one node as threads of this process, each with a channel to the others that keeps to the same rules."""

import threading

import torch

from node import Node


class Sum:
    """A sum that is done when every rank has given its row; each row then holds the sum."""

    def __init__(self, group):
        self.group, self.rows, self.closed = group, [], False
        self.done = threading.Event()

    def give(self, row):
        self.rows.append(row)
        if len(self.rows) == self.group.size:
            total = torch.stack(self.rows).sum(0)
            for one in self.rows:
                one.copy_(total)
            self.done.set()

    def is_completed(self):
        return self.done.is_set() or self.group.closed

    def wait(self):
        if not self.done.is_set():
            raise RuntimeError("Connection closed by peer")


class MemoryGroup:
    """A group in memory, with a channel for each rank. The ranks must make the same calls."""

    def __init__(self, size):
        self.size, self.closed = size, False
        self.changed = threading.Condition()
        self.why = ""
        self.calls = []  # (kind, elements), in the order in which all ranks make them
        self.sums, self.sent = {}, {}
        self.channels = [MemoryChannel(self, rank) for rank in range(size)]


class MemoryChannel:
    def __init__(self, group, rank):
        self.group, self.rank, self.size = group, rank, group.size
        self.made = 0

    def call(self, kind, elements):
        calls, number = self.group.calls, self.made
        self.made += 1
        if number == len(calls):
            calls.append((kind, elements))
        assert calls[number] == (kind, elements), f"rank {self.rank} is out of step: {calls[number]} {kind} {elements}"
        return number

    def open(self):
        pass

    def close(self):
        with self.group.changed:
            self.group.closed = True
            self.group.changed.notify_all()

    def sum(self, row):
        with self.group.changed:
            number = self.call("sum", row.numel())
            if self.group.closed:
                raise RuntimeError("Connection closed by peer")
            work = self.group.sums.setdefault(number, Sum(self.group))
            work.give(row)
            self.group.changed.notify_all()
            return work

    def broadcast(self, flat):
        group = self.group
        with group.changed:
            number = self.call("send", flat.numel())
            if self.rank == 0:
                if group.closed:
                    raise RuntimeError("Connection closed by peer")
                group.sent[number] = flat.clone()
                group.changed.notify_all()
                return
            assert group.changed.wait_for(lambda: number in group.sent or group.closed, 30)
            if number not in group.sent:
                raise RuntimeError("Connection closed by peer")
            flat.copy_(group.sent[number])

    def relays(self, size):
        return False

    def leave_reason(self, sentence):
        self.group.why = sentence

    def read_reason(self):
        return self.group.why

    def wait(self, work, seconds=None):
        changed = self.group.changed
        with changed:
            has_ended = changed.wait_for(work.is_completed, 30 if seconds is None else seconds)
        if not has_ended:
            if seconds is None:
                raise RuntimeError("Nothing came.")
            return False
        work.wait()
        return True


class RankThread(threading.Thread):
    """A thread that runs ``loop(node, rank)`` with a Node of its channel."""

    def __init__(self, channel, model, optimizer, loop, options):
        super().__init__(daemon=True)
        self.channel, self.model, self.optimizer, self.loop, self.options = channel, model, optimizer, loop, options
        self.node = self.result = self.error = None

    def run(self):
        try:
            with Node(self.model, self.optimizer, group=self.channel, **self.options) as node:
                self.node = node
                self.result = self.loop(node, self.channel.rank)
        except BaseException as error:
            self.error = error


def play(ranks, seconds=40):
    """Run the ranks until they end."""
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(seconds)
    assert not any(rank.is_alive() for rank in ranks), "a rank hangs"
    return ranks
