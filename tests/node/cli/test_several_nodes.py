"""Several Nodes in one process, and Nodes in processes that a script starts: each has an address of its own."""

import json
import multiprocessing

import pytest
from torch import nn

from gossip.errors import ConfigError, LayoutError, LocalError
from gossip.ids import Address
from node import Node, running
from node.cli.local import free_port, run_local
from node.options import NodeOptions
from node.settings import Settings
from tests.harness import warm
from tests.node.commands import gossip, secret_of
from tests.node.pretended import script_of


def gathered(place, environment, **given):
    return Settings.gather(NodeOptions(**given), environment, place=place)


@pytest.fixture(autouse=True)
def first_places(monkeypatch):
    """Free the places that Nodes of earlier tests still take in this process."""
    monkeypatch.setattr(running, "_places", {})
    monkeypatch.setattr(running, "ports", {})


# -- settings ----------------------------------------------------------------------------------------------------------
def test_the_second_node_of_a_process_has_the_next_ports_and_files_of_its_own(tmp_path):
    environment = {
        "GOSSIP_LISTEN": "127.0.0.1:7700", "GOSSIP_ADVERTISE": "10.0.0.1:7700", "GOSSIP_PAGE": "127.0.0.1:7780",
        "GOSSIP_SEEDS": f"10.0.0.5:7700#{'ab' * 16},10.0.0.6:7800", "GOSSIP_STATE_DIR": str(tmp_path / "state"),
        "GOSSIP_TRACE": str(tmp_path / "trace.json"), "GOSSIP_WAIT_FOR": "3",
    }  # fmt: skip
    first, second = (gathered(place, environment) for place in (0, 1))
    assert first.seeds == (Address("10.0.0.5", 7700), Address("10.0.0.6", 7800))
    assert second.seeds == (Address("10.0.0.5", 7701), Address("10.0.0.6", 7801))
    assert (len(first.expected), second.expected) == (1, {}), "another id answers at the next port"
    assert second.listen == Address("127.0.0.1", 7701)
    assert second.advertise == Address("10.0.0.1", 7701)
    assert second.page == Address("127.0.0.1", 7781)
    assert (second.state_dir, second.trace) == (tmp_path / "state" / "node-2", tmp_path / "trace-2.json")
    assert first.wait_for == second.wait_for == 3


def test_what_the_program_names_stays_as_it_is(tmp_path):
    given = {"listen": "127.0.0.1:7", "seeds": ["h:8"], "state_dir": tmp_path, "advertise": "h:9"}
    first, second = (gathered(place, {"GOSSIP_LISTEN": "127.0.0.1:7700"}, **given) for place in (0, 1))
    for name in ("listen", "seeds", "state_dir", "advertise"):
        assert getattr(first, name) == getattr(second, name)


def test_a_second_node_uses_the_secret_that_the_first_has_kept(tmp_path):
    secret_of(tmp_path, "swarm.secret")
    first, second = (gathered(place, {"GOSSIP_STATE_DIR": str(tmp_path)}) for place in (0, 1))
    assert first.secret == second.secret is not None


def test_a_second_node_whose_seeds_stand_in_a_file_is_told_what_to_do(tmp_path):
    environment = {"GOSSIP_SEEDS": f"@{tmp_path / 'seeds'}"}
    assert gathered(0, environment).sources
    with pytest.raises(ConfigError, match=r"This is Node 2 of the process.*give it listen= and seeds= of its own"):
        gathered(1, environment)
    assert gathered(1, environment, seeds=["h:7"]).seeds == (Address("h", 7),)


# -- nodes of one process ----------------------------------------------------------------------------------------------
def test_two_nodes_of_a_process_listen_side_by_side_and_a_later_one_takes_the_place_of_one_that_ended(monkeypatch):
    port = free_port()
    monkeypatch.setenv("GOSSIP_LISTEN", f"127.0.0.1:{port}")
    with Node(nn.Linear(4, 2)) as first, Node(nn.Linear(8, 1)) as second:
        assert [first.address, second.address] == [f"127.0.0.1:{port}", f"127.0.0.1:{port + 1}"]
        first.close()
        with Node(nn.Linear(4, 2)) as third:
            assert third.address == f"127.0.0.1:{port}"


def test_a_node_over_the_same_model_takes_the_place_of_the_one_that_it_replaces(monkeypatch):
    port, model = free_port(), nn.Linear(4, 2)
    monkeypatch.setenv("GOSSIP_LISTEN", f"127.0.0.1:{port}")
    Node(model).start()
    with Node(model) as again:
        assert again.address == f"127.0.0.1:{port}"


def test_the_second_node_listens_next_to_a_first_one_that_chose_its_port_itself(monkeypatch):
    monkeypatch.setenv("GOSSIP_PROGRESS", "off")  # `gossip run` sets this.
    first, second = Node(nn.Linear(4, 2)), Node(nn.Linear(8, 1))
    monkeypatch.setitem(running.ports, 0, port := free_port())
    with second:
        assert second.address == f"127.0.0.1:{port + 1}"
    first.close()


GAN = """
    import torch
    from gossip import Node
    generator, discriminator = torch.nn.Linear(4, 2), torch.nn.Linear(8, 1)
    with Node(generator) as one, Node(discriminator) as two:
        print([len(node.members) for node in (one, two)], flush=True)
        for _ in range(10):
            one.step(samples=1), two.step(samples=1)
"""


@pytest.mark.usefixtures("warm_nodes")
def test_a_generator_and_a_discriminator_as_two_nodes_find_their_kind_in_all_processes(tmp_path, capsys):
    script = script_of(tmp_path, GAN)
    code = run_local(script, [], {"wait_for": 3, "wait_s": 600.0}, nodes=3, threads=1, log_dir=tmp_path / "logs")
    shown = capsys.readouterr()
    assert code == 0, shown.err
    assert sorted(shown.out.splitlines()) == [f"node {number}: [3, 3]" for number in range(3)]
    assert shown.err.count("│ 10    │ 10      │") == 6, "the steps and samples of each"
    for number in range(3):
        rows = map(json.loads, (tmp_path / "logs" / f"node-{number}.jsonl").read_text().splitlines())
        assert not [row["sentence"] for row in rows if row["event"] in ("refused", "waited")]


# -- processes that a script starts ------------------------------------------------------------------------------------
def test_a_process_that_a_script_starts_runs_no_second_node_at_the_address_of_the_script(tmp_path):
    script = script_of(
        tmp_path,
        """
        import multiprocessing, torch
        from node import Node

        def work(options):
            try:
                with Node(torch.nn.Linear(4, 2), **options): print("runs", flush=True)
            except Exception as error: print(error, flush=True)

        def start(**options):
            child = multiprocessing.get_context("fork").Process(target=work, args=(options,))
            child.start(), child.join()

        start()
        with Node(torch.nn.Linear(4, 2)): start(), start(listen="127.0.0.1:0")
        start()
        """,
    )
    done = gossip("run", "--quiet", script)
    assert done.returncode == 0, done.stderr
    told = "Another process of this script runs a Node already, at the address that gossip gave to the script"
    assert [line.partition(": make")[0] for line in done.stdout.splitlines()] == ["runs", told, "runs", "runs"]


def test_a_worker_that_imports_an_unguarded_script_again_starts_no_second_node(tmp_path):
    script = script_of(
        tmp_path,
        """
        import multiprocessing, torch
        from node import Node
        with Node(torch.nn.Linear(4, 2)) as node:
            child = multiprocessing.get_context("spawn").Process(target=print)
            child.start(), child.join()
            print(child.exitcode, len(node.members))
        """,
    )
    for words in ((script,), ("-m", "gossip", "run", "--quiet", script)):
        done = warm.run(*words)
        assert (done.returncode, done.stdout) == (0, "1 1\n"), done.stderr
        assert running.IMPORTED in done.stderr


def test_a_node_that_an_imported_script_only_makes_is_no_error(monkeypatch):
    monkeypatch.setattr(multiprocessing.current_process(), "_inheriting", True, raising=False)
    node = Node(nn.Linear(4, 2))
    with pytest.raises(LocalError, match="imports the script again"):
        node.start()


def test_two_nodes_that_would_both_mix_one_tensor_are_refused_unless_one_leaves_it_out():
    trunk = nn.Linear(4, 4)
    models = [nn.ModuleDict({"trunk": trunk, "head": nn.Linear(4, 2)}) for _ in range(2)]
    with Node(models[0], listen="none"):
        with pytest.raises(LayoutError, match=r"'trunk\.bias' is in the model of another Node of this process too"):
            Node(models[1], listen="none").start()
        with Node(models[1], local=["trunk.*"], listen="none") as node:
            node.step(samples=1)
    Node(models[1], listen="none").start().close()
