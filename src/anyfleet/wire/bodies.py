"""The tensors of a message as columns: column j holds column j of the statistics and of the model.

Normalisation statistics are few and exact: they never go through a lossy codec. Both ends know how
many bytes they take, so the rest of a column is the codec's.
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


class Direction(Protocol):
    """The layout of messages one way: down with orders, or up with replies."""

    def __call__(
        self, order: Cohort, blueprint: Blueprint, names: tuple[str, ...], numbers: torch.dtype
    ) -> MessageLayout: ...


class Body(NamedTuple):
    """How the tensors of one message travel: for which order, which way, through which codec."""

    order: Cohort
    task: Task
    direction: Direction
    codec: Codec
    model: tuple[str, ...] = ()  # tensors that the codec packs

    @property
    def columns(self) -> int:
        """The number of columns of the whole message."""
        return grid(self.order)[0]

    def layout(self, names: Sequence[str]) -> MessageLayout:
        """Return how these tensors lie in the message."""
        like = next(iter(self.task.params.values()))
        return self.direction(self.order, self.task.blueprint, tuple(names), like.dtype)


class PackedBody(NamedTuple):
    """All columns of a message, and the bits of the model in each if there are several."""

    columns: list[bytes]
    sizes: list[float]


class UnpackedBody(NamedTuple):
    """The trees as they came through, and what the sender's codec kept of the model."""

    trees: dict[str, Params]
    kept: Params
    lengths: tuple[int, ...] = ()  # bytes of the model in each column


def body_of(order: Cohort, task: Task, names: Names, *, up: bool) -> Body:
    """Return the body of an order or of the reply to it; without a model it has one column."""
    model = order.job.send if up else "model"
    if model not in names:
        order = replace(order, column_width=np.ones(1))
    if not up:
        return Body(order, task, downlink, order.job.downlink, tuple(names.get(model, ())))
    # A reply that names no tensors must be one that its codec makes of what was ordered.
    ordered = tuple(names.get(model) or trained(order, task)) if model in names else ()
    return Body(order, task, uplink, order.job.uplink, ordered)


def trained(order: Cohort, task: Task) -> Iterator[str]:
    """Yield the names of the parameters that a reply brings."""
    blueprint = task.blueprint
    stays = order.job.norm.stays(blueprint)
    return (name for name in order.slice_of(0).sent(blueprint) if name not in stays)


def statistics(order: Cohort, task: Task) -> list[str]:
    """Return the names of the statistics that a reply brings: it may change no others."""
    blueprint = task.blueprint
    if order.kind == Kind.STATISTICS:
        pairs = (name for site in blueprint.norms for name in (site.mean, site.variance))
        return [name for name in pairs if name is not None]
    sent, travels = set(order.slice_of(0).sent(blueprint)), order.job.norm.travels(blueprint)
    layers = (layer for layer in blueprint.layers if sent & set(layer.params))
    return [name for layer in layers for name in layer.buffers if name in travels]


def pack_body(trees: Trees, symbols: Symbols | None, body: Body) -> PackedBody:
    """Return the columns of a message that is sent whole; none without trees."""
    found, sizes = [b""] * (body.columns if trees else 0), [0.0] * body.columns
    exact = trees.get(STATISTICS, {})
    if exact:
        layout = body.layout(tuple(exact))
        rows = layout.flattened({name: value.unsqueeze(0) for name, value in exact.items()})
        found = list(Raw().pack(Symbols(numbers=rows), layout))
    for tree, values in trees.items():
        if tree != STATISTICS and values and symbols is not None:
            layout = body.layout(tuple(values))
            packed = body.codec.pack(symbols, layout)
            found = [one + two for one, two in zip(found, packed, strict=True)]
            if body.columns > 1:
                sizes = body.codec.bits(symbols, layout)[0].tolist()
    return PackedBody(found, sizes if body.columns > 1 else [])


def unpack_body(columns: Sequence[bytes], names: Names, body: Body) -> UnpackedBody:
    """Return the trees in the leading columns of a message, as narrow as they came."""
    if not columns:
        nothing: Params = {}
        return UnpackedBody(dict.fromkeys(names, nothing), {})
    exact = body.layout(names.get(STATISTICS, ()))
    sizes = [_statistics_bytes(exact, column) for column in range(len(columns))]
    for data, size in zip(columns, sizes, strict=True):
        if len(data) < size:
            raise BadMessage(f"{len(data)} bytes where statistics take {size}", "shape")
    lead = [data[:size] for data, size in zip(columns, sizes, strict=True)]
    rest = [data[size:] for data, size in zip(columns, sizes, strict=True)]
    if any(rest) and not set(names) - {STATISTICS}:
        raise BadMessage("bytes after the statistics", "trailing")
    narrowed = partial(_narrowed, body=body, columns=len(columns))
    trees: dict[str, Params] = {}
    kept: Params = {}
    for tree, listed in names.items():
        if tree == STATISTICS:
            raw = cast("Codec", Raw())
            rows, _ = raw.restore(raw.unpack(lead, exact), exact)
            trees[tree] = narrowed(exact.unflattened(rows))
            continue
        model, flags = _unpack_model(rest, listed, body)
        trees[tree], kept = narrowed(model), narrowed(flags)
    return UnpackedBody(trees, kept, tuple(map(len, rest)))


def _statistics_bytes(layout: MessageLayout, column: int) -> int:
    tensors = layout.tensors.values()
    return layout.dtype.itemsize * sum(each.ends[column] - each.begins(column) for each in tensors)


def _unpack_model(
    columns: Sequence[bytes], names: Sequence[str], body: Body
) -> tuple[Params, Params]:
    """Return what a codec makes of columns: stacked tensors, and what was kept of them."""
    if not body.model:
        if any(columns):
            raise BadMessage("bytes of a model that names no tensors")
        return {}, {}
    layout = body.layout(body.model)
    with _guarded(body.codec):
        symbols = body.codec.unpack(columns, layout)
        values, flags = map(layout.unflattened, body.codec.restore(symbols, layout))
        if values.keys() != set(names):
            raise BadMessage("a codec that gives other tensors than the header names", "tensors")
        # Flags of columns that did not come are not needed: the tree is as narrow as it came.
        return values, {name: flags[name] for name in symbols.kept}


@contextmanager
def _guarded(codec: Codec) -> Iterator[None]:
    """Turn whatever a codec raises over unforeseen bytes into BadMessage: the receiver goes on."""
    try:
        yield
    except BadMessage:
        raise
    except Exception as error:
        what = f"{type(codec).__name__} failed: {type(error).__name__}: {error}"
        raise BadMessage(what, "fault") from error


def _narrowed(rows: Params, body: Body, columns: int) -> dict[str, torch.Tensor]:
    """Return the tree of one device, as wide as it came, where the model lives."""
    # Bytes come into the host's memory; the model may live elsewhere.
    home = next(iter(body.task.params.values())).device
    tree = {name: value.squeeze(0).to(home) for name, value in rows.items()}
    if columns == body.columns:
        return tree
    slice_, blueprint = body.order.slice_of(0), body.task.blueprint
    part = within(slice_, width_of(body.order, columns), blueprint)
    return dense(tree, part, blueprint.local(slice_))
