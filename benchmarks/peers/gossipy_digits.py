"""gossipy, a simulator of gossip learning: updates of nodes per CPU second on scikit-learn's digits.

    python benchmarks/peers/gossipy_digits.py [--model linear|mlp] [--nodes 100] [--rounds 30]

Once a round each node pushes its model to one of its 8 neighbours in a random regular graph, without delay. A node that
receives a model averages it with its own and trains an epoch on its own samples in batches of 8; that is one update.
It has 16 samples (drawn with overlap), so that an epoch is two steps at any number of nodes.

Run it with the Python of an environment of its own. gossipy-dfl declares that it needs torchvision and pytest, but this
benchmark does not:

    pip install torch==2.13.0 dill networkx pandas rich scikit-learn tqdm matplotlib
    pip install --no-deps gossipy-dfl==0.0.1

Prints one JSON line. The clock starts when the nodes are built and initialised. It includes the cost of gossipy's own
report: the evaluation of 1 % of the nodes in each round.
"""

import argparse
import io
import json
import logging
import sys
import time
from contextlib import redirect_stdout
from types import SimpleNamespace
from unittest import mock

SAMPLES = 16  # For each node.


def job(model, nodes, rounds):
    import networkx
    import torch
    from sklearn.datasets import load_digits

    # gossipy.data imports torchvision for data sets that are not used here: a stand-in is enough.
    absent = ("torchvision", "torchvision.datasets", "torchvision.transforms")
    with mock.patch.dict(sys.modules, {name: mock.MagicMock() for name in absent}):
        import gossipy
        from gossipy.core import AntiEntropyProtocol, ConstantDelay, CreateModelMode, StaticP2PNetwork
        from gossipy.data import DataDispatcher
        from gossipy.data.handler import ClassificationDataHandler
        from gossipy.model.handler import TorchModelHandler
        from gossipy.model.nn import LogisticRegression, TorchMLP
        from gossipy.node import GossipNode
        from gossipy.simul import GossipSimulator, SimulationReport

    count = SimpleNamespace(updates=0)

    class Counted(TorchModelHandler):
        def _update(self, data):
            count.updates += 1
            super()._update(data)

    torch.set_num_threads(1)
    gossipy.LOG.setLevel(logging.ERROR)
    gossipy.set_seed(0)
    pixels, labels = load_digits(return_X_y=True)
    handler = ClassificationDataHandler(
        torch.from_numpy(pixels / 16).float(), torch.from_numpy(labels).long(), test_size=0.2
    )
    dispatcher = DataDispatcher(handler, n=nodes, eval_on_user=False, auto_assign=False)
    dispatcher.set_assignments([torch.randperm(handler.size())[:SAMPLES].tolist() for _ in range(nodes)], None)
    graph = networkx.to_numpy_array(networkx.random_regular_graph(8, nodes, seed=0))
    prototype = Counted(
        net=LogisticRegression(64, 10) if model == "linear" else TorchMLP(64, 10, hidden_dims=(64,)),
        optimizer=torch.optim.SGD, optimizer_params={"lr": 0.1}, criterion=torch.nn.CrossEntropyLoss(),
        local_epochs=1, batch_size=8, create_model_mode=CreateModelMode.MERGE_UPDATE,
    )  # fmt: skip
    simulator = GossipSimulator(
        nodes=GossipNode.generate(
            data_dispatcher=dispatcher, p2p_net=StaticP2PNetwork(nodes, graph), model_proto=prototype,
            round_len=100, sync=True,
        ),
        data_dispatcher=dispatcher, delta=100, protocol=AntiEntropyProtocol.PUSH, delay=ConstantDelay(0),
        sampling_eval=0.01,
    )  # fmt: skip
    report = SimulationReport()
    simulator.add_receiver(report)
    simulator.init_nodes()
    count.updates = 0
    with redirect_stdout(io.StringIO()):  # Hide gossipy's progress bar.
        begin = time.process_time()
        simulator.start(n_rounds=rounds)
        cpu_s = time.process_time() - begin
    return {
        "updates": count.updates, "cpu_s": cpu_s,
        "accuracy": round(float(report.get_evaluation(False)[-1][1]["accuracy"]), 4),
    }  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=["linear", "mlp"], default="linear")
    parser.add_argument("--nodes", type=int, default=100, help="9 to 1437: gossipy wants a training sample for each")
    parser.add_argument("--rounds", type=int, default=30)
    args = parser.parse_args()
    print(json.dumps(job(args.model, args.nodes, args.rounds)))


if __name__ == "__main__":
    main()
