"""What a run tells about its method: notes of its steps, and what theory reads out of a ledger.

Ledgers and notes are facts; the formulas of METHODS §F are applied to them here.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from anyfleet.columns import Flags, Floats
from anyfleet.elastic import WHOLE, Priced
from anyfleet.formulas import extreme_share, label_distance, psi
from anyfleet.ledger import Entries
from anyfleet.local import limits, processed
from anyfleet.method import Method
from anyfleet.types import Task

MOST_EXTREME = 0.9  # of all utilities; beyond, a threshold does not fit (METHODS §1.10)

# --- notes ------------------------------------------------------------------------------------


class Noted(Protocol):
    """A point of a run, as far as it has notes."""

    @property
    def notes(self) -> Mapping[str, Any]: ...


def plain_notes(notes: Mapping[str, Any]) -> dict[str, Any]:
    """Notes as plain data for a record: numbers, lists of them, and numbers by device."""
    return {name: _plain(value) for name, value in notes.items() if not isinstance(value, Tensor)}


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, tuple | list) else value


def read_notes(notes: Mapping[str, Any]) -> dict[str, Any]:
    """Notes out of a file: JSON knows neither NaN nor numbers as keys."""
    return {name: _read(value) for name, value in notes.items()}


def _read(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {int(k) if k.isdecimal() else k: _read(inner) for k, inner in value.items()}
    if isinstance(value, list):
        return [_read(inner) for inner in value]
    return math.nan if value is None else value


# --- devices ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Contribution:
    """How often a device took part, was labelled as adverse, and was left out (METHODS §1.18)."""

    selected: int
    labelled: int
    excluded: int


def contributions(ledger: Entries, points: Iterable[Noted]) -> dict[int, Contribution]:
    """Of every device that was asked to train: an order reached it, at least in part.

    Not of those whom the planner or a lack of memory or link kept from it.
    """
    asked = _training(ledger) & (ledger.counted | (ledger.bits_down > 0))
    selected = Counter(ledger.device[asked].tolist())
    steps = [point.notes for point in points]
    labelled, excluded = (
        Counter(int(device) for notes in steps for device in notes.get(name, ()))
        for name in ("labelled", "excluded")
    )
    return {
        device: Contribution(count, labelled[device], excluded[device])
        for device, count in sorted(selected.items())
    }


def _training(ledger: Entries) -> Flags:
    """Rows about training: neither surveys, nor the second phase of what was trained before."""
    return np.array([kind in ("train", "hold") for kind in ledger.kind], dtype=bool)


def label_distances(task: Task) -> Floats:
    """How far the labels of each device are from those of all, 0 to 2 (METHODS §F.5)."""
    if not task.classified:
        return np.full(task.devices, np.nan)
    counts = np.array([_histogram(task, device) for device in range(task.devices)])
    sizes = np.maximum(counts.sum(axis=1, keepdims=True), 1)
    return label_distance(counts / sizes, counts.sum(axis=0) / max(1, counts.sum()))


def _histogram(task: Task, device: int) -> Floats:
    found: Floats = np.bincount(
        task.data(device).y.flatten().cpu().numpy(), minlength=task.classes
    ).astype(np.float64)
    return found


# --- depth, width, information ----------------------------------------------------------------


def depth_shares(ledger: Entries, firsts: Sequence[int]) -> Floats:
    """The shares of answers that counted by first trained layer, smallest width first.

    `firsts` are those of all widths, as `anyfleet.plan.depth.depths` finds them.
    """
    answers = [kind in ("train", "fetch") for kind in ledger.kind]
    first = ledger.first[ledger.counted & np.array(answers, dtype=bool)]
    widths = np.array(sorted(set(firsts), reverse=True))
    counts: Floats = (first == widths[:, None]).sum(axis=1) / max(1, len(first))
    return counts


def depth_psi(ledger: Entries, firsts: Sequence[int]) -> float:
    """FedPMT's psi (METHODS §F.1) of the answers in a ledger; infinite if nobody trains all."""
    return psi(depth_shares(ledger, firsts))


@dataclass(frozen=True)
class Informed:
    """A step of a method that looks at Fisher information; means over the answers that counted."""

    step: int
    fisher: float  # trace, of the devices that reported it, or NaN
    utility: float  # of the devices that chose by it, or NaN
    share: float  # of the model's width, as planned
    level: float  # 1 for the largest size that was planned in the run, 2 for the next, ...


def information(ledger: Entries) -> tuple[Informed, ...]:
    """Fisher information, utility and planned sizes of those who trained, step by step.

    Levels count the distinct sizes (share, then depth) that the ledger has anywhere, because a
    place in a menu means another size to a device whose menu is shorter.
    """
    columns = ledger.fisher, ledger.utility, ledger.share, _levels(ledger)
    trained = _training(ledger) & ledger.counted
    found = []
    for step in np.unique(ledger.step).tolist():
        rows = trained & (ledger.step == step)
        found.append(Informed(step, *(_mean(column[rows]) for column in columns)))
    return tuple(found)


def _levels(ledger: Entries) -> Floats:
    """The place of every planned size among those of all orders to train, from 1 on; or NaN."""
    sizes = list(zip((-ledger.share).tolist(), ledger.first.tolist(), strict=True))
    planned = sorted({sizes[row] for row in np.flatnonzero(_training(ledger))})
    places = {size: place for place, size in enumerate(planned, start=1)}
    return np.array([places.get(size, math.nan) for size in sizes], dtype=np.float64)


def fewest_trainers(points: Iterable[Noted]) -> int | None:
    """|M*|: how few devices trained some part of the model in some step (METHODS §F.2).

    Out of the notes of `Diagnosed`; None without any. Steps in which nobody trained do not count.
    """
    steps = [point.notes for point in points]
    return min((int(notes["fewest"]) for notes in steps if notes.get("fewest")), default=None)


def _mean(values: Floats) -> float:
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else math.nan


def unfit_threshold(ledger: Entries) -> str:
    """A warning when nearly all utilities of a run are 0 or 1; else empty."""
    known = ledger.utility[~np.isnan(ledger.utility)]
    share = extreme_share(known)
    if not len(known) or share <= MOST_EXTREME:
        return ""
    return (
        f"{share:.0%} of the utilities are 0 or 1, so that devices hardly choose: take another "
        "FisherUtility.threshold (higher when they are 1, lower when they are 0)."
    )


# --- what measuring costs ---------------------------------------------------------------------


def measuring_share(method: Method, task: Task) -> float:
    """What measuring adds to the FLOP of training the whole model, as a share of them."""
    samples = task.size(0)
    numbers = method.train.draft(0, np.array([samples]))
    batch, (steps,) = int(numbers.batch[0]), limits(numbers, [samples])
    priced, used = Priced(task.blueprint, WHOLE, batch), processed(steps, samples, batch)
    plain = method.train.work(priced, used, steps).flops
    return method.trained.work(priced, used, steps).flops / plain - 1 if plain else 0.0


def measuring(method: Method, task: Task) -> str:
    """What Fisher information costs in a run, as a sentence; empty if nobody asks for it."""
    if method.trained == method.train:
        return ""
    share = measuring_share(method, task)
    return (
        f"Fisher information adds {share:.0%} to the work of training (every={method.fisher.every}"
        f", samples={method.fisher.samples or 'all'}); fisher.every and fisher.samples lower it."
    )
