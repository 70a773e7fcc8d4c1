"""Replies on the server: orders with their replies, and the updates that replies amount to."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from anyfleet.arrays import Arrays, Ints, alike, distinct
from anyfleet.core.message_size import Received, received
from anyfleet.core.messages import Charges, Params
from anyfleet.core.method import Job
from anyfleet.core.objectives import Task
from anyfleet.core.orders import IssuedOrders
from anyfleet.core.stacks import Replies, Stack
from anyfleet.core.updates import Updates
from anyfleet.core.view import OrderStatuses
from anyfleet.elastic import Blueprint, Slice, cut


@dataclass(frozen=True, eq=False)
class RepliedOrders(Arrays):
    """Orders, the replies to them, and what they cost; one row each."""

    orders: IssuedOrders
    replies: Replies
    charges: Charges

    @cached_property
    def statuses(self) -> OrderStatuses:
        """The orders as parts see them, with what their devices reported."""
        return self.orders.statuses_with(self.replies.reports)


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
        return Updates.stacked(
            self._changed(replied, came, current, trees),
            blueprint,
            slices=came.slices,
            slice_index=came.slice_index,
            staleness=self.round_index - orders.round_index,
            sent_fraction=came.sent_fraction,
        )

    def _changed(
        self, replied: RepliedOrders, came: Received, current: Params, trees: tuple[str, ...]
    ) -> Replies:
        """Return the replies with one tree, "delta": how each changes the server's current model.

        It has the names that the server has: those of a width's own normalisation follow the slice
        as ordered. What devices of one stack sent stays together.
        """
        orders, replies = replied.orders, replied.replies
        norm, blueprint = self.job.norm, self.task.blueprint
        names = [tuple(norm.own_names(blueprint, each).items()) for each in orders.slices]
        _, renaming = distinct(names)
        stacks: list[Stack] = []
        index, place = replies.stack_index.copy(), replies.place.copy()
        for rows in alike(replies.stack_index, renaming[orders.slice_index]):
            stack = replies.stacks[int(replies.stack_index[rows[0]])]
            own = dict(names[int(orders.slice_index[rows[0]])])
            tree = next(each for each in trees if stack.trees.get(each))
            if tree != "delta" or own:
                stack = stack.take(replies.place[rows])
                place[rows] = np.arange(len(rows))
                values = stack.trees[tree]
                if tree != "delta":
                    mine = {name: current[own.get(name, name)] for name in values}
                    old = _cuts(mine, came.slices, came.slice_index[rows], blueprint)
                    values = {name: value - old[name] for name, value in values.items()}
                delta = {own.get(name, name): value for name, value in values.items()}
                stack = replace(stack, trees={"delta": delta}, symbols=None)
            index[rows] = len(stacks)
            stacks.append(stack)
        return replace(replies, stack_index=index, place=place, stacks=tuple(stacks))


def _cuts(
    tree: Params, slices: Sequence[Slice], index: Ints, blueprint: Blueprint
) -> dict[str, Tensor]:
    """Return what each row's slice has of a tree, stacked; one for all where slices are equal."""
    numbers, which = np.unique(index, return_inverse=True)
    cuts = [cut(tree, slices[number], blueprint) for number in numbers.tolist()]
    if len(cuts) == 1:
        return cuts[0]
    rows = torch.from_numpy(which)
    stacked = {name: torch.stack([each[name] for each in cuts]) for name in tree}
    return {name: value[rows.to(value.device)] for name, value in stacked.items()}
