"""Federated learning on unequal devices: cut any model to size, run any method through one loop.

>>> from anyfleet import Experiment, methods, play, tasks
>>> experiment = Experiment(tasks.Embedded(limit=600), methods.heterofl(lr=0.05), rounds=1)
>>> [result.record.round_index for result in play(experiment)]
[0]

What a run is made of: `tasks` (what is learned), `methods` (one paper, one function), `parts` (what
fills the slots of a method, and how to write one), `world` (the simulated fleet), `runtime`
(engines). What comes out: `analysis`, `store`. Several runs: `study`, `together`. Beneath: `core`,
`elastic`, `measure`, `formulas`, `wire`, `config`, `hardware`, `papers`. Real fleets: `deployment`
(the server), `device`.
"""

import typing
from importlib import import_module as _import_module

if typing.TYPE_CHECKING:
    from anyfleet import (
        analysis,
        cli,
        config,
        core,
        deployment,
        device,
        elastic,
        errors,
        experiment,
        formulas,
        hardware,
        measure,
        methods,
        names,
        papers,
        parts,
        rng,
        runtime,
        store,
        study,
        tasks,
        together,
        wire,
        world,
    )
    from anyfleet.analysis.results import read_results
    from anyfleet.analysis.summaries import summarise, to_target
    from anyfleet.core.method import Method
    from anyfleet.elastic import trace
    from anyfleet.errors import AnyfleetError
    from anyfleet.experiment import Experiment, RoundRecord, RoundResult, load, play
    from anyfleet.runtime import Sequential, Simulated, Stacked, Threads, Workers
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
    "Workers",
    "__version__",
    "analysis",
    "cli",
    "config",
    "core",
    "deployment",
    "device",
    "elastic",
    "errors",
    "evidence",
    "experiment",
    "formulas",
    "hardware",
    "load",
    "measure",
    "methods",
    "names",
    "papers",
    "parts",
    "play",
    "read_results",
    "rng",
    "runtime",
    "store",
    "study",
    "summarise",
    "tasks",
    "to_target",
    "together",
    "trace",
    "wire",
    "world",
]

__version__ = "0.1.0"

# Where the public names are defined; every other one of `__all__` is a package or module in here.
_DEFINED = {
    "anyfleet.analysis.results": ("read_results",),
    "anyfleet.analysis.summaries": ("summarise", "to_target"),
    "anyfleet.core.method": ("Method",),
    "anyfleet.elastic": ("trace",),
    "anyfleet.errors": ("AnyfleetError",),
    "anyfleet.experiment": ("Experiment", "RoundRecord", "RoundResult", "load", "play"),
    "anyfleet.runtime": ("Sequential", "Simulated", "Stacked", "Threads", "Workers"),
    "anyfleet.tasks": ("Split", "Task"),
    "anyfleet.world": ("Fleet",),
}
_MODULE_OF = {name: module for module, names_ in _DEFINED.items() for name in names_}


def __getattr__(name: str) -> object:
    """Import a public name when it is first used: torch takes seconds, `--version` must not."""
    if name in _MODULE_OF:
        value: object = getattr(_import_module(_MODULE_OF[name]), name)
        globals()[name] = value
        return value
    if name in __all__:
        return _import_module(f"anyfleet.{name}")
    raise AttributeError(f"module 'anyfleet' has no attribute {name!r}")


def __dir__() -> list[str]:
    """Return all public names, also those that nobody has used yet: shells complete by them."""
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
