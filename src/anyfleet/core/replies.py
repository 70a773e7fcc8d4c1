"""Replies on the server: orders with their replies, and the updates that replies amount to."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from anyfleet.arrays import Arrays, grouped
from anyfleet.core.message_size import Received, received
from anyfleet.core.messages import Charges, Params
from anyfleet.core.method import Job
from anyfleet.core.objectives import Task
from anyfleet.core.orders import IssuedOrders
from anyfleet.core.stacks import Replies
from anyfleet.core.updates import Updates
from anyfleet.elastic import cut


@dataclass(frozen=True, eq=False)
class RepliedOrders(Arrays):
    """Orders, the replies to them, and what they cost; one row each."""

    orders: IssuedOrders
    replies: Replies
    charges: Charges


@dataclass(frozen=True)
class IncomingReplies:
    """The replies of one round, turned into changes of the server's current model."""

    job: Job
    task: Task
    round_index: int

    def trained(self, replied: RepliedOrders, params: Params) -> Updates:
        """Return the changes of the parameters, whether devices sent changes or weights."""
        return self._gathered(replied, params, ("weights", "delta"))

    def statistics(self, replied: RepliedOrders, buffers: Params) -> Updates:
        """Return the changes of the statistics that travel; each of the replies must have some."""
        return self._gathered(replied, buffers, ("buffers",))

    def _gathered(self, replied: RepliedOrders, current: Params, trees: tuple[str, ...]) -> Updates:
        """Return the updates that the trees of these replies amount to."""
        orders, replies, blueprint = replied.orders, replied.replies, self.task.blueprint
        came = received(orders, replies, self.job, blueprint)
        changes: list[Params] = [{}] * len(replied)
        alike = replies.stack_index, orders.slice_index, came.slice_index
        first, index = grouped(*alike)
        for number, row in enumerate(first.tolist()):
            rows = np.flatnonzero(index == number)
            stack = replies.stacks[int(replies.stack_index[row])]
            tree = next(each for each in trees if stack.trees.get(each))
            values = stack.take(replies.place[rows]).trees[tree]
            changed = self._changed(tree, values, current, orders, came, row)
            for place, each in enumerate(rows.tolist()):
                changes[each] = {name: value[place] for name, value in changed.items()}
        return Updates.of(
            changes,
            blueprint,
            slices=[came.slices[i] for i in came.slice_index.tolist()],
            device=replies.device,
            samples=replies.samples.astype(np.float64),
            staleness=self.round_index - orders.round_index,
            sent_fraction=came.sent_fraction,
            bits=replies.bits,
            masks=[replies.masks_of(row) for row in range(len(replies))],
            sent=[replies.kept_of(row) for row in range(len(replies))],
            reports=[replies.report_of(row) for row in range(len(replies))],
        )

    def _changed(
        self,
        tree: str,
        values: Params,
        current: Params,
        orders: IssuedOrders,
        came: Received,
        row: int,
    ) -> Mapping[str, Tensor]:
        """Return how stacked replies of one slice change the model, under the server's names."""
        blueprint = self.task.blueprint
        # The names of a width's own normalisation follow the slice as ordered.
        names = self.job.norm.own_names(blueprint, orders.slice_of(row))
        if tree != "delta":
            mine = {name: current[names.get(name, name)] for name in values}
            old = cut(mine, came.slices[int(came.slice_index[row])], blueprint)
            values = {name: value - old[name] for name, value in values.items()}
        return {names.get(name, name): value for name, value in values.items()}
