"""Replies on the server: orders with their replies, and the updates that replies amount to."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from anyfleet.arrays import Arrays, Floats, Ints, alike, distinct, listed
from anyfleet.core.message_size import received
from anyfleet.core.messages import Charges, Params, no_charges
from anyfleet.core.method import Job
from anyfleet.core.objectives import Task
from anyfleet.core.orders import IssuedOrders
from anyfleet.core.stacks import Replies, Stack
from anyfleet.core.updates import Updates
from anyfleet.core.view import OrderStatuses
from anyfleet.elastic import Blueprint, Slice, cut


@dataclass(frozen=True, eq=False)
class RepliedOrders(Arrays):
    """Orders, the replies to them, what they cost and what came in; one row each."""

    orders: IssuedOrders
    replies: Replies
    charges: Charges
    sizes: Floats  # root mean square of each change; NaN: not measured yet
    sent_fraction: Floats  # the bits of each reply over those of an uncompressed one, 1 at most
    slice_index: Ints  # the number of the slice that came in: a link may have cut it
    slices: tuple[Slice, ...] = listed("slice_index")

    @classmethod
    def of(
        cls,
        orders: IssuedOrders,
        replies: Replies,
        charges: Charges,
        sizes: Floats,
        *,
        job: Job,
        blueprint: Blueprint,
    ) -> "RepliedOrders":
        """Return orders with their replies, charges and sizes, and the slices that came in."""
        came = received(orders, replies, job, blueprint)
        told = sizes, came.sent_fraction, came.slice_index, came.slices
        return cls(orders, replies, charges, *told)

    @classmethod
    def none(cls) -> "RepliedOrders":
        """Return no orders."""
        orders, numbers = IssuedOrders.none(), np.empty(0)
        charges, index = no_charges(orders.order, 0.0), np.empty(0, dtype=np.int64)
        return cls(orders, Replies.none(), charges, numbers, numbers, index, ())

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
        return Updates.stacked(
            self._changed(replied, current, trees),
            self.task.blueprint,
            slices=replied.slices,
            slice_index=replied.slice_index,
            staleness=self.round_index - replied.orders.round_index,
            sent_fraction=replied.sent_fraction,
        )

    def _changed(self, replied: RepliedOrders, current: Params, trees: tuple[str, ...]) -> Replies:
        """Return the replies with one tree, "delta": how each changes the server's current model.

        It has the names that the server has: those of a width's own normalisation follow the slice
        as ordered. What devices of one stack sent stays together.
        """
        orders, replies = replied.orders, replied.replies
        norm, blueprint = self.job.norm, self.task.blueprint
        names = [tuple(norm.own_names(blueprint, each).items()) for each in orders.slices]
        sent = [next((e for e in trees if s.trees.get(e)), "") for s in replies.stacks]
        if not any(names) and all(tree == "delta" for tree in sent):
            return replies
        _, renaming = distinct(names)
        stacks: list[Stack] = []
        index, place = replies.stack_index.copy(), replies.place.copy()
        for rows in alike(replies.stack_index, renaming[orders.slice_index]):
            number = int(replies.stack_index[rows[0]])
            stack, tree = replies.stacks[number], sent[number]
            own = dict(names[int(orders.slice_index[rows[0]])])
            if tree != "delta" or own:
                stack = replace(stack, trees={tree: stack.trees[tree]}, symbols=None)
                size = len(next(iter(stack.trees[tree].values())))
                if not np.array_equal(place[rows], np.arange(size)):
                    stack = stack.take(place[rows])
                    place[rows] = np.arange(len(rows))
                values = stack.trees[tree]
                if tree != "delta":
                    mine = {name: current[own.get(name, name)] for name in values}
                    old = _cuts(mine, replied.slices, replied.slice_index[rows], blueprint)
                    values = {name: value - old[name] for name, value in values.items()}
                delta = {own.get(name, name): value for name, value in values.items()}
                stack = replace(stack, trees={"delta": delta})
            index[rows] = len(stacks)
            stacks.append(stack)
        return replies.having(stack_index=index, place=place, stacks=tuple(stacks))


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
