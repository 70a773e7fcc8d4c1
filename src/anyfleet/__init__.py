"""Federated learning on unequal devices: cut any model to size, run any method through one loop.

>>> from anyfleet import Experiment, methods, play, tasks
>>> experiment = Experiment(tasks.Embedded(limit=600), methods.heterofl(lr=0.05), rounds=1)
>>> [result.record.round_index for result in play(experiment)]
[0]
"""

import typing
from importlib import import_module as _import_module

if typing.TYPE_CHECKING:
    from anyfleet import elastic, methods, tasks
    from anyfleet.analysis.summaries import summarise, to_target
    from anyfleet.core.loop import run
    from anyfleet.core.method import Method
    from anyfleet.elastic import trace
    from anyfleet.errors import AnyfleetError
    from anyfleet.experiment import Experiment, RoundRecord, RoundResult, load, play
    from anyfleet.runtime import Sequential, Simulated, Stacked, Threads
    from anyfleet.tasks import Split, Task
    from anyfleet.world import Fleet

__all__ = [
    "AnyfleetError",
    "Experiment",
    "Fleet",
    "Method",
    "RoundRecord",
    "RoundResult",
    "Sequential",
    "Simulated",
    "Split",
    "Stacked",
    "Task",
    "Threads",
    "__version__",
    "elastic",
    "load",
    "methods",
    "play",
    "run",
    "summarise",
    "tasks",
    "to_target",
    "trace",
]

__version__ = "0.1.0"

_HOMES = {
    "anyfleet.analysis.summaries": ("summarise", "to_target"),
    "anyfleet.core.loop": ("run",),
    "anyfleet.core.method": ("Method",),
    "anyfleet.elastic": ("trace",),
    "anyfleet.errors": ("AnyfleetError",),
    "anyfleet.experiment": ("Experiment", "RoundRecord", "RoundResult", "load", "play"),
    "anyfleet.runtime": ("Sequential", "Simulated", "Stacked", "Threads"),
    "anyfleet.tasks": ("Split", "Task"),
    "anyfleet.world": ("Fleet",),
}
_PACKAGES = ("elastic", "methods", "tasks")


def __getattr__(name: str) -> object:
    """Import a public name when it is first used: torch takes seconds, `--version` must not."""
    if name in _PACKAGES:
        return _import_module(f"anyfleet.{name}")
    for module, names in _HOMES.items():
        if name in names:
            value: object = getattr(_import_module(module), name)
            globals()[name] = value
            return value
    raise AttributeError(f"module 'anyfleet' has no attribute {name!r}")
