"""FedAvg of Flower, with the network of `anyfleet.tasks.zoo.cnn_mnist` and the same local training.

It imports nothing of Anyfleet: stock nodes start a process for each message, which should not pay
for more than it needs. The server notes each round in a file: when it ended, and how long the
slowest device trained.
"""

import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from torch import nn
from torch.nn import functional

client = ClientApp()
server = ServerApp()


def net() -> nn.Module:
    """Return the network: 37,610 parameters."""
    return nn.Sequential(
        *(nn.Conv2d(1, 8, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(8, 16, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 10)),
    )


@client.train()
def train(message: Message, context: Context) -> Message:
    """Train on the device's own data for one epoch."""
    torch.set_num_threads(1)
    given, config = np.load(str(context.node_config["data"])), context.run_config
    x, y = torch.from_numpy(given["x"]), torch.from_numpy(given["y"])
    model, batch = net(), int(config["batch-size"])
    arrays: Any = message.content["arrays"]
    model.load_state_dict(arrays.to_torch_state_dict())
    began = time.perf_counter()
    optimiser = torch.optim.SGD(
        model.parameters(), lr=float(config["lr"]), momentum=float(config["momentum"])
    )
    order = torch.randperm(len(x))
    for start in range(0, len(x), batch):
        rows = order[start : start + batch]
        optimiser.zero_grad()
        functional.cross_entropy(model(x[rows]), y[rows]).backward()  # type: ignore[no-untyped-call]
        optimiser.step()
    seconds = time.perf_counter() - began
    content: dict[str, Any] = {
        "arrays": ArrayRecord(model.state_dict()),
        "metrics": MetricRecord({"num-examples": len(x), "seconds": seconds}),
    }
    return Message(RecordDict(content), reply_to=message)


class Noted(FedAvg):
    """FedAvg that notes each round in a file."""

    notes = Path()

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
        """Aggregate as FedAvg does, and write a line."""
        came = list(replies)
        made = super().aggregate_train(server_round, came)
        seconds = [_seconds(each) for each in came if each.has_content()]
        line = {"time": time.time(), "compute": max(seconds, default=0.0), "replies": len(seconds)}
        with self.notes.open("a", encoding="utf-8") as out:
            out.write(json.dumps(line) + "\n")
        return made


def _seconds(reply: Message) -> float:
    metrics: Any = reply.content["metrics"]
    return float(metrics["seconds"])


@server.main()
def main(grid: Grid, context: Context) -> None:
    """Play all rounds, with every node in each of them."""
    config = context.run_config
    nodes = int(config["nodes"])
    strategy = Noted(
        fraction_train=1.0,
        min_train_nodes=nodes,
        min_available_nodes=nodes,
        fraction_evaluate=0.0,
    )
    strategy.notes = Path(str(config["notes"]))
    strategy.start(grid, ArrayRecord(net().state_dict()), num_rounds=int(config["rounds"]))
