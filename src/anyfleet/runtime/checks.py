"""What a server asks of answers before they count, whoever carried them out.

Numbers that are none would spread through every average, and a single update of huge length would
be the next model. Such answers are refused; the round goes on without them.
"""

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from anyfleet.columns import Ints
from anyfleet.runtime.engines import Assigned, Outcome
from anyfleet.runtime.limits import Limits
from anyfleet.types import Kind, Orders, Report, Updates

# Numbers of a report that every device has; others are not a number where nothing was measured.
_ALWAYS = frozenset({"norm", "distortion"})


def screened(
    outcomes: Sequence[Outcome], assigned: Sequence[Assigned], declared: Ints, limits: Limits
) -> list[Outcome]:
    """Outcomes with why they are refused; `declared` are the samples of every device."""
    norms = _norms([outcome.update for outcome in outcomes])
    found = []
    for outcome, own, (order, *_) in zip(outcomes, norms, assigned, strict=True):
        update = outcome.update
        wrong = (*_values(order, update, own, limits), *_told(order, update, declared))
        found.append(outcome._replace(refused=outcome.refused or "".join(wrong[:1])))
    return found


def _norms(updates: Sequence[Updates]) -> list[list[float]]:
    """The length of every tree of every answer; they are waited for together."""
    trees = [[list(tree.values()) for tree in update.trees[0].values()] for update in updates]
    found = [get_total_norm(tree) for each in trees for tree in each if tree]
    lengths = iter(torch.stack([one.double() for one in found]).tolist() if found else [])
    return [[next(lengths) if tree else 0.0 for tree in each] for each in trees]


def _values(order: Orders, update: Updates, norms: list[float], limits: Limits) -> Iterator[str]:
    for (name, tree), norm in zip(update.trees[0].items(), norms, strict=True):
        length = norm
        if not math.isfinite(norm):
            # A sum of large squares may overflow where the numbers themselves do not.
            yield from (f"not finite: {n}" for n, value in tree.items() if not _finite(value))
            length = math.hypot(*(_length(value) for value in tree.values()))
        if name == order.job.send and length > limits.norm:
            yield f"norm: {length:.3g} is above {limits.norm:.3g}"


def _finite(value: Tensor) -> bool:
    return bool(torch.isfinite(value).all())


def _length(value: Tensor) -> float:
    return float(torch.linalg.vector_norm(value, dtype=torch.float64))


def _told(order: Orders, update: Updates, declared: Ints) -> Iterator[str]:
    samples, most = int(update.samples[0]), int(declared[int(order.device[0])])
    # Tests are made on data that nobody declares.
    if samples < 0 or (order.kind != Kind.EVALUATE and samples > most):
        yield f"samples: {samples} of {most}"
    for name in _strange(update.report[0]):
        yield f"not finite: {name}"


def _strange(report: Report) -> Iterator[str]:
    """Names of numbers that no honest device reports."""
    for name, told in report.items():
        for number in told if isinstance(told, tuple) else (told,):
            if math.isinf(number) or (name in _ALWAYS and math.isnan(number)):
                yield name
                break
