"""Diagnosis of a run: what its rounds and its ledger tell about the method, and what went wrong.

Ledgers and diagnostics are facts; the formulas of specification §F are applied to them here.
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

MOST_EXTREME = 0.9  # of all utilities are 0 or 1: the threshold does not fit (specification §1.10)
FIRST_VISITS = 0.5  # of all choices are made without a history: these decide the run
EXPLODED = 10.0  # a loss so many times an earlier one has exploded
GROWN = 1_000.0  # or one so much above it, if the earlier loss is 0 or negative

# --- diagnostics --------------------------------------------------------------------------------


class Diagnosed(Protocol):
    """A record with the diagnostics of a round."""

    @property
    def diagnostics(self) -> Mapping[str, Any]: ...


def plain_diagnostics(diagnostics: Mapping[str, Any]) -> dict[str, Any]:
    """Return diagnostics as plain data: numbers, lists of them, and numbers by device."""
    told = {name: value for name, value in diagnostics.items() if not isinstance(value, Tensor)}
    return {name: _plain(value) for name, value in told.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, tuple | list) else value


def read_diagnostics(diagnostics: Mapping[str, Any]) -> dict[str, Any]:
    """Return diagnostics from a file, with NaN and numbers as keys, which JSON lacks."""
    return {name: _read(value) for name, value in diagnostics.items()}


def _read(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {int(k) if k.isdecimal() else k: _read(inner) for k, inner in value.items()}
    if isinstance(value, list):
        return [_read(inner) for inner in value]
    return math.nan if value is None else value


# --- devices ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Contribution:
    """How often a device was asked, labelled as adverse and left out (specification §1.18)."""

    selected: int
    labelled: int
    excluded: int


def contributions(ledger: Ledger, records: Iterable[Diagnosed]) -> dict[int, Contribution]:
    """Return the contribution of every device that an order to train reached, at least in part.

    A device that the planner, or a lack of memory or link, kept from training has none.
    """
    asked = _training(ledger) & (ledger.counted | (ledger.bits_down > 0))
    selected = Counter(ledger.device[asked].tolist())
    told = [record.diagnostics for record in records]
    labelled, excluded = (
        Counter(int(device) for each in told for device in each.get(name, ()))
        for name in ("labelled", "excluded")
    )
    return {
        device: Contribution(count, labelled[device], excluded[device])
        for device, count in sorted(selected.items())
    }


def _training(ledger: Ledger) -> Flags:
    """Return the rows of orders to train, without surveys and fetches of earlier results."""
    return np.array([kind in ("train", "hold") for kind in ledger.kind], dtype=bool)


def label_distances(task: Task) -> Floats:
    """Return how far each device's labels are from those of all, 0 to 2 (specification §F.5)."""
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


# --- trained layers, width, information ---------------------------------------------------------


def trained_layers_distribution(ledger: Ledger, first_trained_layers: Sequence[int]) -> Floats:
    """Return the fractions of counted updates by first trained layer, fewest trained layers first.

    `first_trained_layers` come from `anyfleet.parts.plan.trained_layers.first_trained_layers`.
    """
    updates = [kind in ("train", "fetch") for kind in ledger.kind]
    first = ledger.first_trained_layer[ledger.counted & np.array(updates, dtype=bool)]
    known = np.array(sorted(set(first_trained_layers), reverse=True))
    fractions: Floats = (first == known[:, None]).sum(axis=1) / max(1, len(first))
    return fractions


def trained_layers_psi(ledger: Ledger, first_trained_layers: Sequence[int]) -> float:
    """Return FedPMT's psi of the updates in a ledger (specification §F.1).

    It is infinite if no device trains all layers.
    """
    return fedpmt_psi(trained_layers_distribution(ledger, first_trained_layers))


@dataclass(frozen=True)
class Informed:
    """A round of a method that uses Fisher information: means over the replies that counted."""

    round_index: int
    fisher: float  # trace, over the devices that reported it, or NaN
    utility: float  # over the devices that chose by it, or NaN
    width: float  # as planned
    level: (
        float  # 1 for the largest sub-model size that was planned in the run, 2 for the next, ...
    )


def information(ledger: Ledger) -> tuple[Informed, ...]:
    """Return Fisher information, utility and planned sub-model sizes, round by round.

    Levels count the distinct sub-model sizes (width, then trained layers) of the whole ledger: a
    place in a menu means another size to a device whose menu is shorter.
    """
    arrays = ledger.fisher, ledger.utility, ledger.width, _levels(ledger)
    trained = _training(ledger) & ledger.counted
    found = []
    for round_index in np.unique(ledger.round_index).tolist():
        rows = trained & (ledger.round_index == round_index)
        found.append(Informed(round_index, *(_mean(array[rows]) for array in arrays)))
    return tuple(found)


def _levels(ledger: Ledger) -> Floats:
    """Return the rank of every planned sub-model size among all orders to train, from 1, or NaN."""
    sizes = list(zip((-ledger.width).tolist(), ledger.first_trained_layer.tolist(), strict=True))
    planned = sorted({sizes[row] for row in np.flatnonzero(_training(ledger))})
    places = {size: place for place, size in enumerate(planned, start=1)}
    return np.array([places.get(size, math.nan) for size in sizes], dtype=np.float64)


def fewest_trainers(records: Iterable[Diagnosed]) -> int | None:
    """Return |M*|: the fewest devices that trained some part of the model (specification §F.2).

    Read from the diagnostics of `Diagnosed`; None without them. Rounds without training do not
    count.
    """
    told = [record.diagnostics.get("fewest") for record in records]
    return min((int(fewest) for fewest in told if fewest), default=None)


def _mean(values: Floats) -> float:
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else math.nan


def unfit_threshold(ledger: Ledger) -> str:
    """Return a warning if nearly all utilities of a run are 0 or 1, or ""."""
    known = ledger.utility[~np.isnan(ledger.utility)]
    share = whale_extreme_share(known)
    if not len(known) or share <= MOST_EXTREME:
        return ""
    return (
        f"{share:.0%} of the utilities are 0 or 1, so that devices hardly choose: take another "
        "FisherUtility.threshold (higher if they are 1, lower if they are 0)."
    )


def first_visits(ledger: Ledger, method: Method) -> str:
    """Return a warning if half of WHALE-FL's choices or more were first visits, or "".

    A device without a history takes the widest sub-model that it may have, its cap.
    """
    chosen = _training(ledger) & (ledger.choice >= 0)
    first = int((chosen & np.isnan(ledger.utility)).sum())
    count = int(chosen.sum())
    if not isinstance(method.choose, FisherUtility) or not 0 < FIRST_VISITS * count <= first:
        return ""
    capped = method.choose.first_level == 1
    size = "the widest it may have (its cap)" if capped else "that of first_level"
    told = "In all" if first == count else f"In {first} of"
    return (
        f"{told} {count} choices by FisherUtility the device had no history and took {size}: "
        "that differs little from fixed widths. Give it more rounds, fewer devices, "
        "or a larger share of them in every round."
    )


# --- why nothing was learned ------------------------------------------------------------------

_LOWER_LR = "lower method.lr"
_CURES: Mapping[str, str] = MappingProxyType(
    {
        "too late": "give the schedule more seconds",
        "stale": "give the schedule a larger staleness",
        "out of memory": "offer smaller widths, a smaller batch_size, or give devices more memory",
        "over budget": "give the chooser more seconds or joules, or offer smaller widths",
        "no link": "give the groups of the fleet links (up, down) that carry something",
        "nothing came through": "lower the loss of the fleet's links",
        "died": "lower the mortality of the fleet's groups",
        "went offline": "let devices stay longer (availability), or give them less to do",
        "battery empty": "give devices larger batteries, or less to do",
        "refused: not finite": _LOWER_LR,
        "refused: norm": f"{_LOWER_LR}, or raise limits.norm",
        "refused: size": f"{_LOWER_LR} or, if it is few devices, look at what they send; "
        "limits.growth is how much larger than usual an update may be",
        "refused": "see the reasons in ledger.jsonl, and [limits]",
        "held": f"{_LOWER_LR}, or look at the aggregate; diagnostics of a round name the devices",
        "refused by the device": "see the reasons in ledger.jsonl, and [limits]",
    }
)
# If these are the reasons of most orders, training explodes.
_BROKEN: Mapping[str, str] = MappingProxyType(
    {
        "refused: not finite": "numbers that are not finite",
        "refused: size": "updates far larger than usual",
    }
)
_ADVISED = 2  # reasons with advice, at most
_NAMED = 5  # devices that are named, at most


class Scored(Protocol):
    """A record with the scores of a round."""

    @property
    def scores(self) -> Mapping[str, float]: ...


def nothing_counted(ledger: Ledger, needed: Floats | None = None) -> str:
    """Return why no update ever counted and what to change, or "" if one did.

    `needed` are the seconds that late orders would have taken (`seconds_needed`).
    """
    asked = np.array([kind in ("train", "hold", "fetch") for kind in ledger.kind], dtype=bool)
    brings = np.array([kind in ("train", "fetch") for kind in ledger.kind], dtype=bool)
    if (ledger.counted & brings).any():
        return ""
    if not asked.any():
        return (
            "No device was ever asked to train, so that the model is as it began: none was "
            "available or selected. Look at availability and battery of the fleet, and at select."
        )
    reasons = Counter(_cause(ledger.failure[row]) for row in np.flatnonzero(asked))
    reasons.pop("", None)
    told = ", ".join(f"{count} {reason}" for reason, count in reasons.most_common())
    start = f"None of the {asked.sum()} orders brought an update that counted"
    cures = (_cure(reason, ledger, needed) for reason, _ in reasons.most_common(_ADVISED))
    return f"{start} ({told or 'none was fetched'}): the model is as it began. {' '.join(cures)}"


def _cause(failure: str) -> str:
    """Return a reason without the numbers of its order; for a refusal, with its subject."""
    head, _, rest = failure.partition(":")
    about = rest.partition(":")[0].strip()
    return f"{head}: {about}" if f"{head}: {about}" in _CURES else head


def _cure(reason: str, ledger: Ledger, needed: Floats | None) -> str:
    known = _CURES.get(reason, "see the reasons in ledger.jsonl")
    advice = f"{reason[:1].upper()}{reason[1:]}: {_with_lr(known, ledger)}"
    if reason == "too late" and needed is not None and len(needed):
        half, every = np.quantile(needed, (0.5, 1.0), method="higher")
        advice += f"; about {half:.3g} s would do for half of these orders, {every:.3g} s for all"
    if reason == "out of memory":
        examples = Counter(each for each in ledger.failure if each.startswith(reason))
        advice += f" ({examples.most_common(1)[0][0].partition(': ')[2]})"
    if reason == "refused: size":
        rows = [row for row, each in enumerate(ledger.failure) if _cause(each) == reason]
        devices = sorted(set(ledger.device[rows].tolist()))
        told = ", ".join(map(str, devices[:_NAMED])) + (", …" if len(devices) > _NAMED else "")
        advice += f" (device {told})"
    return f"{advice}."


def _with_lr(advice: str, ledger: Ledger) -> str:
    """Return advice about the learning rate, with that of the run."""
    lrs = ledger.lr[_training(ledger)]
    told = f"{_LOWER_LR} ({lrs.max():g} in this run)" if len(lrs) else _LOWER_LR
    return advice.replace(_LOWER_LR, told)


def seconds_needed(ledger: Ledger, method: Method, task: Task, world: World) -> Floats:
    """Return about how many seconds each order that was too late would have taken.

    Conditions are those at the start of the run, and channels the leading ones.
    """
    late = [row for row, each in enumerate(ledger.failure) if each.startswith("too late")]
    rows = ledger.take([row for row in late if ledger.kind[row] in ("train", "hold")])
    return np.array(list(_durations(rows, method, task, world)), dtype=np.float64)


def _durations(rows: Ledger, method: Method, task: Task, world: World) -> Iterator[float]:
    job, blueprint = method.job(), task.blueprint
    first = rows.device[rows.round_index == rows.round_index.min(initial=0)]
    active = world.sharing(rows.device, np.unique(first))
    known = world.conditions(rows.device, When(0.0, 0), active)
    hyperparameters = Hyperparameters(
        rows.lr,
        rows.epochs,
        rows.batch_size,
        rows.local_steps,
        rows.sent_fraction,
        rows.frequency,
        np.full(len(rows), np.nan),
    )
    for row, (own, mine) in enumerate(zip(known.rows(), hyperparameters.rows(), strict=True)):
        width, batch_size = float(rows.width[row]), int(mine.batch_size[0])
        slice_ = SubModelSize(width, int(rows.first_trained_layer[row])).prefix(blueprint)
        samples = task.size(int(rows.device[row]))
        (steps,) = local_steps(mine, [samples])
        used = samples_processed(steps, samples, batch_size)
        amount = Amount(batch_size, used, steps, width)
        effort = training(job.trainer, blueprint, slice_, amount, world.declared.counting).effort
        bits = expected_bits(slice_, job, blueprint, float(mine.sent_fraction[0]))
        transfer = transfer_seconds(bits.down, own.bit_rate_down) + transfer_seconds(
            bits.up, own.bit_rate_up
        )
        yield float((effort.seconds(own, mine.frequency) + transfer)[0])


def exploded(records: Iterable[Scored], ledger: Ledger, start: float = math.nan) -> str:
    """Return a warning if the loss of a run grew without bounds, with the likely cause, or "".

    It did if the last loss on the test set is not finite; if it is ten times that of the initial
    model (`start`, NaN: unknown), or ten times the lowest and above both the first and the initial
    model's; or if most updates were refused because they are not finite or far larger than usual.
    A loss that is 0 or negative (that of a density, say) has no multiples: the last one must then
    lie 1000 above it, and ten times its size.
    """
    losses = [record.scores["loss"] for record in records if "loss" in record.scores]
    cure = f"Probably the learning rate is too high: {_with_lr(_LOWER_LR, ledger)}."
    causes = Counter(map(_cause, ledger.failure))
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
    """Return how far a loss exploded above an earlier one (NaN: unknown), or ""."""
    if loss > 0:
        return f"{last / loss:.3g} times" if last > EXPLODED * loss else ""
    return f"{last - loss:.3g} above" if last - loss > max(GROWN, EXPLODED * -loss) else ""


# --- what measuring costs -----------------------------------------------------------------------


def measuring_share(method: Method, task: Task) -> float:
    """Return the FLOP that measuring adds, as a share of those of training the whole model."""
    samples = task.size(0)
    own = method.train.hyperparameters(0, np.array([samples]))
    batch_size, (steps,) = int(own.batch_size[0]), local_steps(own, [samples])
    priced = Priced(task.blueprint, WHOLE, batch_size)
    used = samples_processed(steps, samples, batch_size)
    plain, measured = (
        float(train.work(priced, used, steps).flops) for train in (method.train, method.trainer)
    )
    return measured / plain - 1 if plain else 0.0


def measuring(method: Method, task: Task) -> str:
    """Return a sentence on what measuring costs in a run, or "" if nothing is measured."""
    if method.trainer == method.train:
        return ""
    share, measures = measuring_share(method, task), ", ".join(map(str, method.measures))
    return (
        f"Measuring beside training adds {share:.0%} to its work: {measures}. The settings of a "
        "measure (fisher.every and fisher.samples, for example) lower it."
    )
