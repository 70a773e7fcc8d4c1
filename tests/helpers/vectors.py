"""Updates of one small tensor, and as much of a view as aggregators look at."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from anyfleet.core.messages import Aggregated, Params
from anyfleet.core.slots import Aggregate
from anyfleet.core.updates import Updates
from anyfleet.elastic import Blueprint
from tests.core.test_updates import BLUEPRINT, arrivals

PLACE = "4.bias"  # a vector of two numbers
ADP = ((1.0, 0.0), (1.0, 1.0), (-0.2, 1.0))
PNS = ((1.0, 0.0), (0.8, 0.2), (0.9, -0.1), (-1.0, 0.3))
ZERO = {PLACE: torch.zeros(2, dtype=torch.float64)}


@dataclass(frozen=True)
class Seen:
    """As much of a view as these aggregators look at; `server_loss` keeps what it was asked."""

    loss: Callable[[Tensor], float] = lambda place: 0.0
    blueprint: Blueprint = BLUEPRINT
    asked: list[tuple[int, tuple[float, ...]]] = field(default_factory=list)

    def server_loss(self, params: Params, key: Tensor) -> float:
        self.asked.append((int(key), tuple(params[PLACE].tolist())))
        return self.loss(params[PLACE])


def vectors(values: Sequence[Sequence[float]], samples: Sequence[int] | None = None) -> Updates:
    """Updates of one small tensor. A device sends its change: the gradient with the other sign."""
    changes = [{PLACE: torch.tensor(value, dtype=torch.float64)} for value in values]
    return arrivals(changes, samples=samples)


def step(
    part: Aggregate,
    found: Updates,
    state: object = None,
    *,
    model: Mapping[str, Tensor] = ZERO,
    seen: Seen | None = None,
) -> Aggregated:
    begun = part.init(None) if state is None else state  # type: ignore[arg-type]
    return part(model, found, seen or Seen(), begun, torch.tensor(5))  # type: ignore[arg-type]


def numbers(note: Mapping[int, float]) -> list[float]:
    return [note[device] for device in sorted(note)]


def at(*radians: float, lengths: Sequence[float]) -> list[tuple[float, float]]:
    pairs = zip(radians, lengths, strict=True)
    return [(length * math.cos(angle), length * math.sin(angle)) for angle, length in pairs]
