"""Your own network, loss and data on unequal devices; then fine-tuning from what was saved."""

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils.data import TensorDataset as Pairs

from anyfleet import Experiment, Split, Task, methods, play, tasks

torch.manual_seed(0)
x = torch.randn(2000, 2)
net = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
own = {"loss": nn.CrossEntropyLoss(reduction="none"), "metrics": {"accuracy": tasks.accuracy}}
for name, target, start in (("ring", x.norm(dim=1) > 1.2, None), ("half", x[:, 0] > 0, "ring")):
    state = load_file(f"{start}.safetensors") if start else None
    net[0].requires_grad_(start is None)  # fine-tuning leaves the first layer as it was
    task = Task.of(net, Pairs(x, target.long()), split=Split(devices=8), state=state, **own)
    *_, last = play(Experiment(task, methods.heterofl(lr=0.5, count=8, epochs=2), rounds=5))
    print(f"{name}: accuracy {last.record.accuracy:.2f} after {last.record.time:.2f} s simulated")
    save_file(dict(last.round.params), f"{name}.safetensors")
