"""What answers hold: which coordinates came, and how they change the server's model."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from anyfleet.arrays import join
from anyfleet.core.message_size import measured_rate
from anyfleet.core.messages import Charges, Kind, Params, Report, Updates
from anyfleet.core.method import Method
from anyfleet.core.objectives import Task
from anyfleet.core.orders import Orders
from anyfleet.core.planning import server_names
from anyfleet.core.updates import Arrivals
from anyfleet.elastic import Blueprint, Slice, cut, narrowed


@dataclass(frozen=True, eq=False)
class Answer:
    """What a device said to an order that was not about training."""

    device: int
    kind: Kind
    report: Report
    trees: Mapping[str, Params]
    samples: int


class Answered(NamedTuple):
    """An order, its answer, and what it cost."""

    order: Orders
    update: Updates
    charges: Charges

    def held(self, blueprint: Blueprint) -> Slice:
        """Which coordinates the answer has: less than was ordered when a link cut it."""
        return narrowed(self.order.slices[0], float(self.update.delivered[0]), blueprint)

    @property
    def measured(self) -> bool:
        """Whether it brings statistics of normalisation."""
        return bool(self.update.trees[0].get("buffers"))

    @property
    def result(self) -> int | None:
        """The order whose training result this is; None: it is none."""
        if self.order.kind not in (Kind.TRAIN, Kind.FETCH):
            return None
        return int((self.order.of if self.order.kind == Kind.FETCH else self.order.id)[0])

    def answer(self) -> Answer:
        """What the caller of the loop sees of it."""
        order, update = self.order, self.update
        device, samples = int(order.device[0]), int(update.samples[0])
        return Answer(device, order.kind, update.report[0], update.trees[0], samples)


@dataclass(frozen=True)
class Incoming:
    """The answers of one server step, turned into changes of what the server has."""

    method: Method
    task: Task
    step: int

    def trained(self, answered: Sequence[Answered], params: Params) -> Arrivals:
        """Changes of the current model, whether devices sent changes or weights."""
        return self._gathered(answered, [self._change(answer, params) for answer in answered])

    def statistics(self, told: Sequence[Answered], buffers: Params) -> Arrivals:
        """Return the changes of the statistics that travel, of replies that have some."""
        changes = [
            self._difference(answer.update.trees[0]["buffers"], buffers, answer) for answer in told
        ]
        return self._gathered(told, changes)

    def _change(self, answer: Answered, params: Params) -> Params:
        (trees,) = answer.update.trees
        if "weights" in trees:
            return self._difference(trees["weights"], params, answer)
        names = self._names(answer)
        return {names.get(name, name): value for name, value in trees["delta"].items()}

    def _difference(self, new: Params, current: Params, answer: Answered) -> Params:
        names, blueprint = self._names(answer), self.task.blueprint
        mine = {name: current[names.get(name, name)] for name in new}
        old = cut(mine, answer.held(blueprint), blueprint)
        return {names.get(name, name): value - old[name] for name, value in new.items()}

    def _names(self, answer: Answered) -> dict[str, str]:
        """Where the server keeps a width's own normalisation: by what was ordered."""
        return server_names(answer.order.slices[0], method=self.method, task=self.task)

    def _rate(self, answer: Answered) -> float:
        return measured_rate(answer.order, answer.update, self.task.blueprint)

    def _gathered(self, answered: Sequence[Answered], changes: Sequence[Params]) -> Arrivals:
        return Arrivals(
            join([answer.update for answer in answered]),
            slices=[answer.held(self.task.blueprint) for answer in answered],
            staleness=np.array([self.step - answer.order.step for answer in answered]),
            changes=changes,
            rates=np.array([self._rate(answer) for answer in answered]),
            blueprint=self.task.blueprint,
        )
