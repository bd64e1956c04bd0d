"""Memory of one host: who may read it, who may change it, and what is lent is whole or not used."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import socket
import struct
import threading

import numpy as np
import pytest

from gossip import kernel
from gossip.averaging.streams import ComparingReceiver, DifferenceReceiver, PieceReceiver, Sender
from gossip.codecs import CODECS, get_codec
from gossip.errors import ProtocolError
from gossip.kernel.squares import squares
from node.model.host_memory import HostMemory, Views, lying
from node.model.pool import VectorPool
from node.model.snapshot import ModelState
from node.transport import shared
from node.transport.shared import MeetingPlace, SideChannel, connected, host_name
from tests.gossip.kernel.building import passes
from tests.node.test_transfer import deliver, frames, pair

SIZE = 20_000
NOBODY = 65_534


def sealed_file(size, seals=fcntl.F_SEAL_SHRINK, flags=os.MFD_ALLOW_SEALING):
    descriptor = os.memfd_create("test", flags | os.MFD_CLOEXEC)
    os.ftruncate(descriptor, size)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


@pytest.fixture(autouse=True)
def _small_ones_too(monkeypatch):
    monkeypatch.setattr(VectorPool, "SHARED_ELEMENTS", SIZE)


@pytest.fixture
def channels():
    """Both ends of one."""
    place = MeetingPlace()
    far = connected(place.name, place.token)
    near = place.met()
    place.close()
    assert near is not None
    assert far is not None
    yield near, far
    near.close()
    far.close()


# -- memory ------------------------------------------------------------------------------------------------------
def test_a_vector_is_read_where_another_wrote_it():
    memory = HostMemory(SIZE)
    memory.vector[:] = np.arange(SIZE)
    piece = memory.vector[3_000:9_000]
    assert HostMemory.of(piece) == (memory, 12_000)
    theirs = lying(memory.descriptor, 12_000, 6_000)
    assert np.array_equal(theirs, piece)
    piece += 1
    assert np.array_equal(theirs, piece)
    assert HostMemory.of(memory.vector[::2]) is None
    assert HostMemory.of(np.zeros(5, np.float32)) is None


def test_nobody_who_is_given_it_can_change_it():
    memory = HostMemory(SIZE)
    theirs = lying(memory.descriptor, 0, SIZE)
    with pytest.raises(ValueError, match="read-only"):
        theirs[0] = 1
    again = os.open(f"/proc/self/fd/{memory.descriptor}", os.O_RDWR)  # which the same user may
    for descriptor in (memory.descriptor, again):
        with pytest.raises(PermissionError):
            os.pwrite(descriptor, b"1234", 0)
        with pytest.raises(PermissionError):
            mmap.mmap(descriptor, 4 * SIZE)
        with pytest.raises(PermissionError):
            os.ftruncate(descriptor, 0)
        with pytest.raises(PermissionError):
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    os.close(again)
    memory.vector[0] = 5
    assert theirs[0] == 5


def test_what_could_fail_or_wait_where_it_is_read_is_refused(tmp_path):
    ends = os.pipe()
    (tmp_path / "file").write_bytes(bytes(4 * SIZE))
    found = [
        *ends, os.open("/dev/zero", os.O_RDONLY), os.open(tmp_path / "file", os.O_RDONLY),
        sealed_file(4 * SIZE, 0), sealed_file(4 * SIZE - 1), sealed_file(4 * SIZE, fcntl.F_SEAL_GROW),
    ]  # fmt: skip
    if os.path.isdir("/dev/shm"):
        found.append(os.open("/dev/shm", os.O_TMPFILE | os.O_RDWR))
        os.ftruncate(found[-1], 4 * SIZE)
    with contextlib.suppress(OSError):  # this system has none
        found.append(sealed_file(2 << 20, flags=os.MFD_ALLOW_SEALING | os.MFD_HUGETLB))
    for descriptor in found:
        assert lying(descriptor, 0, SIZE) is None
    good = sealed_file(4 * SIZE)
    assert lying(good, 0, SIZE) is not None
    assert lying(good, 4, SIZE) is None
    assert lying(good, 2, SIZE - 1) is None
    assert lying(good, 1 << 52, 1 << 47) is None
    for descriptor in (*found, good):
        os.close(descriptor)


def test_memory_is_given_back_when_no_array_lies_there_any_more():
    def mappings():
        with open("/proc/self/maps") as lines:
            return sum("memfd:gossip" in line for line in lines)

    before, descriptors = mappings(), len(os.listdir("/proc/self/fd"))
    vector = HostMemory(SIZE).vector[10:20]
    theirs = lying(HostMemory.of(vector)[0].descriptor, 0, SIZE)[5:]
    assert mappings() == before + 2
    del vector
    theirs = theirs.sum()
    assert mappings() == before
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_a_neighbours_memory_stays_mapped_for_the_next_time_two_pieces_of_it_at_most():
    memory, views = [HostMemory(SIZE) for _ in range(Views.MOST + 1)], Views()
    first = views.lying(memory[0].descriptor, 0, SIZE)
    again = os.dup(memory[0].descriptor)
    assert views.lying(again, 0, SIZE) is first
    os.close(again)
    memory[0].vector[:] = 3.0
    assert np.all(first == 3.0)
    for one in memory[1:]:
        assert views.lying(one.descriptor, 4, SIZE - 1) is not None
        assert views.lying(one.descriptor, 0, SIZE + 1) is None
    assert len(views.kept) == Views.MOST
    assert views.lying(memory[0].descriptor, 0, SIZE) is not first
    assert len(views.kept) == Views.MOST


def test_a_forked_child_has_neither_the_memory_nor_its_descriptor(channels):
    memory = HostMemory(SIZE)
    near, far = channels
    held = [memory.descriptor, near.socket.fileno(), far.socket.fileno()]
    read, write = os.pipe()
    child = os.fork()
    if not child:
        with open("/proc/self/maps") as lines:
            mapped = any("memfd:gossip" in line for line in lines)
        links = [os.path.exists(f"/proc/self/fd/{descriptor}") for descriptor in held]
        os.write(write, bytes([mapped, *links]))
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(read, 9) == bytes(4)
    os.close(read)
    os.close(write)
    assert near.open
    memory.vector[:] = 1.0


# -- receivers ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", sorted(name for name, codec in CODECS.items() if not codec.needs_spread))
@pytest.mark.parametrize("plain", [False, True])
def test_a_difference_is_bit_for_bit_what_a_stream_gives(name, plain):
    a, b = pair(SIZE)
    codec = get_codec(name)
    ends = [DifferenceReceiver(7, a, np.empty_like(a), codec, plain=plain) for _ in range(2)]
    for frame in frames(Sender(7, b, codec, 4096)):
        assert deliver(ends[0], *frame)
    while not ends[1].done:
        assert ends[1].take(b[ends[1].position : ends[1].position + 4096])
        assert not ends[1].filling
    assert np.array_equal(ends[0].out, ends[1].out)
    assert (ends[0].difference_sq, ends[0].own_sq) == (ends[1].difference_sq, ends[1].own_sq)


def test_a_newcomer_takes_and_compares_a_piece_as_from_a_stream():
    a, b = pair(SIZE)
    taken, compared = PieceReceiver(7, a, 1_000, 5_000), ComparingReceiver(8, b, 1_000, 5_000)
    for receiver in (taken, compared):
        while not receiver.done:
            assert receiver.take(b[1_000 + receiver.position : 5_000][:1_024])
    assert np.array_equal(a[1_000:5_000], b[1_000:5_000])
    assert not np.array_equal(a[:1_000], b[:1_000])
    assert compared.difference_sq == 0.0
    bad = np.full(4_000, np.nan, np.float32)
    with pytest.raises(ProtocolError):
        PieceReceiver(9, a, 1_000, 5_000).take(bad)
    assert np.isfinite(a).all()


class Restless(np.ndarray):
    """Values that change whenever they were read."""

    def __array_ufunc__(self, ufunc, method, *inputs, **options):
        found = getattr(ufunc, method)(*(np.asarray(one) for one in inputs), **options)
        np.asarray(self)[:] += 1
        return found


def test_of_a_vector_that_changes_under_the_reader_only_what_was_read_counts(monkeypatch):
    monkeypatch.setattr(kernel, "passes", None)
    a, b = pair(SIZE)
    receiver = DifferenceReceiver(7, a, np.empty_like(a), get_codec("fp32"))
    first = b - a
    assert receiver.take(b.view(Restless))
    assert np.array_equal(receiver.out, first)
    assert receiver.difference_sq == squares(first)
    assert not np.array_equal(b - a, first), "it did change"


@pytest.mark.parametrize("codec", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("with_what", ["compiled", "numpy"])
def test_norms_are_of_what_was_read_whoever_writes_there_meanwhile(codec, with_what, monkeypatch):
    monkeypatch.setattr(kernel, "passes", passes() if with_what == "compiled" else None)
    ours, theirs = pair(300_000)
    one, other, over = theirs.copy(), theirs[::-1].copy(), threading.Event()

    def write():
        while not over.is_set():
            theirs[:] = one
            theirs[:] = other

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(5):
            receiver = DifferenceReceiver(7, ours, np.empty_like(ours), get_codec(codec))
            assert receiver.take(theirs)
            assert receiver.difference_sq == squares(receiver.out)
    finally:
        over.set()
        writer.join()


# -- the pool ----------------------------------------------------------------------------------------------------
def test_vectors_lie_in_memory_of_the_host_once_they_are_shared():
    pool = VectorPool(ModelState({"x": np.zeros(SIZE, np.float32)}))
    kept, used = pool.take(), pool.take()
    pool.give(kept)
    pool.keep(kept)
    assert HostMemory.of(kept.array) is None
    pool.share()
    assert pool.held == 0
    assert pool.last is None, "it is kept no longer"
    pool.give(used)
    assert pool.held == 0, "made before, and replaced"
    for _ in range(2):
        vector = pool.take()
        assert HostMemory.of(vector.array) is not None
        assert not vector.array.any()
        pool.give(vector)
    assert pool.take().array is vector.array
    assert HostMemory.of(pool.take(VectorPool.SHARED_ELEMENTS - 1).array) is None


def test_without_a_descriptor_left_vectors_are_as_before(monkeypatch):
    pool = VectorPool(ModelState({"x": np.zeros(SIZE, np.float32)}))
    pool.share()

    def none_left(*arguments):
        raise OSError(24, "too many open files")

    monkeypatch.setattr(os, "memfd_create", none_left)
    vector = pool.take()
    assert HostMemory.of(vector.array) is None
    assert vector.array.size == SIZE


def test_a_state_with_buffers_of_its_own_keeps_them():
    class Locked(ModelState):
        def takes(self, vector):
            return False

    pool = VectorPool(Locked({"x": np.zeros(SIZE, np.float32)}))
    before = pool.take()
    pool.give(before)
    pool.share()
    vector = pool.take()
    assert vector.array is before.array
    vector = pool.take()
    assert HostMemory.of(vector.array) is None
    pool.give(vector)
    assert pool.take().array is vector.array


# -- the side channel --------------------------------------------------------------------------------------------
def test_the_name_of_a_host_is_the_same_for_all_who_can_share_and_says_nothing(monkeypatch):
    name = host_name({})
    assert name == host_name({"GOSSIP_SHARED_MEMORY": "on"})
    assert len(name) <= 64
    assert shared.BOOT_ID.read_text().strip() not in name
    assert host_name({"GOSSIP_SHARED_MEMORY": "off"}) is None
    monkeypatch.setattr(os, "geteuid", lambda: NOBODY)
    assert host_name({}) not in (None, name)
    monkeypatch.setattr(shared, "NAMESPACES", ("none of these",))
    assert host_name({}) is None


def test_what_was_passed_is_there_when_the_session_is_heard_of(channels):
    near, far = channels
    memory = HostMemory(SIZE)
    assert near.pass_on(5, memory.descriptor)
    assert near.pass_on(6, memory.descriptor)
    taken = far.take(6)
    assert os.fstat(taken).st_ino == os.fstat(memory.descriptor).st_ino
    assert not os.get_inheritable(taken)
    assert far.take(7) is None
    os.close(taken)
    os.close(far.take(5))
    assert far.take(5) is None
    near.views.lying(memory.descriptor, 0, SIZE)
    near.close()
    assert not near.views.kept
    assert not far.open
    assert not far.pass_on(8, memory.descriptor)


def test_threads_may_look_at_the_same_time_whether_a_channel_is_open(channels):
    near, far = channels
    faults = []

    def look():
        try:
            assert all(near.open for _ in range(3_000))
        except BaseException as error:
            faults.append(error)

    threads = [threading.Thread(target=look) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults
    far.close()
    assert not near.open
    near.close()
    assert not near.open


def test_a_flood_of_descriptors_takes_no_more_than_four(channels):
    near, far = channels
    memory, before = HostMemory(SIZE), len(os.listdir("/proc/self/fd"))
    sent = 0
    while near.pass_on(sent, memory.descriptor) and sent < 10_000:
        sent += 1
    assert near.closed, "it does not wait for who takes nothing"
    while far.take(1 << 40) is None and far.passed and not os.close(far.passed.popitem()[1]):
        assert len(far.passed) <= shared.WAITING
    far.close()
    assert len(os.listdir("/proc/self/fd")) == before - 2


@pytest.mark.parametrize("data", [bytes(7), bytes(9), b"x"])
def test_a_descriptor_beside_a_message_of_the_wrong_length_is_closed(channels, data):
    near, far = channels
    descriptor = sealed_file(10)
    before = len(os.listdir("/proc/self/fd"))
    rights = socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("i", descriptor)
    for _ in range(3):
        far.socket.sendmsg([data], [rights])
        assert near.take(int.from_bytes(data[:8], "big")) is None
    assert len(os.listdir("/proc/self/fd")) == before
    os.close(descriptor)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs a second user")
def test_another_users_process_is_neither_let_in_nor_trusted():
    place = MeetingPlace()
    os.seteuid(NOBODY)
    try:
        foreign = MeetingPlace()
        assert connected(place.name, place.token) is None, "it is another's"
        knocking = shared.fresh()
        knocking.connect(shared.abstract(place.name))
        knocking.send(place.token)
    finally:
        os.seteuid(0)
    assert place.met() is None
    assert connected(foreign.name, foreign.token) is None
    ours = connected(place.name, place.token)
    met = place.met()
    assert met is not None, "whoever else knocked"
    for one in (knocking, ours, met, place, foreign):
        one.close()


def test_who_does_not_know_the_token_is_not_let_in():
    place = MeetingPlace()
    silent = shared.fresh()
    silent.connect(shared.abstract(place.name))
    wrong = connected(place.name, bytes(16))
    right = connected(place.name, place.token)
    met = place.met()
    assert met.pass_on(1, HostMemory(10).descriptor)
    os.close(right.take(1))
    assert not wrong.open
    assert place.met() is None
    for one in (silent, wrong, place, met, right):
        one.close()
    assert connected(place.name, place.token) is None, "nobody is there any more"


def test_credentials_are_the_kernels(channels):
    near, _ = channels
    found = near.socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, shared.CREDENTIALS.size)
    assert struct.unpack("3i", found)[0] == os.getpid()
    assert isinstance(near, SideChannel)
