"""WHALE-FL's choice on the device: by Fisher information, link and processor."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import numpy as np

from anyfleet.core.check_in import Choices, ChoosingDevice, MenuEntry
from anyfleet.core.messages import ChooserState, Hyperparameters
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
from anyfleet.parts.choose.in_time import seconds_for


@dataclass(frozen=True)
class FisherUtility(Choose):
    """The level that a device's utility affords (specification §1.10).

    Utility is high while a device's Fisher information is, over a window of rounds, and is cut
    when it would now need more than the target time. The menu goes from the largest of `levels`
    down; a device that may not train the largest has a menu without them.

    `effectiveness`: "relative" to the initial model of the same width; "literal" takes the raw trace
    times the batch (Eq. 3 of the paper); "constant" looks at time only. `penalty` 0 looks at
    training only. `reference`: whose time counts, that of the smallest network ("unit") or of the
    one trained last. `target` seconds; without them the plan must give a target (`TargetSeconds`).
    `fisher` says how devices measure their Fisher information.
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
    def requires(self) -> Mapping[str, str]:
        sizes = f"plan=WidthMenu(...) or TrainedLayersMenu(...) with {self.levels} sizes, one for each level"
        menu = {f"menu of {self.levels}": sizes}
        if self.target is not None or not self.penalty:
            return menu
        paced = "plan=TargetSeconds(WidthMenu(...)), or name FisherUtility.target in seconds"
        return {**menu, "target": paced}

    # -- choosing

    def __call__(
        self, menu: Sequence[MenuEntry], device: ChoosingDevice, hyperparameters: Hyperparameters
    ) -> Choices:
        missing = self.levels - len(menu)
        if missing < 0:
            raise ValueError(
                f"FisherUtility.levels is {self.levels}, but the menu has {len(menu)} entries: "
                "name as many levels as the plan has sizes."
            )
        notes = device.state.chooser
        if not notes.get("rounds"):
            wanted, u = self.first_level, float("nan")
        else:
            u = self._utility(menu, device, hyperparameters)
            wanted = int(whale_level(u, self.levels))
        entry = max(wanted - 1 - missing, 0)
        return Choices(np.array([entry]), hyperparameters, np.array([u]), ("",))

    def _utility(
        self, menu: Sequence[MenuEntry], own: ChoosingDevice, numbers: Hyperparameters
    ) -> float:
        notes = own.state.chooser
        # The target is the time of a network, without what it costs to offer several.
        seconds = seconds_for(self._timed(menu, notes).without_menu, own, numbers)
        target = float(numbers.target_seconds[0]) if self.target is None else self.target
        useful = whale_utility(self._effectiveness(notes, numbers), seconds, target, self.penalty)
        return float(whale_threshold_utility(useful, self.threshold))

    def _timed(self, menu: Sequence[MenuEntry], notes: ChooserState) -> MenuEntry:
        """The entry of the menu whose time is held against the target."""
        if self.reference == "unit":
            return menu[-1]
        return next((offer for offer in menu if offer.sub_model_size == notes["last"]), menu[-1])

    def _effectiveness(self, notes: ChooserState, numbers: Hyperparameters) -> float:
        if self.effectiveness == "constant":
            return self.threshold
        squares, counts = np.array(notes["squares"]), np.array(notes["steps"])
        if self.effectiveness == "relative":
            return float(whale_relative_effectiveness(squares * counts, counts))
        # Eq. 3 sums over the iterations of a round: one column with the root of each sum.
        return whale_effectiveness(np.sqrt(squares * counts)[:, None], int(numbers.batch_size[0]))

    # -- learning

    def learn(self, state: ChooserState, lesson: Lesson) -> ChooserState:
        if self.effectiveness == "constant":
            return {**state, "rounds": (1.0,), "last": lesson.sub_model_size}
        square = lesson.measured.get("fisher_squares", float("nan"))
        if not np.isfinite(square):
            return state  # nothing was trained: the window stays as it is
        first = int(lesson.sub_model_size[1])
        birth = _at_birth(lesson.width, first)
        new = dict(state)
        if self.initial_measures(state, lesson.width, first):
            new[birth] = (lesson.initial(self.fisher),)
        if self.effectiveness == "relative":
            square = square / new[birth][0] ** 2 if new[birth][0] > 0 else 0.0
        new["squares"] = (*state.get("squares", ()), square)[-self.window :]
        steps = lesson.measured["fisher_steps"]
        new["steps"] = (*state.get("steps", ()), steps)[-self.window :]
        return {**new, "rounds": (float(len(new["squares"])),), "last": lesson.sub_model_size}

    def initial_measures(
        self, state: ChooserState, width: float, first_trained_layer: int
    ) -> tuple[Measure, ...]:
        known = _at_birth(width, first_trained_layer) in state
        return () if known or self.effectiveness != "relative" else (self.fisher,)


def _at_birth(share: float, first: int) -> str:
    """Where the Fisher information of the initial model is noted, for models of this size."""
    return f"birth@{share:g}/{first}"
