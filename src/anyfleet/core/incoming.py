"""What answers hold: which coordinates came, and how they change the server's model."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from anyfleet.arrays import join
from anyfleet.core.message_size import measured_sent_fraction
from anyfleet.core.messages import Charges, Kind, Params, Replies, Report
from anyfleet.core.method import Method
from anyfleet.core.objectives import Task
from anyfleet.core.orders import Cohort
from anyfleet.core.planning import server_names
from anyfleet.core.updates import Updates
from anyfleet.elastic import Blueprint, Slice, cut, narrowed


@dataclass(frozen=True, eq=False)
class Reply:
    """What a device said to an order that was not about training."""

    device: int
    kind: Kind
    report: Report
    trees: Mapping[str, Params]
    samples: int


class RepliedOrder(NamedTuple):
    """An order, its answer, and what it cost."""

    order: Cohort
    reply: Replies
    charges: Charges

    def received_slice(self, blueprint: Blueprint) -> Slice:
        """Which coordinates the answer has: less than was ordered when a link cut it."""
        return narrowed(self.order.slices[0], float(self.reply.delivered_width[0]), blueprint)

    @property
    def has_statistics(self) -> bool:
        """Whether it brings statistics of normalisation."""
        return bool(self.reply.trees[0].get("buffers"))

    @property
    def result_of(self) -> int | None:
        """The order whose training result this is; None: it is none."""
        if self.order.kind not in (Kind.TRAIN, Kind.FETCH):
            return None
        return int((self.order.held_order if self.order.kind == Kind.FETCH else self.order.id)[0])

    def as_reply(self) -> Reply:
        """What the caller of the loop sees of it."""
        order, update = self.order, self.reply
        device, samples = int(order.device[0]), int(update.samples[0])
        return Reply(device, order.kind, update.report[0], update.trees[0], samples)


@dataclass(frozen=True)
class IncomingReplies:
    """The answers of one server step, turned into changes of what the server has."""

    method: Method
    task: Task
    round_index: int

    def trained(self, answered: Sequence[RepliedOrder], params: Params) -> Updates:
        """Changes of the current model, whether devices sent changes or weights."""
        return self._gathered(answered, [self._change(answer, params) for answer in answered])

    def statistics(self, told: Sequence[RepliedOrder], buffers: Params) -> Updates:
        """Return the changes of the statistics that travel, of replies that have some."""
        changes = [
            self._difference(answer.reply.trees[0]["buffers"], buffers, answer) for answer in told
        ]
        return self._gathered(told, changes)

    def _change(self, answer: RepliedOrder, params: Params) -> Params:
        (trees,) = answer.reply.trees
        if "weights" in trees:
            return self._difference(trees["weights"], params, answer)
        names = self._names(answer)
        return {names.get(name, name): value for name, value in trees["delta"].items()}

    def _difference(self, new: Params, current: Params, answer: RepliedOrder) -> Params:
        names, blueprint = self._names(answer), self.task.blueprint
        mine = {name: current[names.get(name, name)] for name in new}
        old = cut(mine, answer.received_slice(blueprint), blueprint)
        return {names.get(name, name): value - old[name] for name, value in new.items()}

    def _names(self, answer: RepliedOrder) -> dict[str, str]:
        """Where the server keeps a width's own normalisation: by what was ordered."""
        return server_names(answer.order.slices[0], method=self.method, task=self.task)

    def _rate(self, answer: RepliedOrder) -> float:
        return measured_sent_fraction(answer.order, answer.reply, self.task.blueprint)

    def _gathered(self, answered: Sequence[RepliedOrder], changes: Sequence[Params]) -> Updates:
        blueprint = self.task.blueprint
        replies = join([answer.reply for answer in answered])
        ages = [self.round_index - answer.order.round_index for answer in answered]
        return Updates(
            device=replies.device,
            samples=replies.samples.astype(np.float64),
            staleness=np.array(ages),
            sent_fraction=np.array([self._rate(answer) for answer in answered]),
            bits=replies.bits,
            slices=tuple(answer.received_slice(blueprint) for answer in answered),
            reports=replies.report,
            local_deltas=tuple(changes),
            local_masks=replies.masks,
            local_sent=replies.kept,
            blueprint=blueprint,
        )
