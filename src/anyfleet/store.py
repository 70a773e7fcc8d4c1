"""A run on disk: what was run, every step as it happened, the model, the end.

    config.toml         the experiment, complete; `anyfleet run` takes it again
    papers.bib          BibTeX for the papers of the method and of its parts
    points.jsonl        one line per server step: time, traffic, energy, scores (study.Point)
    ledger.jsonl        one line per order: who, what it cost, why it was lost (ledger.Entries)
    model.safetensors   the shared model: the server's parameters and buffers
    summary.json        how it ended, and what it ran on
    curves.png          when matplotlib is there

A folder is never written into twice.

The model of a plain method is the module's state_dict: `module.load_state_dict(load_file(…))`. With
normalisation of its own for every width (`train.PerWidth`) there are further entries `…@…`: the
name of a tensor, then the width it belongs to. Leave them out to load the whole model.
"""

import math
import platform
import signal
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec
import safetensors.torch
import torch

import anyfleet
from anyfleet import config
from anyfleet.breakdown import Breakdown
from anyfleet.diagnosis import read_notes
from anyfleet.ledger import Entries
from anyfleet.loop import Step
from anyfleet.papers import bibliography, papers_of
from anyfleet.queries import summarise
from anyfleet.study import Experiment, Moment, Point


def fresh(parent: Path, name: str) -> Path:
    """A new folder `name`, or `name-2`, `name-3`, …, the first that is not there."""
    number = 1
    while True:
        path = parent / (name if number == 1 else f"{name}-{number}")
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            number += 1
        else:
            return path


def claim(path: Path) -> Path:
    """This very folder, made if need be; an error when something is in it."""
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise FileExistsError(f"{path} is there already and not empty: name another, or remove it.")
    path.mkdir(parents=True, exist_ok=True)
    return path


class Recording:
    """Writes a run into its folder, step by step. Use it in a `with`.

    However the block ends, by itself, by Ctrl-C or by an error, all steps so far are there, and
    so is the model after the last of them.
    """

    def __init__(self, folder: Path, experiment: Experiment, allow: Sequence[str] = ()) -> None:
        self.folder, self._experiment = folder, experiment
        self.points: list[Point] = []
        self._step: Step | None = None
        self._began = time.monotonic()
        _write(folder / "config.toml", describe(experiment, allow).encode())
        # The code that the configuration names may be elsewhere when the run is cited.
        _write(folder / "papers.bib", bibliography(papers_of(experiment.method)).encode())

    def append(self, moment: Moment) -> None:
        """Takes in a step; it is on disk when this returns."""
        with _undisturbed():
            _append(self.folder / "ledger.jsonl", moment.step.ledger.as_dicts())
            _append(self.folder / "points.jsonl", [moment.point])
            self.points.append(moment.point)
            self._step = moment.step

    def __enter__(self) -> "Recording":
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        ended = "finished" if kind is None else "failed"
        with _undisturbed():
            self._close("interrupted" if kind is KeyboardInterrupt else ended)

    def _close(self, ended: str) -> None:
        if self._step is not None:
            tree = {**self._step.params, **self._step.buffers}
            plain = {name: value.detach().contiguous().clone() for name, value in tree.items()}
            _write(self.folder / "model.safetensors", safetensors.torch.save(plain))
        summary = {
            "ended": ended,
            "anyfleet": anyfleet.__version__,
            "torch": str(torch.__version__),
            "python": platform.python_version(),
            "threads": torch.get_num_threads(),
            "seed": self._experiment.seed,
            "wall_seconds": time.monotonic() - self._began,
            "result": summarise(self.points) if self.points else None,
        }
        text = msgspec.json.format(msgspec.json.encode(summary), indent=2)
        _write(self.folder / "summary.json", text + b"\n")


def describe(experiment: Experiment, allow: Sequence[str] = ()) -> str:
    """An experiment as a run file."""
    head = f"# Anyfleet {anyfleet.__version__}, as it ran. Again: anyfleet run config.toml\n\n"
    allowed = {"allow": {"packages": list(allow)}} if allow else {}
    return head + config.to_toml({**config.dump(experiment, complete=True), **allowed})


def read_points(folder: Path) -> tuple[Point, ...]:
    """The steps of a run that lies in `folder`."""
    return tuple(_point(row) for row in _lines(folder / "points.jsonl"))


def read_ledger(folder: Path) -> Entries:
    """Every order of a run that lies in `folder`."""
    return Entries.of(_lines(folder / "ledger.jsonl"))


def _lines(file: Path) -> list[dict[str, Any]]:
    """What was written until now; JSON has no NaN: None stands for it."""
    lines = file.read_bytes().splitlines() if file.exists() else []
    return [msgspec.json.decode(line) for line in lines]


def _point(data: Mapping[str, Any]) -> Point:
    inner = {"scores": _numbers(data["scores"]), "notes": read_notes(data.get("notes", {}))}
    details = tuple(_breakdown(each) for each in data.get("details", ()))
    return Point(**_numbers(data) | inner | {"details": details})


def _breakdown(data: Mapping[str, Any]) -> Breakdown:
    return Breakdown(
        data["width"],
        tuple(map(_number, data["classes"])),
        tuple(map(_number, data["devices"])),
        _numbers(data["groups"]),
    )


def _numbers(table: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _number(value) for name, value in table.items()}


def _number(value: Any) -> Any:
    return math.nan if value is None else value


def _append(file: Path, rows: Iterable[Any]) -> None:
    """All lines in one write: a file never ends in the middle of one."""
    lines = b"".join(msgspec.json.encode(row) + b"\n" for row in rows)
    with file.open("ab", buffering=0) as out:
        out.write(lines)


def _write(file: Path, content: bytes) -> None:
    """The whole file or none: written beside it, then renamed."""
    beside = file.with_name(f".{file.name}.part")
    beside.write_bytes(content)
    beside.replace(file)


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Holds back Ctrl-C until the block is done. Only the main thread ever gets it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    caught: list[tuple[int, FrameType | None]] = []
    before = signal.signal(signal.SIGINT, lambda *event: caught.append(event))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if caught and callable(before):
        before(*caught[0])
