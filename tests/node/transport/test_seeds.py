"""Seeds that are looked up: names with all their addresses, files that fill, functions of the program."""

import logging
import socket
import sys
import threading
import time
from dataclasses import replace

import pytest
import trio

from gossip.errors import ConfigError, LocalError
from gossip.ids import Address, PeerId, parse_address
from node import Node
from node.identity.keys import InviteToken, new_secret, parse_secret
from node.options import NodeOptions
from node.settings import Settings
from node.transport import seeds as module
from node.transport.seeds import MAX_FOUND, MAX_TEXTS, SeedLookup
from tests.harness.ports import free_port
from tests.node.conftest import QUICK
from tests.node.trainees import alive, heard_of, linear

HERE, SOMEBODY = Address("127.0.0.1", 7700), PeerId(b"s" * 16)
PATIENT = replace(QUICK, join_timeout_s=25.0)


def lookup(*texts, secret=None, bound=HERE, told=None):
    """Return the SeedLookup that a node makes of these options."""
    given = Settings.gather(NodeOptions(seeds=texts), {})
    tell = (lambda sentence: None) if told is None else told.append
    return SeedLookup(given.seeds, given.expected, given.sources, secret or given.secret, bound, tell)


def found(made, times=1):
    """Look so many times. Return what the last look found."""
    return [trio.run(made.poll) for _ in range(times)][-1]


@pytest.fixture
def resolver(monkeypatch):
    """Stand in for the system's resolver; return its table of names."""
    names = {}

    def stand_in(host, port):
        if host not in names:
            raise socket.gaierror("no such name")
        return list(names[host])

    monkeypatch.setattr(module, "resolve_host", stand_in)
    return names


# -- a look ------------------------------------------------------------------------------------------------------------
def test_every_address_of_a_name_is_a_seed_without_our_own(resolver):
    resolver["swarm"] = ["127.0.0.1", "10.0.0.2", "10.0.0.3", "fd00::4"]
    made = lookup("swarm:7700", "10.0.0.9:1")
    assert made.is_needed
    assert made.fixed == (Address("10.0.0.9", 1),)
    got = found(made)
    others = {Address("10.0.0.2", 7700), Address("10.0.0.3", 7700), Address("fd00::4", 7700)}
    assert set(got.addresses) == others | {Address("10.0.0.9", 1)}
    assert got.names == dict.fromkeys([HERE, *others], "swarm:7700"), "people see the name that they gave"
    assert not lookup("10.0.0.9:1", "[::1]:7").is_needed


def test_a_node_that_listens_everywhere_knows_its_own_addresses_by_their_port(resolver):
    made = lookup("swarm:7700", bound=Address("0.0.0.0", 7700))
    resolver["swarm"] = ["127.0.0.1", "127.0.0.7", "192.0.2.1"]
    assert found(made).addresses == (Address("192.0.2.1", 7700),)
    other_port = lookup("swarm:7700", bound=Address("0.0.0.0", 7701))
    assert len(found(other_port).addresses) == 3, "two nodes of one machine"


def test_an_address_at_which_this_node_met_itself_is_left_out_from_then_on(resolver):
    resolver["swarm"] = ["10.0.0.1", "10.0.0.2"]
    made = lookup("swarm:7700")
    made.on_own_address(Address("10.0.0.1", 7700))
    assert found(made).addresses == (Address("10.0.0.2", 7700),)


def test_a_name_that_stands_for_nothing_stays_and_one_that_did_stands_for_what_it_did(resolver):
    made = lookup("swarm:7700")
    assert found(made).addresses == (Address("swarm", 7700),), "dialling it says why"
    resolver["swarm"] = ["10.0.0.2"]
    assert found(made).addresses == (Address("10.0.0.2", 7700),)
    del resolver["swarm"]
    assert found(made).addresses == (Address("10.0.0.2", 7700),)


def test_the_ids_of_seeds_and_invites_hold_for_what_they_stand_for(resolver, tmp_path):
    resolver["swarm"] = ["10.0.0.2", "10.0.0.3"]
    secret = parse_secret(new_secret())
    invite = InviteToken(secret, (Address("10.0.0.4", 1),), SOMEBODY).text
    (tmp_path / "seeds").write_text(f"# nodes\n\n  {invite}\n10.0.0.5:1#{'ab' * 16}\n10.0.0.6:1")
    got = found(lookup(f"swarm:7700#{'cd' * 16}", f"@{tmp_path}/seeds"))
    whose = {address: got.expected.get(address, b"").hex() for address in got.addresses}
    assert whose == {
        Address("10.0.0.2", 7700): "cd" * 16, Address("10.0.0.3", 7700): "cd" * 16,
        Address("10.0.0.4", 1): SOMEBODY.hex(), Address("10.0.0.5", 1): "ab" * 16, Address("10.0.0.6", 1): "",
    }  # fmt: skip


def test_a_look_brings_so_many_addresses_and_others_the_next_time(resolver, tmp_path):
    resolver["swarm"] = [f"10.0.{i // 250}.{i % 250 + 1}" for i in range(2_000)]
    made = lookup("swarm:7700", "10.9.9.9:9")
    first, second = found(made), found(made)
    assert len(first.addresses) == len(second.addresses) == MAX_FOUND + 1
    assert set(first.addresses) != set(second.addresses)
    assert Address("10.9.9.9", 9) in set(first.addresses) & set(second.addresses), "what was named is always there"
    (tmp_path / "seeds").write_text("".join(f"10.1.{i // 250}.{i % 250}:7700\n" for i in range(50_000)))
    made = lookup(f"@{tmp_path}/seeds", endless)
    assert len(found(made).addresses) == MAX_FOUND
    assert max(map(len, made.texts.values())) == MAX_TEXTS


def endless():
    while True:
        yield "10.0.0.1:7"


def test_a_file_may_come_later_and_be_empty_at_first_and_what_it_named_outlives_it(tmp_path):
    file, told = tmp_path / "seeds", []
    made = lookup(f"@{file}", told=told)
    label = f"@{file}"
    assert found(made, 3).missing == {label: "cannot be read (no such file or directory)"}
    assert told == [f"{label} cannot be read (no such file or directory); it is asked for seeds again and again."]
    file.write_text("")
    assert found(made).missing == {label: "names no node yet"}
    file.write_text("127.0.0.1:7700\n")
    assert found(made).missing == {"127.0.0.1:7700": "is this node itself"}
    file.write_text("10.0.0.2:7700\n127.0.0.1:7700\n")
    assert found(made).addresses == (Address("10.0.0.2", 7700),)
    file.unlink()
    assert found(made).addresses == (Address("10.0.0.2", 7700),)
    assert len(told) == 2, "gone again is told again"


@pytest.mark.parametrize(
    ("source", "why"),
    [
        (lambda: 1 / 0, "raised ZeroDivisionError (division by zero)"),
        (lambda: None, "returned NoneType, and not a list of texts"),
        (lambda: [7], "named int as a seed, and not a text"),
        (lambda: (_ for _ in [[]]), "named list as a seed, and not a text"),
        (lambda: sys.exit(5), "raised SystemExit (5)"),
    ],
)
def test_a_function_that_fails_is_told_once_and_asked_again(source, why):
    answers, told = [], []
    made = lookup(lambda: answers or source(), told=told)
    assert found(made, 3).missing == {"seeds()": why}
    assert told == [f"seeds() {why}; it is asked for seeds again and again."]
    answers.append("10.0.0.2:7700")
    assert found(made).addresses == (Address("10.0.0.2", 7700),)


@pytest.mark.parametrize("does_fail", [False, True])
def test_of_two_functions_each_is_told_apart(does_fail):
    told = []
    made = lookup(lambda: ["10.0.0.2:7"], lambda: 1 / 0 if does_fail else ["10.0.0.3:7"], told=told)
    got = found(made, 2)
    assert len(got.addresses) == 2 - does_fail
    assert len(got.missing) == len(told) == does_fail


def test_a_function_may_name_files_no_more_than_a_file_may_and_one_text_is_a_list(tmp_path):
    told = []
    got = found(lookup(lambda: "10.0.0.2:7", told=told))
    assert got.addresses == (Address("10.0.0.2", 7),)
    assert found(lookup(lambda: ["@elsewhere", "junk" * 1_000, "10.0.0.3:7"], told=told), 3).addresses == (
        Address("10.0.0.3", 7),
    )
    assert len(told) == 1
    assert "seeds() names something that is no seed, and is left out: '@elsewhere' is not an address" in told[0]


def test_an_invite_of_another_swarm_is_left_out_and_not_repeated(tmp_path):
    secret, told = parse_secret(new_secret()), []
    invite = InviteToken(secret, (Address("10.0.0.4", 1),), SOMEBODY).text
    made = lookup(lambda: [invite], told=told)
    assert found(made, 2).addresses == ()
    assert len(told) == 1
    assert "another secret" in told[0]
    assert invite not in told[0]
    assert found(lookup(lambda: [invite], secret=secret)).addresses == (Address("10.0.0.4", 1),)


def test_a_function_that_hangs_takes_one_thread_and_hides_no_other_seed(monkeypatch, resolver):
    monkeypatch.setattr(module, "POLL_S", 2.0)
    let_go, running = threading.Event(), []

    def hangs():
        running.append(1)
        let_go.wait(30)
        return ["10.0.0.9:9"]

    resolver["swarm"] = ["10.0.0.2"]
    made, told = lookup(hangs, "swarm:7700"), []
    made.log = told.append

    async def looks():
        for _ in range(4):
            got = await made.poll()
            assert got.addresses == (Address("10.0.0.2", 7700),)
            assert got.missing == {"seeds()": "did not answer within 2 s"}

    try:
        trio.run(looks)
        assert len(running) == len(told) == 1
    finally:
        let_go.set()


@pytest.mark.parametrize("text", ["@", "@ ", "@a\0b", 7, None])
def test_what_is_no_seed_is_refused_before_anything_starts(text):
    with pytest.raises(ConfigError, match=r"file of seeds|give texts"):
        lookup(text)


def test_the_path_of_a_file_is_where_it_was_when_the_node_was_made(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = Settings.gather(NodeOptions(), {"GOSSIP_SEEDS": "a:1,@seeds"})
    monkeypatch.chdir("/")
    assert given.sources == (tmp_path / "seeds",)
    assert given.seeds == (Address("a", 1),)


# -- nodes; when a peer looks again is in tests/gossip/test_bootstrap.py -----------------------------------------------
def company(*trainees):
    """Return a check that all have begun, and that each sees all of them."""
    return lambda: all(one.node is not None and alive(one) == len(trainees) for one in trainees)


def test_nodes_whose_name_lists_their_own_address_first_find_each_other(resolver, launch, until, caplog):
    caplog.set_level(logging.INFO, "gossip")
    port = free_port()
    hosts = resolver["swarm"] = ["127.0.0.2", "127.0.0.3", "127.0.0.4"]
    nodes = [launch(linear(), seeds=[f"swarm:{port}"], listen=f"{host}:{port}", config=PATIENT) for host in hosts]
    until(company(*nodes))
    until(lambda: len({node.side.network.peer.view.run_id for node in nodes}) == 1)
    assert not [sentence for sentence in heard_of(caplog, "started") if "starts alone" in sentence]


def test_nodes_with_one_empty_file_wait_until_it_fills_and_are_one_swarm(launch, until, caplog, tmp_path):
    caplog.set_level(logging.INFO, "gossip")
    file = tmp_path / "seeds"
    file.touch()
    where = [f"127.0.0.{n}:{free_port()}" for n in (2, 3)]
    nodes = [launch(linear(), seeds=[f"@{file}"], listen=each, config=PATIENT) for each in where]
    time.sleep(0.5)
    assert not any(node.running.is_set() for node in nodes)
    file.write_text("\n".join(where))
    until(company(*nodes))
    assert len(heard_of(caplog, "started")) == 1, "the run of both, which neither began alone"


def test_a_node_joins_whatever_its_other_seeds_do(train, until):
    let_go = threading.Event()
    first = train(linear())
    try:
        late = train(linear(1), seeds=[lambda: [str(let_go.wait(60))], first.node.address], config=PATIENT)
        until(company(first, late))
        answer = iter([["junk"], [first.node.address]])
        last = train(linear(2), seeds=lambda: next(answer), config=PATIENT)
        until(company(first, late, last))
    finally:
        let_go.set()


def test_a_node_that_must_join_says_what_its_sources_lack(tmp_path):
    file = tmp_path / "seeds"
    node = Node(linear(), seeds=[f"@{file}", lambda: []], config=QUICK, join_or_fail_s=3.0)
    with pytest.raises(LocalError) as error:
        node.start()
    assert str(error.value) == (
        f"Could not join within 3 s: @{file} cannot be read (no such file or directory); seeds() names no node yet."
    )


def test_of_a_name_with_several_addresses_one_that_answers_is_enough(resolver, train, until, caplog):
    first = train(linear())
    port = parse_address(first.node.address).port
    resolver["swarm"] = ["127.0.0.9", "127.0.0.1"]
    late = train(linear(1), seeds=[f"swarm:{port}"])
    until(company(first, late))
    assert not heard_of(caplog, "seed")
    resolver["nobody"] = ["127.0.0.8", "127.0.0.9"]
    train(linear(2), seeds=[f"nobody:{port}"], config=replace(QUICK, join_timeout_s=0.5))
    (told,) = heard_of(caplog, "seed")
    assert f"Seed nobody:{port} refused the connection: no node listens there; it is tried again and again." in told
