"""What a run tells about its method: notes of its steps, and what theory reads out of a ledger.

Ledgers and notes are facts; the formulas of specification §F are applied to them here.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from anyfleet.arrays import Flags, Floats
from anyfleet.core.ledger import Ledger
from anyfleet.core.local_training import local_steps, samples_processed
from anyfleet.core.message_size import expected_bits
from anyfleet.core.messages import Hyperparameters, SubModelSize
from anyfleet.core.method import Method
from anyfleet.core.objectives import Task
from anyfleet.core.time_and_energy import Amount, training, transfer_seconds
from anyfleet.elastic import WHOLE, Priced
from anyfleet.formulas import fedpmt_psi, fedpns_label_distance, whale_extreme_share
from anyfleet.parts.choose import FisherUtility
from anyfleet.world import When, World

MOST_EXTREME = 0.9  # of all utilities; beyond, a threshold does not fit (specification §1.10)
FIRST_VISITS = 0.5  # of all choices; from here on, what devices do without a history decides
EXPLODED = 10.0  # so many times a loss that training had before is an explosion
GROWN = 1_000.0  # and so much more, where that loss is not above 0 and has no multiples

# --- notes ------------------------------------------------------------------------------------


class Diagnosed(Protocol):
    """A point of a run, as far as it has notes."""

    @property
    def diagnostics(self) -> Mapping[str, Any]: ...


def plain_diagnostics(notes: Mapping[str, Any]) -> dict[str, Any]:
    """Notes as plain data for a record: numbers, lists of them, and numbers by device."""
    return {name: _plain(value) for name, value in notes.items() if not isinstance(value, Tensor)}


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, tuple | list) else value


def read_diagnostics(notes: Mapping[str, Any]) -> dict[str, Any]:
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
    """How often a device took part, was labelled as adverse, and was left out (specification §1.18)."""

    selected: int
    labelled: int
    excluded: int


def contributions(ledger: Ledger, points: Iterable[Diagnosed]) -> dict[int, Contribution]:
    """Of every device that was asked to train: an order reached it, at least in part.

    Not of those whom the planner or a lack of memory or link kept from it.
    """
    asked = _training(ledger) & (ledger.counted | (ledger.bits_down > 0))
    selected = Counter(ledger.device[asked].tolist())
    steps = [point.diagnostics for point in points]
    labelled, excluded = (
        Counter(int(device) for notes in steps for device in notes.get(name, ()))
        for name in ("labelled", "excluded")
    )
    return {
        device: Contribution(count, labelled[device], excluded[device])
        for device, count in sorted(selected.items())
    }


def _training(ledger: Ledger) -> Flags:
    """Rows about training: neither surveys, nor the second phase of what was trained before."""
    return np.array([kind in ("train", "hold") for kind in ledger.kind], dtype=bool)


def label_distances(task: Task) -> Floats:
    """How far the labels of each device are from those of all, 0 to 2 (specification §F.5)."""
    if not task.classified:
        return np.full(task.devices, np.nan)
    counts = np.array([_histogram(task, device) for device in range(task.devices)])
    sizes = np.maximum(counts.sum(axis=1, keepdims=True), 1)
    return fedpns_label_distance(counts / sizes, counts.sum(axis=0) / max(1, counts.sum()))


def _histogram(task: Task, device: int) -> Floats:
    found: Floats = np.bincount(
        task.data(device).y.flatten().cpu().numpy(), minlength=task.classes
    ).astype(np.float64)
    return found


# --- depth, width, information ----------------------------------------------------------------


def depth_shares(ledger: Ledger, firsts: Sequence[int]) -> Floats:
    """The shares of answers that counted by first trained layer, smallest width first.

    `firsts` are those of all widths, as `anyfleet.parts.plan.trained_layers.depths` finds them.
    """
    answers = [kind in ("train", "fetch") for kind in ledger.kind]
    first = ledger.first_trained_layer[ledger.counted & np.array(answers, dtype=bool)]
    widths = np.array(sorted(set(firsts), reverse=True))
    counts: Floats = (first == widths[:, None]).sum(axis=1) / max(1, len(first))
    return counts


def depth_psi(ledger: Ledger, firsts: Sequence[int]) -> float:
    """FedPMT's psi (specification §F.1) of the answers in a ledger; infinite if nobody trains all."""
    return fedpmt_psi(depth_shares(ledger, firsts))


@dataclass(frozen=True)
class Informed:
    """A step of a method that looks at Fisher information; means over the answers that counted."""

    round_index: int
    fisher: float  # trace, of the devices that reported it, or NaN
    utility: float  # of the devices that chose by it, or NaN
    width: float  # of the model's width, as planned
    level: float  # 1 for the largest size that was planned in the run, 2 for the next, ...


def information(ledger: Ledger) -> tuple[Informed, ...]:
    """Fisher information, utility and planned sizes of those who trained, step by step.

    Levels count the distinct sizes (share, then depth) that the ledger has anywhere, because a
    place in a menu means another size to a device whose menu is shorter.
    """
    columns = ledger.fisher, ledger.utility, ledger.width, _levels(ledger)
    trained = _training(ledger) & ledger.counted
    found = []
    for step in np.unique(ledger.round_index).tolist():
        rows = trained & (ledger.round_index == step)
        found.append(Informed(step, *(_mean(column[rows]) for column in columns)))
    return tuple(found)


def _levels(ledger: Ledger) -> Floats:
    """The place of every planned size among those of all orders to train, from 1 on; or NaN."""
    sizes = list(zip((-ledger.width).tolist(), ledger.first_trained_layer.tolist(), strict=True))
    planned = sorted({sizes[row] for row in np.flatnonzero(_training(ledger))})
    places = {size: place for place, size in enumerate(planned, start=1)}
    return np.array([places.get(size, math.nan) for size in sizes], dtype=np.float64)


def fewest_trainers(points: Iterable[Diagnosed]) -> int | None:
    """|M*|: how few devices trained some part of the model in some step (specification §F.2).

    Out of the notes of `Diagnosed`; None without any. Steps in which nobody trained do not count.
    """
    steps = [point.diagnostics for point in points]
    return min((int(notes["fewest"]) for notes in steps if notes.get("fewest")), default=None)


def _mean(values: Floats) -> float:
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else math.nan


def unfit_threshold(ledger: Ledger) -> str:
    """A warning when nearly all utilities of a run are 0 or 1; else empty."""
    known = ledger.utility[~np.isnan(ledger.utility)]
    share = whale_extreme_share(known)
    if not len(known) or share <= MOST_EXTREME:
        return ""
    return (
        f"{share:.0%} of the utilities are 0 or 1, so that devices hardly choose: take another "
        "FisherUtility.threshold (higher when they are 1, lower when they are 0)."
    )


def first_visits(ledger: Ledger, method: Method) -> str:
    """Return a warning when half of WHALE-FL's choices or more were first visits; else "".

    A device that has no history yet takes the widest size that it may have, its cap.
    """
    chosen = _training(ledger) & (ledger.choice >= 0)
    first = int((chosen & np.isnan(ledger.utility)).sum())
    count = int(chosen.sum())
    if not isinstance(method.choose, FisherUtility) or not 0 < FIRST_VISITS * count <= first:
        return ""
    capped = method.choose.first_level == 1
    size = "the widest it may have (its cap)" if capped else "the size of first_level"
    told = "in all" if first == count else f"in {first} of"
    return (
        f"With WHALE-FL, {told} {count} choices the device had no history yet and took {size}: "
        "there is little or no difference from fixed widths. Give it more rounds, fewer devices, "
        "or a larger share of them in every round."
    )


# --- why nothing was learned ------------------------------------------------------------------

_RATE = "lower method.lr"
_CURES: Mapping[str, str] = MappingProxyType(
    {
        "too late": "give the schedule more seconds",
        "stale": "give the schedule a larger staleness",
        "out of memory": "offer smaller shares, take a smaller batch, or give devices more memory",
        "over budget": "give the chooser more seconds or joules, or offer smaller shares",
        "no link": "see to the links of the fleet: up and down of its groups carry nothing",
        "nothing came through": "lower the loss of the fleet's links",
        "died": "lower the mortality of the fleet's groups",
        "went offline": "let devices stay longer (availability), or give them less to do",
        "battery empty": "give devices larger batteries, or less to do",
        "refused: not finite": _RATE,
        "refused: norm": f"{_RATE}, or raise limits.norm",
        "refused: size": f"{_RATE} or, if it is few devices, look at what they send; "
        "limits.growth is how much larger than usual a change may be",
        "refused": "see the reasons in ledger.jsonl, and [limits]",
        "held": f"{_RATE}, or look at the aggregate; the notes of a step name the devices (held)",
        "refused by the device": "see the reasons in ledger.jsonl, and [limits]",
    }
)
# Where these are the reasons of most orders, training explodes.
_BROKEN: Mapping[str, str] = MappingProxyType(
    {
        "refused: not finite": "numbers that are not finite",
        "refused: size": "changes far larger than usual",
    }
)
_TOLD = 2  # reasons for which there is advice
_NAMED = 5  # devices, at most


class Scored(Protocol):
    """A point of a run, as far as its model was evaluated."""

    @property
    def scores(self) -> Mapping[str, float]: ...


def nothing_counted(ledger: Ledger, needed: Floats | None = None) -> str:
    """Return why no update ever counted and what to change; "" when one did.

    `needed` are the seconds that orders which were too late would have taken (`seconds_needed`).
    """
    asked = np.array([kind in ("train", "hold", "fetch") for kind in ledger.kind], dtype=bool)
    brings = np.array([kind in ("train", "fetch") for kind in ledger.kind], dtype=bool)
    if (ledger.counted & brings).any():
        return ""
    if not asked.any():
        return (
            "No device was ever asked to train, so that the model is as it began: none was "
            "available or selected. See availability and battery of the fleet, and select."
        )
    reasons = Counter(_cause(ledger.failure[row]) for row in np.flatnonzero(asked))
    reasons.pop("", None)
    told = ", ".join(f"{count} {reason}" for reason, count in reasons.most_common())
    start = f"None of the {asked.sum()} orders brought an update that counted"
    cures = (_cure(reason, ledger, needed) for reason, _ in reasons.most_common(_TOLD))
    return f"{start} ({told or 'none was fetched'}): the model is as it began. {' '.join(cures)}"


def _cause(lost: str) -> str:
    """A reason without the numbers of its order; of refusals, with what they are about."""
    head, _, rest = lost.partition(":")
    about = rest.partition(":")[0].strip()
    return f"{head}: {about}" if f"{head}: {about}" in _CURES else head


def _cure(reason: str, ledger: Ledger, needed: Floats | None) -> str:
    known = _CURES.get(reason, "see the reasons in ledger.jsonl")
    advice = f"{reason[:1].upper()}{reason[1:]}: {_with_rate(known, ledger)}"
    if reason == "too late" and needed is not None and len(needed):
        half, whole = np.quantile(needed, (0.5, 1.0), method="higher")
        advice += f"; about {half:.3g} s would do for half of these orders, {whole:.3g} s for all"
    if reason == "out of memory":
        examples = Counter(lost for lost in ledger.failure if lost.startswith(reason))
        advice += f" ({examples.most_common(1)[0][0].partition(': ')[2]})"
    if reason == "refused: size":
        rows = [row for row, lost in enumerate(ledger.failure) if _cause(lost) == reason]
        devices = sorted(set(ledger.device[rows].tolist()))
        told = ", ".join(map(str, devices[:_NAMED])) + (", …" if len(devices) > _NAMED else "")
        advice += f" (device {told})"
    return f"{advice}."


def _with_rate(advice: str, ledger: Ledger) -> str:
    """Advice about the learning rate, with that of the run."""
    rates = ledger.lr[_training(ledger)]
    told = f"{_RATE} ({rates.max():g} in this run)" if len(rates) else _RATE
    return advice.replace(_RATE, told)


def seconds_needed(ledger: Ledger, method: Method, task: Task, world: World) -> Floats:
    """Return about how long each order that was too late would have taken.

    As the fleet is at the start of a run, and with leading channels.
    """
    late = [row for row, lost in enumerate(ledger.failure) if lost.startswith("too late")]
    rows = ledger.take([row for row in late if ledger.kind[row] in ("train", "hold")])
    return np.array(list(_durations(rows, method, task, world)), dtype=np.float64)


def _durations(rows: Ledger, method: Method, task: Task, world: World) -> Iterator[float]:
    job, blueprint = method.job(), task.blueprint
    active = world.devices_per_band(
        np.unique(rows.device[rows.round_index == rows.round_index.min(initial=0)])
    )
    known = world.conditions(rows.device, When(0.0, 0), active)
    numbers = Hyperparameters(
        rows.lr,
        rows.epochs,
        rows.batch_size,
        rows.local_steps,
        rows.sent_fraction,
        rows.frequency,
        np.full(len(rows), np.nan),
    )
    for row, (own, mine) in enumerate(zip(known.rows(), numbers.rows(), strict=True)):
        share, batch = float(rows.width[row]), int(mine.batch_size[0])
        slice_ = SubModelSize(share, int(rows.first_trained_layer[row])).prefix(blueprint)
        samples = task.size(int(rows.device[row]))
        (steps,) = local_steps(mine, [samples])
        amount = Amount(batch, samples_processed(steps, samples, batch), steps, share)
        effort = training(job.trainer, blueprint, slice_, amount, world.declared.counting).effort
        bits = expected_bits(slice_, job, blueprint, float(mine.sent_fraction[0]))
        crossing = transfer_seconds(bits.down, own.bit_rate_down) + transfer_seconds(
            bits.up, own.bit_rate_up
        )
        yield float((effort.seconds(own, mine.frequency) + crossing)[0])


def exploded(points: Iterable[Scored], ledger: Ledger, start: float = math.nan) -> str:
    """Return a warning when the loss of a run grew without bounds, with the likely cause; or "".

    So it did when the last loss on the test set is no finite number, when it is ten times that of
    the initial model (`start`, NaN: unknown), or ten times the lowest and above both the first and
    the initial model's; or when most training results were refused because they are not finite, or
    far larger than usual. Of a loss that is 0 or negative (that of a density, say) there are no
    multiples: the last one must then lie 1000 above it, and ten times its size.
    """
    losses = [point.scores["loss"] for point in points if "loss" in point.scores]
    cure = f"Probably the learning rate is too high: {_with_rate(_RATE, ledger)}."
    causes = Counter(_cause(lost) for lost in ledger.failure)
    broken = {cause: causes[cause] for cause in _BROKEN if causes[cause]}
    if sum(broken.values()) > len(ledger) / 2:
        told = " or ".join(_BROKEN[cause] for cause in broken)
        return f"{sum(broken.values())} of {len(ledger)} orders brought {told}. {cure}"
    if not losses:
        return ""
    last = losses[-1]
    if not math.isfinite(last):
        told = "not a number" if math.isnan(last) else "infinite"
        return f"The loss on the test set is {told} at the end. {cure}"
    lowest = min(loss for loss in losses if not math.isnan(loss))
    better = last <= losses[0] or last <= start
    before = {"the initial model's": start, "the lowest": math.nan if better else lowest}
    for name, loss in before.items():
        if grown := _growth(last, loss):
            told = f"The loss on the test set is {last:.3g} at the end, {grown}"
            return f"{told} {name} ({loss:.3g}). {cure}"
    return ""


def _growth(last: float, loss: float) -> str:
    """How far a loss lies above an earlier one (NaN: unknown), if that is an explosion; or ""."""
    if loss > 0:
        return f"{last / loss:.3g} times" if last > EXPLODED * loss else ""
    return f"{last - loss:.3g} above" if last - loss > max(GROWN, EXPLODED * -loss) else ""


# --- what measuring costs ---------------------------------------------------------------------


def measuring_share(method: Method, task: Task) -> float:
    """What measuring adds to the FLOP of training the whole model, as a share of them."""
    samples = task.size(0)
    numbers = method.train.hyperparameters(0, np.array([samples]))
    batch, (steps,) = int(numbers.batch_size[0]), local_steps(numbers, [samples])
    priced, used = Priced(task.blueprint, WHOLE, batch), samples_processed(steps, samples, batch)
    plain, measured = (
        float(train.work(priced, used, steps).flops) for train in (method.train, method.trainer)
    )
    return measured / plain - 1 if plain else 0.0


def measuring(method: Method, task: Task) -> str:
    """What measuring costs in a run, as a sentence; empty if nothing is measured."""
    if method.trainer == method.train:
        return ""
    share, measures = measuring_share(method, task), ", ".join(map(str, method.measures))
    return (
        f"Measuring beside training adds {share:.0%} to its work: {measures}. The settings of a "
        "measure (fisher.every and fisher.samples, for example) lower it."
    )
