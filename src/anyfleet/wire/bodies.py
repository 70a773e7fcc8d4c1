"""Trees as columns: column j of a message holds column j of the statistics and of the model.

Statistics are few and exact: they never go through a lossy codec. Both ends know how many bytes
they take, so the rest of a column is the codec's.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import NamedTuple, Protocol, cast

import numpy as np
import torch

from anyfleet.core.delivery import width_of
from anyfleet.core.layout import MessageLayout, Symbols, dense
from anyfleet.core.messages import Kind, Params, Trees
from anyfleet.core.objectives import Task
from anyfleet.core.orders import Cohort, downlink, grid, uplink
from anyfleet.core.slots import Codec
from anyfleet.elastic import Blueprint, within
from anyfleet.errors import BadMessage
from anyfleet.parts.codec import Raw

STATISTICS = "buffers"

Names = Mapping[str, Sequence[str]]


class Way(Protocol):
    """How messages travel: down with orders, or up with answers."""

    def __call__(
        self, order: Cohort, blueprint: Blueprint, names: tuple[str, ...], numbers: torch.dtype
    ) -> MessageLayout: ...


class Parcel(NamedTuple):
    """One message's tensors: whose order, which way, and through which codec."""

    order: Cohort
    task: Task
    way: Way
    codec: Codec
    model: tuple[str, ...] = ()  # tensors that its codec is asked for

    @property
    def columns(self) -> int:
        return grid(self.order)[0]

    def around(self, names: Sequence[str]) -> MessageLayout:
        home = next(iter(self.task.params.values()))
        return self.way(self.order, self.task.blueprint, tuple(names), home.dtype)


class Packed(NamedTuple):
    """Every column of a message, and the bits that the model has in each if there are several."""

    columns: list[bytes]
    sizes: list[float]


class Unpacked(NamedTuple):
    """Trees as they came through, and what the sender's codec kept of the model."""

    trees: dict[str, Params]
    kept: Params
    lengths: tuple[int, ...] = ()  # bytes that the model has in each column


def parcel(order: Cohort, task: Task, names: Names, *, up: bool) -> Parcel:
    """The parcel of an order or of its answer; without a model it travels in one piece."""
    model = order.job.send if up else "model"
    if model not in names:
        order = replace(order, column_width=np.ones(1))
    if not up:
        return Parcel(order, task, downlink, order.job.downlink, tuple(names.get(model, ())))
    # An answer that names no tensors has to be one that its codec makes of what was ordered.
    ordered = tuple(names.get(model) or trained(order, task)) if model in names else ()
    return Parcel(order, task, uplink, order.job.uplink, ordered)


def trained(order: Cohort, task: Task) -> Iterator[str]:
    """Names of the tensors that an answer brings."""
    blueprint = task.blueprint
    stays = order.job.norm.stays(blueprint)
    return (name for name in order.slices[0].sent(blueprint) if name not in stays)


def statistics(order: Cohort, task: Task) -> list[str]:
    """Names of the statistics that an answer brings: nothing else of a server's may be changed."""
    blueprint = task.blueprint
    if order.kind == Kind.STATISTICS:
        pairs = (name for site in blueprint.norms for name in (site.mean, site.variance))
        return [name for name in pairs if name is not None]
    sent, travels = set(order.slices[0].sent(blueprint)), order.job.norm.travels(blueprint)
    layers = (layer for layer in blueprint.layers if sent & set(layer.params))
    return [name for layer in layers for name in layer.buffers if name in travels]


def packed(trees: Trees, symbols: Symbols | None, given: Parcel) -> Packed:
    """A message that is sent whole; without trees it has no columns."""
    found, sizes = [b""] * (given.columns if trees else 0), [0.0] * given.columns
    told = trees.get(STATISTICS, {})
    if told:
        around = given.around(tuple(told))
        rows = around.flattened({name: value.unsqueeze(0) for name, value in told.items()})
        found = list(Raw().pack(Symbols(numbers=rows), around))
    for tree, values in trees.items():
        if tree != STATISTICS and values and symbols is not None:
            around = given.around(tuple(values))
            body = given.codec.pack(symbols, around)
            found = [one + two for one, two in zip(found, body, strict=True)]
            if given.columns > 1:
                sizes = given.codec.bits(symbols, around)[0].tolist()
    return Packed(found, sizes if given.columns > 1 else [])


def unpacked(columns: Sequence[bytes], names: Names, given: Parcel) -> Unpacked:
    """The trees in the leading columns of a message, as narrow as they came."""
    if not columns:
        nothing: Params = {}
        return Unpacked(dict.fromkeys(names, nothing), {})
    told = given.around(names.get(STATISTICS, ()))
    sizes = [_statistics_bytes(told, column) for column in range(len(columns))]
    for body, size in zip(columns, sizes, strict=True):
        if len(body) < size:
            raise BadMessage(f"{len(body)} bytes where statistics take {size}", "shape")
    lead = [body[:size] for body, size in zip(columns, sizes, strict=True)]
    rest = [body[size:] for body, size in zip(columns, sizes, strict=True)]
    if any(rest) and not set(names) - {STATISTICS}:
        raise BadMessage("bytes after the statistics", "trailing")
    narrow = partial(_narrowed, given=given, columns=len(columns))
    trees: dict[str, Params] = {}
    kept: Params = {}
    for tree, listed in names.items():
        if tree == STATISTICS:
            raw = cast("Codec", Raw())
            trees[tree] = narrow(told.unflattened(raw.restore(raw.unpack(lead, told), told)[0]))
            continue
        model, flags = _model(rest, listed, given)
        trees[tree], kept = narrow(model), narrow(flags)
    return Unpacked(trees, kept, tuple(map(len, rest)))


def _statistics_bytes(told: MessageLayout, column: int) -> int:
    lanes = told.tensors.values()
    return told.dtype.itemsize * sum(lane.ends[column] - lane.begins(column) for lane in lanes)


def _model(columns: Sequence[bytes], names: Sequence[str], given: Parcel) -> tuple[Params, Params]:
    """What a codec makes of columns: a tree, and what was kept of it."""
    if not given.model:
        if any(columns):
            raise BadMessage("bytes of a model that names no tensors")
        return {}, {}
    around = given.around(given.model)
    with _guarded(given.codec):
        symbols = given.codec.unpack(columns, around)
        values, flags = map(around.unflattened, given.codec.restore(symbols, around))
        if values.keys() != set(names):
            raise BadMessage("a codec that gives other tensors than the header names", "tensors")
        # Flags of columns that did not come are not asked for: the tree is as narrow as it came.
        return values, {name: flags[name] for name in symbols.kept}


@contextmanager
def _guarded(codec: Codec) -> Iterator[None]:
    """Whatever a codec does with bytes that nobody foresaw, the receiver goes on."""
    try:
        yield
    except BadMessage:
        raise
    except Exception as error:
        told = f"{type(codec).__name__} failed: {type(error).__name__}: {error}"
        raise BadMessage(told, "fault") from error


def _narrowed(rows: Params, given: Parcel, columns: int) -> dict[str, torch.Tensor]:
    """One row, of the width that came, where the model lives."""
    # Bytes come into the host's memory; the model may live elsewhere.
    home = next(iter(given.task.params.values())).device
    tree = {name: value.squeeze(0).to(home) for name, value in rows.items()}
    if columns == given.columns:
        return tree
    (slice_,), blueprint = given.order.slices, given.task.blueprint
    part = within(slice_, width_of(given.order, columns), blueprint)
    return dense(tree, part, blueprint.local(slice_))
