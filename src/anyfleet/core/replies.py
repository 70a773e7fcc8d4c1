"""Replies on the server: an order with its reply, and the updates that replies amount to."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from anyfleet.arrays import join
from anyfleet.core.message_size import measured_sent_fraction
from anyfleet.core.messages import Charges, Kind, Params
from anyfleet.core.method import Method
from anyfleet.core.objectives import Task
from anyfleet.core.orders import Cohort
from anyfleet.core.planning import server_names
from anyfleet.core.stacks import Replies
from anyfleet.core.updates import Updates
from anyfleet.elastic import Blueprint, Slice, cut, narrowed


class RepliedOrder(NamedTuple):
    """A single order, the reply to it, and what it cost."""

    order: Cohort  # of one row, as the others
    reply: Replies
    charges: Charges

    @property
    def number(self) -> int:
        """The number of the order."""
        return int(self.order.id[0])

    def received_slice(self, blueprint: Blueprint) -> Slice:
        """Return the coordinates that the reply has: fewer than ordered when a link cut it."""
        return narrowed(self.order.slice_of(0), float(self.reply.delivered_width[0]), blueprint)

    @property
    def has_statistics(self) -> bool:
        """Whether the reply brings statistics of normalisation."""
        return bool(self.reply.trees_of(0).get("buffers"))

    @property
    def result_of(self) -> int | None:
        """The number of the order whose training result this is; None if it has none."""
        if self.order.kind not in (Kind.TRAIN, Kind.FETCH):
            return None
        return int((self.order.held_order if self.order.kind == Kind.FETCH else self.order.id)[0])


@dataclass(frozen=True)
class IncomingReplies:
    """The replies of one round, turned into changes of the server's current model."""

    method: Method
    task: Task
    round_index: int

    def trained(self, replied: Sequence[RepliedOrder], params: Params) -> Updates:
        """Return the changes of the parameters, whether devices sent changes or weights."""
        return self._gathered(replied, [self._change(each, params) for each in replied])

    def statistics(self, replied: Sequence[RepliedOrder], buffers: Params) -> Updates:
        """Return the changes of the statistics that travel; each of the replies must have some."""
        changes = [
            self._difference(each.reply.trees_of(0)["buffers"], buffers, each) for each in replied
        ]
        return self._gathered(replied, changes)

    def _change(self, replied: RepliedOrder, params: Params) -> Params:
        """Return how a reply changes the parameters, under the names that the server has."""
        trees = replied.reply.trees_of(0)
        if "weights" in trees:
            return self._difference(trees["weights"], params, replied)
        names = self._names(replied)
        return {names.get(name, name): value for name, value in trees["delta"].items()}

    def _difference(self, new: Params, current: Params, replied: RepliedOrder) -> Params:
        """Return what a device has more than the server, under the names that the server has."""
        names, blueprint = self._names(replied), self.task.blueprint
        mine = {name: current[names.get(name, name)] for name in new}
        old = cut(mine, replied.received_slice(blueprint), blueprint)
        return {names.get(name, name): value - old[name] for name, value in new.items()}

    def _names(self, replied: RepliedOrder) -> dict[str, str]:
        """Return the server's names of a width's own normalisation, by the slice as ordered."""
        return server_names(replied.order.slice_of(0), method=self.method, task=self.task)

    def _sent_fraction(self, replied: RepliedOrder) -> float:
        """Return the bits of a reply over those of an uncompressed one."""
        return measured_sent_fraction(replied.order, replied.reply, self.task.blueprint)

    def _gathered(self, replied: Sequence[RepliedOrder], changes: Sequence[Params]) -> Updates:
        """Return the updates of these replies, given what each of them changes."""
        blueprint = self.task.blueprint
        replies = join([each.reply for each in replied])
        ages = [self.round_index - each.order.round_index for each in replied]
        return Updates.of(
            changes,
            blueprint,
            slices=[each.received_slice(blueprint) for each in replied],
            device=replies.device,
            samples=replies.samples.astype(np.float64),
            staleness=ages,
            sent_fraction=[self._sent_fraction(each) for each in replied],
            bits=replies.bits,
            masks=[replies.masks_of(row) for row in range(len(replies))],
            sent=[replies.kept_of(row) for row in range(len(replies))],
            reports=[replies.report_of(row) for row in range(len(replies))],
        )
