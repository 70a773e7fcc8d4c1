"""How far an order goes: functions, files and carriers of one order of one FedAvg round.

    python -m benchmarks.way
    python -m benchmarks.way --engines sequential

The third round of FedAvg with one device is watched, from issuing the order to the next model.
Counted are the different named functions of the package that run, the files they stand in, and how
often two calls that follow each other stand in different files. Structs are the dataclasses and
named tuples of the package that are made on the way; carriers are those that hold parameters of the
model or bytes, themselves or in what they hold.
"""

import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass, replace
from types import CodeType, FrameType
from typing import Any

from benchmarks.measuring import (
    WORKLOADS,
    Cell,
    Options,
    Table,
    attempted,
    built,
    given_options,
    parser,
    play_rounds,
    report,
)
from benchmarks.overhead import PACKAGE
from torch import Tensor

from anyfleet.methods import fedavg

ENGINES = ("sequential", "threads", "stacked")
HEAD = ("engine", "functions", "files", "changes of file", "calls", "structs", "carriers", "which")
# A dataclass is made by `__init__`, a named tuple by the others.
MAKERS = frozenset({"__init__", "__new__", "<lambda>", "_make", "_replace"})
DEPTH = 8  # of values inside values, to look for parameters in


@dataclass
class Way:
    """What was seen on the way of one order."""

    functions: set[CodeType] = field(default_factory=set)
    files: set[str] = field(default_factory=set)
    structs: set[str] = field(default_factory=set)
    carriers: dict[str, None] = field(default_factory=dict)  # in the order of their first making
    calls: int = 0
    changes: int = 0
    counting: bool = False  # what happens while it is not set is not on the way


@contextmanager
def watched(way: Way, shapes: frozenset[tuple[int, ...]]) -> Iterator[None]:
    """Watch every call in this thread and in those it starts, while `way.counting` is set.

    The threads of a pool begin with the first round: they are watched from then on, or never.
    """
    last = ""

    def see(frame: FrameType, event: str, value: Any) -> None:
        nonlocal last
        if not way.counting:
            return
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(PACKAGE):
            way.calls += 1
            way.changes += name != last
            # Newer versions of Python run comprehensions inside their function.
            if not frame.f_code.co_name.startswith("<"):
                way.functions.add(frame.f_code)
            way.files.add(name)
            last = name
        elif event == "return" and frame.f_code.co_name in MAKERS:
            made = frame.f_locals.get("self") if frame.f_code.co_name == "__init__" else value
            kind = type(made)
            if kind.__module__.startswith("anyfleet") and values(made) is not None:
                way.structs.add(kind.__qualname__)
                if kind.__qualname__ not in way.carriers and carries(made, shapes):
                    way.carriers[kind.__qualname__] = None

    sys.setprofile(see)
    threading.setprofile(see)
    try:
        yield
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def values(made: Any) -> list[Any] | None:
    """Return what the fields of a struct hold, or None for what is no struct."""
    if is_dataclass(made):
        return [made.__dict__.get(each.name) for each in fields(made)] if _plain(made) else None
    return list(made) if isinstance(made, tuple) and hasattr(made, "_fields") else None


def _plain(made: Any) -> bool:
    return hasattr(made, "__dict__")


def carries(value: Any, shapes: frozenset[tuple[int, ...]], depth: int = DEPTH) -> bool:
    """Return whether parameters of the model, or bytes, are in a value."""
    if isinstance(value, Tensor):
        shape = tuple(value.shape)
        return value.is_floating_point() and (shape in shapes or shape[1:] in shapes)
    if isinstance(value, bytes | bytearray | memoryview):
        return True
    if depth == 0:
        return False
    if isinstance(value, Mapping):
        inside: Sequence[Any] = list(value.values())
    elif isinstance(value, tuple | list):
        inside = value
    else:
        known = type(value).__module__.startswith("anyfleet")
        inside = (values(value) if known else None) or ()
    return any(carries(each, shapes, depth - 1) for each in inside)


def walked(engine: str, options: Options) -> Way:
    """Return what one order of the third round passes."""
    work = replace(WORKLOADS["tiny"], users=4, cohort=1)
    task, way = built(work, options.device), Way()
    rounds = play_rounds(fedavg(count=1), task, replace(options, engine=engine))
    # Wide enough that no other tensor has the shape of a matrix of the model by chance.
    shapes = frozenset(tuple(each.shape) for each in task.params.values() if each.ndim > 1)
    with watched(way, shapes):
        next(rounds)
        next(rounds)
        way.counting = True
        next(rounds)
        way.counting = False
    return way


def tables(options: Options, engines: Sequence[str] = ENGINES) -> list[Table]:
    """Walk the way of one order with every engine."""

    def row(engine: str) -> tuple[Cell, ...]:
        way = walked(engine, options)
        counts = (len(way.functions), len(way.files), way.changes, way.calls)
        return (*counts, len(way.structs), len(way.carriers), ", ".join(way.carriers))

    rows = [attempted(lambda: row(each), len(HEAD), each) for each in engines]  # noqa: B023
    return [Table("way", "The way of one order", HEAD, tuple(rows))]


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    read = parser(__doc__)
    read.add_argument("--engines", nargs="+", default=ENGINES)
    given = read.parse_args(arguments)
    options = given_options(given)
    report("way", tables(options, given.engines), options, given.out)


if __name__ == "__main__":
    main()
