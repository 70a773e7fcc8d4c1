"""Orders and updates as bytes: a msgpack header, then the trees as their codecs pack them.

What counts as traffic are the trees, index sets and masks (`Orders.bits`, `Updates.bits`). Around
them a message has a header of names and numbers: HEADER_SLACK bytes at most per 100 tensors.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from functools import lru_cache
from typing import Any, cast

import msgspec
import numpy as np
import torch

from anyfleet import config
from anyfleet.codec import Raw
from anyfleet.elastic import Slice, narrowed, within
from anyfleet.envelope import Envelope, Lane, downlink, uplink
from anyfleet.errors import BadMessage, ConfigError
from anyfleet.method import Codec, Job, Symbols
from anyfleet.packing import dense, pack_mask, pack_slice, unpack_mask, unpack_slice
from anyfleet.types import Kind, Numbers, Orders, Params, Report, Task, Trees, Updates

VERSION = 1
HEADER_SLACK = 8192


class OrderHeader(msgspec.Struct, frozen=True):
    """All of an order but its trees."""

    version: int
    id: int
    device: int
    visit: int
    key: int
    slice: bytes
    share: float
    menu: list[bytes]
    choice: int
    utility: float
    numbers: dict[str, float | int]
    bits: float
    delivered: float
    column: float
    heard: int
    of: int
    kind: Kind
    step: int
    cohort: int
    job: bytes
    trees: dict[str, list[str]]


class UpdateHeader(msgspec.Struct, frozen=True):
    """All of an answer but its trees."""

    version: int
    order: int
    device: int
    samples: int
    bits: float
    delivered: float
    report: dict[str, float | list[float]]
    trees: dict[str, list[str]]
    masks: dict[str, tuple[list[int], bytes]]


class Message(msgspec.Struct, frozen=True):
    """A header and the packed trees."""

    header: bytes
    trees: dict[str, list[bytes]]  # column by column


def encode_order(order: Orders, task: Task) -> bytes:
    """One order as the server sends it."""
    blueprint = task.blueprint
    header = OrderHeader(
        version=VERSION,
        id=int(order.id[0]),
        device=int(order.device[0]),
        visit=int(order.visit[0]),
        key=int(order.key[0]),
        slice=pack_slice(order.slices[0], blueprint),
        share=float(order.share[0]),
        menu=[pack_slice(entry, blueprint) for entry in order.menus[0]],
        choice=int(order.choice[0]),
        utility=float(order.utility[0]),
        numbers={f.name: getattr(order.numbers, f.name)[0].item() for f in fields(Numbers)},
        bits=float(order.bits[0]),
        delivered=float(order.delivered[0]),
        column=float(order.column[0]),
        heard=int(order.heard[0]),
        of=int(order.of[0]),
        kind=order.kind,
        step=order.step,
        cohort=order.cohort,
        job=_dumped(order.job),
        trees=_names(order.trees[0]),
    )
    around = _around(order, order.trees[0], task, downlink)
    return _message(header, order.trees[0], order.job.downlink, order.symbols[0], around)


def decode_order(data: bytes, task: Task, allow: Sequence[str] = ()) -> Orders:
    """One order as a device reads it."""
    message = _read(data, Message)
    header = _read(message.header, OrderHeader)
    _check_version(header.version)
    blueprint = task.blueprint
    slice_, job = unpack_slice(header.slice, blueprint), _loaded(header.job, tuple(allow))
    order = Orders(
        id=np.array([header.id]),
        device=np.array([header.device]),
        visit=np.array([header.visit]),
        key=torch.tensor([header.key]),
        slices=(slice_,),
        share=np.array([header.share]),
        menus=(tuple(unpack_slice(entry, blueprint) for entry in header.menu),),
        choice=np.array([header.choice]),
        utility=np.array([header.utility]),
        numbers=_read_numbers(header.numbers),
        trees=({},),
        symbols=(None,),
        bits=np.array([header.bits]),
        delivered=np.array([header.delivered]),
        column=np.array([header.column]),
        heard=np.array([header.heard]),
        of=np.array([header.of]),
        kind=header.kind,
        step=header.step,
        cohort=header.cohort,
        job=job,
    )
    trees, _ = _trees(message, header, order, task, downlink)
    return replace(order, trees=(trees,))


def encode_update(update: Updates, order: Orders, task: Task) -> bytes:
    """One answer as the device sends it."""
    header = UpdateHeader(
        version=VERSION,
        order=int(update.order[0]),
        device=int(update.device[0]),
        samples=int(update.samples[0]),
        bits=float(update.bits[0]),
        delivered=float(update.delivered[0]),
        report={name: _plain(value) for name, value in update.report[0].items()},
        trees=_names(update.trees[0]),
        masks={name: pack_mask(mask) for name, mask in update.masks[0].items()},
    )
    around = _around(order, update.trees[0], task, uplink)
    return _message(header, update.trees[0], order.job.uplink, update.symbols[0], around)


def decode_update(data: bytes, order: Orders, task: Task) -> Updates:
    """One answer as the server reads it."""
    message = _read(data, Message)
    header = _read(message.header, UpdateHeader)
    _check_version(header.version)
    slice_ = _delivered(order.slices[0], header.delivered, task)
    local = task.blueprint.local(slice_)
    report: Report = header.report
    trees, kept = _trees(message, header, order, task, uplink)
    return Updates(
        order=np.array([header.order]),
        device=np.array([header.device]),
        samples=np.array([header.samples]),
        trees=(trees,),
        symbols=(None,),
        masks=({n: unpack_mask(n, packed, local) for n, packed in header.masks.items()},),
        kept=(kept,),
        bits=np.array([header.bits]),
        delivered=np.array([header.delivered]),
        report=(report,),
    )


def _plain(value: float | Sequence[float]) -> float | list[float]:
    """A reported number, or several."""
    return list(value) if isinstance(value, Sequence) else float(value)


def _delivered(slice_: Slice, width: float, task: Task) -> Slice:
    """The part of a slice that a message has."""
    if not 0 <= width <= 1:
        raise BadMessage(f"a model of width {width}, which must lie in [0, 1]")
    # Of a model that was lost whole there are no tensors, and no shape is asked for.
    return narrowed(slice_, width, task.blueprint) if width > 0 else slice_


def _read_numbers(given: Mapping[str, float | int]) -> Numbers:
    try:
        return Numbers(
            lr=np.array([float(given["lr"])]),
            epochs=np.array([int(given["epochs"])]),
            batch=np.array([int(given["batch"])]),
            steps=np.array([int(given["steps"])]),
            rate=np.array([float(given["rate"])]),
            frequency=np.array([float(given["frequency"])]),
            target=np.array([float(given["target"])]),
        )
    except KeyError as error:
        raise BadMessage(f"an order without the number {error}") from error


def _message(
    header: msgspec.Struct,
    trees: Trees,
    codec: Codec,
    symbols: Symbols,
    around: Mapping[str, Envelope],
) -> bytes:
    # Statistics are few and exact: they never go through a lossy codec. Of a tree that was lost
    # whole there is nothing to pack.
    packed = {
        tree: list(_packed(tree, values, codec, symbols, around[tree]))
        for tree, values in trees.items()
    }
    return msgspec.msgpack.encode(Message(msgspec.msgpack.encode(header), packed))


def _packed(
    tree: str, values: Params, codec: Codec, symbols: Symbols, around: Envelope
) -> tuple[bytes, ...]:
    if not values:
        return ()
    if tree != "buffers":
        return codec.pack(symbols, around)
    return (b"".join(v.detach().cpu().contiguous().numpy().tobytes() for v in values.values()),)


def _around(order: Orders, trees: Trees, task: Task, way: Any) -> dict[str, Envelope]:
    home = next(iter(task.params.values()))
    return {
        tree: way(order, task.blueprint, tuple(values), home.dtype)
        for tree, values in trees.items()
    }


def _names(trees: Trees) -> dict[str, list[str]]:
    return {tree: list(values) for tree, values in trees.items()}


def _trees(
    message: Message, header: Any, order: Orders, task: Task, way: Any
) -> tuple[dict[str, Params], Params]:
    codec = order.job.uplink if way is uplink else order.job.downlink
    names, slice_ = header.trees, order.slices[0]
    whole, part = task.blueprint.local(slice_), _delivered(slice_, header.delivered, task)
    local = task.blueprint.local(part)
    home = next(iter(task.params.values()))
    if message.trees.keys() != names.keys():
        raise BadMessage(f"trees {sorted(message.trees)} where {sorted(names)} were announced")
    unknown = {n for listed in names.values() for n in listed} - {*local.params, *local.buffers}
    if unknown:
        raise BadMessage(f"tensors this model does not have: {sorted(unknown)}")
    found: dict[str, Params] = {}
    kept: Params = {}
    for tree, listed in names.items():
        if tree == "buffers":
            lanes = {n: Lane(local.shape(n), (math.prod(local.shape(n)),)) for n in listed}
            around, chosen = Envelope(lanes, home.dtype, order.key), cast("Codec", Raw())
        else:
            around, chosen = way(order, task.blueprint, tuple(listed), home.dtype), codec
        symbols = chosen.unpack(message.trees[tree], around)
        values, flags = chosen.restore(symbols, around)
        if tree != "buffers":
            sub = (
                within(slice_, header.delivered, task.blueprint) if header.delivered > 0 else slice_
            )
            values, flags = ({n: v.squeeze(0) for n, v in t.items()} for t in (values, flags))
            if 0 < header.delivered < 1:
                values, kept = dense(values, sub, whole), {}
            else:
                kept = flags
            found[tree] = {name: value.to(home.device) for name, value in values.items()}
            continue
        # Bytes come into the host's memory; the model may live elsewhere.
        found[tree] = {name: value.squeeze(0).to(home.device) for name, value in values.items()}
    return found, kept


@lru_cache(maxsize=64)
def _dumped(job: Job) -> bytes:
    return msgspec.json.encode(config.dump(job))


@lru_cache(maxsize=64)
def _loaded(data: bytes, allow: tuple[str, ...]) -> Job:
    try:
        return config.load(msgspec.json.decode(data), Job, allow=allow)
    except (ConfigError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise BadMessage(f"a job that cannot be read: {error}") from error


def _check_version(version: int) -> None:
    if version != VERSION:
        raise BadMessage(f"message version {version}; this is version {VERSION}")


def _read(data: bytes, kind: type[Any]) -> Any:
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise BadMessage(f"{kind.__name__} cannot be read: {error}") from error
