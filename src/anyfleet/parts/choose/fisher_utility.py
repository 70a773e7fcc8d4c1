"""WHALE-FL's choice on the device: by Fisher information, link and processor."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import ClassVar, Literal

import numpy as np

from anyfleet.arrays import Floats, Ints, alike
from anyfleet.core.check_in import CheckIns, Choices
from anyfleet.core.messages import ChooserState
from anyfleet.core.signals import Menu, Signal, TargetTime
from anyfleet.core.slots import Choose, Lesson, Measure
from anyfleet.errors import refuse
from anyfleet.formulas.whale import (
    whale_effectiveness,
    whale_level,
    whale_relative_effectiveness,
    whale_threshold_utility,
    whale_utility,
)
from anyfleet.measure import Fisher
from anyfleet.papers import WHALE, Paper


@dataclass(frozen=True)
class FisherUtility(Choose):
    """The entry of the menu that a device's utility affords (specification §1.10).

    Utility is high while a device's Fisher information is, over a window of rounds. It is cut when
    the device would now need more than the target time. The menu goes from the largest of `levels`
    sizes down; a device that may not train the largest has a menu without them.

    `effectiveness` is "relative" to that of the initial model of the same width, or "literal": the
    raw trace times the batch (Eq. 3 of the paper). "constant" looks at time only, and `penalty` 0
    at training only. `reference` says whose time counts: that of the smallest sub-model ("unit"),
    or of the one trained last. `target` is in seconds; without it the plan must provide a target
    time (`TargetSeconds`). `fisher` says how devices measure their Fisher information.
    """

    levels: int = 5
    window: int = 10
    threshold: float = 20.0
    penalty: float = 2.0
    target: float | None = None
    effectiveness: Literal["relative", "literal", "constant"] = "relative"
    reference: Literal["unit", "last_choice"] = "unit"
    first_level: int = 1
    fisher: Fisher = field(default_factory=Fisher)

    papers: ClassVar[tuple[Paper, ...]] = (WHALE,)

    def __post_init__(self) -> None:
        refuse(self._faults())

    def _faults(self) -> Iterator[str]:
        for name in ("levels", "window"):
            if getattr(self, name) < 1:
                yield f"FisherUtility.{name} must be at least 1, got {getattr(self, name)}."
        if not self.threshold > 0:
            yield f"FisherUtility.threshold must be positive, got {self.threshold}."
        if self.penalty < 0:
            yield f"FisherUtility.penalty must not be negative, got {self.penalty}."
        if self.target is not None and not self.target > 0:
            yield f"FisherUtility.target must be positive seconds, got {self.target}."
        if not 1 <= self.first_level <= self.levels:
            yield (
                f"FisherUtility.first_level must lie in 1 to {self.levels}, got {self.first_level}."
            )
        if self.effectiveness not in ("relative", "literal", "constant"):
            yield (
                'FisherUtility.effectiveness must be "relative", "literal" or "constant", '
                f"got {self.effectiveness!r}."
            )
        if self.reference not in ("unit", "last_choice"):
            yield f'FisherUtility.reference must be "unit" or "last_choice", got {self.reference}.'

    @property
    def learns_from(self) -> frozenset[str]:
        # Without Fisher information it still learns that it has trained, and how wide.
        return frozenset({"loss" if self.effectiveness == "constant" else "fisher"})

    @property
    def measures(self) -> tuple[Measure, ...]:
        return () if self.effectiveness == "constant" else (self.fisher,)

    @property
    def requires(self) -> frozenset[Signal]:
        sizes = f"plan=WidthMenu(...) or plan=TrainedLayersMenu(...) with {self.levels} sizes"
        menu = Menu(self.levels, provider=sizes)
        if self.target is not None or not self.penalty:
            return frozenset({menu})
        seconds = "plan=TargetSeconds(WidthMenu(...)), or set FisherUtility.target in seconds"
        return frozenset({menu, TargetTime(provider=seconds)})

    # -- choosing

    def __call__(self, check_ins: CheckIns) -> Choices:
        lengths = check_ins.offered.sum(axis=0)
        if (lengths > self.levels).any():
            raise ValueError(
                f"FisherUtility.levels is {self.levels}, but the menu has {lengths.max()} "
                "entries: name as many levels as the plan has sizes."
            )
        # Before its first round a device has no utility.
        size, utility = np.full(len(check_ins), self.first_level), np.full(len(check_ins), np.nan)
        trained = [row for row, state in enumerate(check_ins.states) if state.get("rounds")]
        if trained:
            utility[trained] = self._utility(check_ins, np.array(trained))
            size[trained] = whale_level(utility[trained], self.levels)
        missing = self.levels - lengths
        return check_ins.choices(np.maximum(size - 1 - missing, 0), utility=utility)

    def _utility(self, check_ins: CheckIns, rows: Ints) -> Floats:
        """Return the utility of these devices, which have trained, between 0 and 1."""
        own = check_ins.hyperparameters.take(rows)
        states = [check_ins.states[row] for row in rows.tolist()]
        # The target is the time of a sub-model, without what it costs to offer several.
        seconds = check_ins.seconds_without_menus(self._timed(check_ins, rows, states), rows)
        target = own.target_seconds if self.target is None else np.full(len(rows), self.target)
        effective, useful = self._effectiveness(states, own.batch_size), np.empty(len(rows))
        for some in alike(target):
            useful[some] = whale_utility(
                effective[some], seconds[some], float(target[some[0]]), self.penalty
            )
        return whale_threshold_utility(useful, self.threshold)

    def _timed(self, check_ins: CheckIns, rows: Ints, states: Sequence[ChooserState]) -> Ints:
        """Return the place in each menu of the entry whose time is compared with the target."""
        offered = check_ins.offered[:, rows]
        smallest: Ints = offered.sum(axis=0) - 1
        if self.reference == "unit":
            return smallest
        width, layer = np.array([state["last"] for state in states]).T
        last = offered & (check_ins.width[:, rows] == width)
        last &= check_ins.first_trained_layer[:, rows] == layer
        return np.where(last.any(axis=0), last.argmax(axis=0), smallest)

    def _effectiveness(self, states: Sequence[ChooserState], batch_size: Ints) -> Floats:
        """Return how much training teaches devices, by their Fisher information."""
        found = np.full(len(states), float(self.threshold))
        if self.effectiveness == "constant":
            return found
        # Devices whose windows are equally long together: sums of padded ones differ in rounding.
        for rows in alike(np.array([len(state["squares"]) for state in states])):
            some = [states[row] for row in rows.tolist()]
            counts = np.array([state["steps"] for state in some])
            squares = np.array([state["squares"] for state in some]) * counts
            if self.effectiveness == "relative":
                found[rows] = whale_relative_effectiveness(squares, counts)
                continue
            # Eq. 3 sums over the iterations of a round: one column with the root of each sum.
            for row, own in zip(rows.tolist(), np.sqrt(squares)[:, :, None], strict=True):
                found[row] = whale_effectiveness(own, int(batch_size[row]))
        return found

    # -- learning

    def learn(self, lesson: Lesson, state: ChooserState) -> ChooserState:
        if self.effectiveness == "constant":
            return {**state, "rounds": (1.0,), "last": lesson.sub_model_size}
        square = lesson.measured.get("fisher_squares", float("nan"))
        if not math.isfinite(square):
            return state  # nothing was trained: the window stays as it is
        first = int(lesson.sub_model_size[1])
        birth = _at_birth(lesson.width, first)
        new = dict(state)
        if self.initial_measures(lesson.width, first, state):
            new[birth] = (lesson.initial(self.fisher),)
        if self.effectiveness == "relative":
            square = square / new[birth][0] ** 2 if new[birth][0] > 0 else 0.0
        new["squares"] = (*state.get("squares", ()), square)[-self.window :]
        steps = lesson.measured["fisher_steps"]
        new["steps"] = (*state.get("steps", ()), steps)[-self.window :]
        return {**new, "rounds": (float(len(new["squares"])),), "last": lesson.sub_model_size}

    def initial_measures(
        self, width: float, first_trained_layer: int, state: ChooserState
    ) -> tuple[Measure, ...]:
        known = _at_birth(width, first_trained_layer) in state
        return () if known or self.effectiveness != "relative" else (self.fisher,)


@lru_cache(maxsize=4096)
def _at_birth(width: float, first_trained_layer: int) -> str:
    """Return the name under which a device keeps the Fisher information of the initial model."""
    return f"birth@{width:g}/{first_trained_layer}"
