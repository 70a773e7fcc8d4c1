"""Checks of what the parts of a method return, made where it returns.

A wrong number, shape or name would show up rounds later, somewhere else, or not at all. Each check
raises `BadReturn` with the part, the round, what came and what was due, and otherwise returns what
came. The checks look at whole cohorts and at metadata; of tensors only bit counts are read.
"""

import math
import numbers
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from anyfleet.arrays import Ints, every
from anyfleet.core.check_in import Choices
from anyfleet.core.messages import (
    EVERYTHING,
    Aggregated,
    Hyperparameters,
    Kind,
    Params,
    SubModelSize,
)
from anyfleet.core.plans import Plans
from anyfleet.core.slots import Compressed, Norm, TrainingResult
from anyfleet.core.view import OrderStatuses, Request, View
from anyfleet.elastic import Blueprint, Slice
from anyfleet.errors import BadReturn, SliceError
from anyfleet.tracebacks import ordinal, quoted

_MOST = 80  # characters of a value that an error quotes


class Caller(NamedTuple):
    """A part that was called, with its slot and the round."""

    slot: str
    part: Any
    round_index: int

    def refuse(self, came: str, due: str) -> NoReturn:
        """Raise BadReturn with what came from this part and what was due."""
        raise BadReturn(
            f"{self.slot}={quoted(self.part)} returned {came} in round "
            f"{ordinal(self.round_index)}; due is {due}."
        )


# --- selection and schedule -------------------------------------------------------------------


def cohort(found: Any, caller: Caller, view: View) -> Ints:
    """Check the devices that a selection or a schedule picks: idle ones, each once."""
    last = len(view.devices) - 1
    due = f"an array of whole numbers from 0 to {last}, each an idle device, none twice"
    devices = _numbers(found, caller, due)
    outside = devices[(devices < 0) | (devices > last)]
    if len(outside):
        caller.refuse(f"numbers of devices that do not exist ({_listed(outside)})", due)
    if repeated := _repeated(devices):
        caller.refuse(f"devices twice ({_listed(repeated)})", due)
    busy = devices[~view.free(devices)] if len(devices) else devices
    if len(busy):
        caller.refuse(f"devices that are not idle ({_listed(busy)})", f"{due} (view.idle)")
    return devices


def fetched(found: Any, caller: Caller, held: OrderStatuses) -> OrderStatuses:
    """Check whose results a selection wants uploaded: some of the held orders, each once."""
    due = f"numbers of the {len(held)} held orders that it was given, none twice (held.order)"
    wanted = _numbers(found, caller, due).tolist()
    row_of = {order: row for row, order in enumerate(held.order.tolist())}
    if unknown := [order for order in wanted if order not in row_of]:
        caller.refuse(f"orders that are not held ({_listed(unknown)})", due)
    if repeated := _repeated(wanted):
        caller.refuse(f"orders twice ({_listed(repeated)})", due)
    return held.take([row_of[order] for order in wanted])


def requests(found: Any, caller: Caller, held: Ints) -> tuple[Request, ...]:
    """Check what a schedule wants issued; `held` are the orders whose results can be fetched."""
    due = "a tuple of anyfleet.parts.Request"
    if isinstance(found, Request):
        caller.refuse("a Request alone", f"{due}: put a comma behind it")
    if not isinstance(found, tuple | list):
        caller.refuse(_described(found), due)
    return tuple(_request(each, caller, held) for each in found)


def _request(found: Any, caller: Caller, held: Ints) -> Request:
    """Check a request of a schedule, and return it with arrays for the numbers in it."""
    if not isinstance(found, Request):
        due = "a tuple of anyfleet.parts.Request"
        caller.refuse(f"{_described(found)} in a tuple", due)
    if found.kind not in tuple(Kind):
        caller.refuse(f"a Request of kind {found.kind!r}", f"one of {', '.join(Kind)}")
    for name, number in (("count", found.count), ("level", found.level)):
        if number is not None and not (_whole(number) and number >= 0):
            caller.refuse(f"a Request with {name}={number!r}", "a whole number, or None")
    devices = found.devices
    if devices is not None:
        due = "an array of device numbers, or None, as the devices of a Request"
        devices = _numbers(devices, caller, due)
    due = "orders whose results are held, as the held_orders of a Request"
    orders = _numbers(found.held_orders, caller, due)
    unknown = orders[~np.isin(orders, held)] if len(orders) else orders
    if len(unknown):
        caller.refuse(f"a Request of orders {unknown[:5].tolist()}", due)
    return replace(found, devices=devices, held_orders=orders)


def truth(found: Any, caller: Caller) -> bool:
    """Check what `ready` returned."""
    if not isinstance(found, bool | np.bool_):
        caller.refuse(_described(found), "True or False from `ready`")
    return bool(found)


def alarm(found: Any, caller: Caller) -> float | None:
    """Check what `alarm` returned."""
    if found is not None and (not isinstance(found, numbers.Real) or math.isnan(found)):
        caller.refuse(_described(found), "a time in seconds, or None, from `alarm`")
    return None if found is None else float(found)


def enough(found: Any, caller: Caller) -> int:
    """Check what `enough` returned."""
    if not (_whole(found) and found >= 1):
        caller.refuse(_described(found), "a whole number of at least 1 from `enough`")
    return int(found)


def orders(found: Any, caller: Caller, known: Ints, what: str) -> Ints:
    """Check numbers of orders: each of them is `known`, and none is there twice."""
    due = f"an array of the numbers of orders that are {what}, none twice"
    wanted = _numbers(found, caller, due)
    if not len(wanted):
        return wanted
    unknown = wanted[~np.isin(wanted, known)]
    if len(unknown):
        caller.refuse(f"orders that are not {what} ({_listed(unknown)})", due)
    if repeated := _repeated(wanted):
        caller.refuse(f"orders twice ({_listed(repeated)})", due)
    return wanted


def staleness(found: Any, caller: Caller) -> int:
    """Check the age up to which replies count."""
    if not (_whole(found) and found >= 0):
        caller.refuse(f"staleness={_described(found)}", "a whole number of rounds, 0 or more")
    return int(found)


# --- plans ------------------------------------------------------------------------------------


def hyperparameters(found: Any, caller: Caller, count: int) -> Hyperparameters:
    """Check the hyperparameters that a trainer, a plan or a chooser gives `count` devices."""
    if not isinstance(found, Hyperparameters):
        caller.refuse(_described(found), "anyfleet.parts.Hyperparameters")
    for name, due, fits in _NUMBERS:
        values = getattr(found, name)
        expected = f"hyperparameters.{name} as an array of {count}: {due}"
        if not isinstance(values, np.ndarray):
            caller.refuse(f"{_described(values)} for hyperparameters.{name}", expected)
        kinds = "iu" if name in _WHOLE else "fiu"
        if values.shape != (count,) or values.dtype.kind not in kinds:
            array = f"an array of {values.dtype} and shape {list(values.shape)}"
            caller.refuse(f"{array} for hyperparameters.{name}", expected)
        good = fits(values)
        if not every(good):
            caller.refuse(f"{_listed(values[~good])} for hyperparameters.{name}", expected)
    return found


def planned(found: Any, caller: Caller, before: Plans, blueprint: Blueprint) -> Plans:
    """Check what a planner makes of the plans that it got: the same devices, sizes that exist."""
    if not isinstance(found, Plans):
        due = "anyfleet.parts.Plans (plans.with_widths(…), plans.with_menu(…), …)"
        caller.refuse(_described(found), due)
    count, device = len(before), _any(found.device)
    if not isinstance(device, np.ndarray) or not np.array_equal(device, before.device):
        caller.refuse(
            f"plans for the devices {_described(device)}",
            f"plans for the {count} devices that it got, in their order",
        )
    declined = _any(found.declined)
    if not isinstance(declined, tuple) or len(declined) != count:
        length = f" of {len(declined)}" if isinstance(declined, tuple | list) else ""
        came = f"a {type(declined).__name__}{length} for declined"
        caller.refuse(came, f"a tuple of {count}, one entry for each device")
    if found.hyperparameters is not before.hyperparameters:  # those have been checked
        hyperparameters(found.hyperparameters, caller, count)
    if not all(issubclass(kind, str) for kind in set(map(type, declined))):
        caller.refuse("declined without a text", 'the reason of each, or ""')
    for name in ("sub_model_sizes", "menus"):
        if not isinstance(getattr(found, name), tuple):
            came = f"{_described(getattr(found, name))} for {name}"
            caller.refuse(came, "a tuple of the different ones")
    if not all(isinstance(menu, tuple) for menu in found.menus):
        caller.refuse("menus that are no tuples", "a tuple of sizes for each menu")
    for size in (*found.sub_model_sizes, *(size for menu in found.menus for size in menu)):
        _check_size(size, caller, len(blueprint.layers))
    _check_numbers(found.size_index, caller, "size_index", (0, len(found.sub_model_sizes), count))
    _check_numbers(found.menu_index, caller, "menu_index", (-1, len(found.menus), count))
    return found


def _check_numbers(found: Any, caller: Caller, name: str, due: tuple[int, int, int]) -> None:
    """Check the numbers of sizes or menus: whole, from the lowest to below the end, so many."""
    low, end, count = due
    asked = f"an array of {count} whole numbers from {low} to {end - 1}"
    if not isinstance(found, np.ndarray) or found.shape != (count,) or found.dtype.kind not in "iu":
        caller.refuse(f"{_described(found)} for {name}", asked)
    if count and not (low <= found.min() and found.max() < end):
        caller.refuse(f"{_listed(found[(found < low) | (found >= end)])} for {name}", asked)


def _check_size(size: Any, caller: Caller, layers: int) -> None:
    """Raise BadReturn unless a model of so many layers has sub-models of this size."""
    if not isinstance(size, SubModelSize):
        caller.refuse(_described(size), "anyfleet.parts.SubModelSize")
    for width in map(_any, (size.width, *(width for _, width in size.axis_widths))):
        if not (isinstance(width, numbers.Real) and 0 < float(width) <= 1):
            caller.refuse(
                f"a sub-model size with the width {width!r}", "widths above 0 and at most 1"
            )
    if not (_whole(size.first_trained_layer) and 0 <= size.first_trained_layer < max(1, layers)):
        came = f"a sub-model size whose first trained layer is {size.first_trained_layer!r}"
        caller.refuse(came, f"one of the layers 0 to {max(1, layers) - 1}")


def chosen(found: Any, caller: Caller, menus: Sequence[int]) -> Choices:
    """Check what devices chose from menus of these lengths."""
    count = len(menus)
    if not isinstance(found, Choices):
        caller.refuse(_described(found), "anyfleet.parts.Choices")
    for name, kinds, due in (("entry", "iu", "whole numbers"), ("utility", "fiu", "numbers")):
        values = getattr(found, name)
        if not isinstance(values, np.ndarray) or values.shape != (count,):
            caller.refuse(f"{_described(values)} for {name}", f"an array of {count} {due}")
        if values.dtype.kind not in kinds:
            caller.refuse(f"an array of {values.dtype} for {name}", f"an array of {count} {due}")
    declined = _any(found.declined)
    if not isinstance(declined, tuple) or len(declined) != count:
        caller.refuse(f"{_described(declined)} for declined", f"a tuple of {count} texts")
    hyperparameters(found.hyperparameters, caller, count)
    none = np.array([bool(reason) for reason in found.declined], dtype=bool)
    outside = (found.entry < np.where(none, -1, 0)) | (found.entry >= np.array(menus))
    if outside.any():
        row = int(np.flatnonzero(outside)[0])
        caller.refuse(f"entry {found.entry[row]} of a menu of {menus[row]}", "one of its entries")
    return found


def cut_out(found: Any, caller: Caller, blueprint: Blueprint) -> Slice:
    """Check a sub-model: a slice of this model."""
    if not isinstance(found, Slice):
        caller.refuse(_described(found), "anyfleet.parts.Slice (size.prefix(view.blueprint))")
    if wrong := _unsliceable(found, blueprint):
        caller.refuse(f"a slice of another model ({wrong})", "one made by Slice.of with this one")
    return found


@lru_cache(maxsize=4096)
def _unsliceable(found: Slice, blueprint: Blueprint) -> str:
    """Return why this is no slice of the model, or ""."""
    try:
        again = Slice.of(dict(found.keep), blueprint, found.first_trained_layer)
    except (SliceError, TypeError, ValueError, KeyError) as error:
        return str(error)
    return "" if again == found else "its axes are not sorted, or one is listed that is whole"


# --- trees ------------------------------------------------------------------------------------


def aggregated(found: Any, caller: Caller, model: Params) -> Aggregated:
    """Check a new model: the tensors of the old one. Whether they are finite, the server checks."""
    if not isinstance(found, Aggregated):
        caller.refuse(_described(found), "anyfleet.parts.Aggregated(model, state, diagnostics)")
    _check_tree(found.model, model, caller, "the new model")
    if not isinstance(found.diagnostics, Mapping):
        caller.refuse(
            f"{_described(found.diagnostics)} for diagnostics", "a mapping of names to numbers"
        )
    return found


def trained(
    found: TrainingResult, caller: Caller, params: Params, buffers: Params
) -> TrainingResult:
    """Check the result of training: the tensors that it began with."""
    _check_tree(found.params, params, caller, "params")
    _check_tree(found.buffers, buffers, caller, "buffers")
    for name, mask in _any(found.mask).items():
        if name not in params or not isinstance(mask, Tensor) or mask.shape != params[name].shape:
            caller.refuse(
                f"a mask {name!r} ({_described(mask)})",
                "masks with the name and the shape of a parameter",
            )
    if not isinstance(found.report, dict):
        caller.refuse(f"{_described(found.report)} for the report", "a dict of tensors")
    return found


def same_masks(early: Params, masks: Params, caller: Caller) -> None:
    """Check that the masks known before training are those of the result, by name and shape."""
    before, after = ({name: tuple(v.shape) for name, v in each.items()} for each in (early, masks))
    if before != after:
        caller.refuse(
            f"masks of {sorted(after)} from `finish`",
            f"what `mask` returned before training: masks of {sorted(before)}",
        )


def compressed(found: Any, caller: Caller, tree: Params) -> Compressed:
    """Check compressed trees: the names and shapes that went in, and bits that can be counted."""
    if not isinstance(found, Compressed):
        caller.refuse(_described(found), "anyfleet.parts.Compressed")
    if found.received != {}:  # a codec may send nothing at all
        _check_tree(found.received, tree, caller, "received")
    bits, distortion = _any(found.bits), _any(found.distortion)
    rows = len(next(iter(tree.values()))) if tree else len(bits)
    if not isinstance(bits, Tensor) or bits.ndim != 2 or len(bits) != rows:
        caller.refuse(f"{_described(bits)} for bits", f"a tensor of [{rows}, columns]")
    if bits.device.type == "cpu":  # fetching them from an accelerator would wait for it
        countable(bits.numpy(), caller)
    if not isinstance(distortion, Tensor) or distortion.shape != (rows,):
        caller.refuse(f"{_described(distortion)} for distortion", f"a tensor of [{rows}]")
    strange = [name for name in (*found.kept, *found.state) if name not in tree]
    if strange:
        caller.refuse(f"{strange[0]!r} in kept or memory", "only names of the tree that went in")
    return found


def countable(bits: NDArray[Any], caller: Caller) -> None:
    """Check the bits of compressed trees: numbers that can be counted."""
    if not every((bits >= 0) & (bits < math.inf)):
        caller.refuse("bits that are negative or not finite", "bits that can be counted")


def normalised(norm: Norm, caller: Caller, blueprint: Blueprint) -> None:
    """Check what a normalisation keeps on devices and what it sends: names of the model."""
    known = {**blueprint.params, **blueprint.buffers}
    for what in ("stays", "travels"):
        names = getattr(norm, what)(blueprint)
        if not isinstance(names, frozenset | set):
            caller.refuse(f"{_described(names)} from `{what}`", "a frozenset of names")
        strange = sorted(str(name) for name in names if name not in known)
        if strange:
            caller.refuse(
                f"{strange[0]!r} from `{what}`", "names of parameters and buffers of the model"
            )


def diagnostics(found: Any, caller: Caller) -> Mapping[str, Any]:
    """Check what a part adds to the record of a round."""
    if not isinstance(found, Mapping):
        caller.refuse(f"{_described(found)} from `diagnostics`", "a mapping of names to numbers")
    return found


def _check_tree(found: Any, model: Params, caller: Caller, what: str) -> None:
    """Raise BadReturn unless two trees have the same names, shapes and types."""
    if not isinstance(found, Mapping):
        caller.refuse(f"{_described(found)} for {what}", "a mapping of names to tensors")
    if found.keys() != model.keys():
        missing = [name for name in model if name not in found]
        if missing:
            caller.refuse(f"{what} without {_listed(missing)}", f"all {len(model)} tensors")
        strange = [name for name in found if name not in model]
        caller.refuse(f"{what} with {_listed(strange)}", f"only the {len(model)} tensors it got")
    for name, due in model.items():
        value = found[name]
        if value is due:
            continue
        if not isinstance(value, Tensor):
            caller.refuse(f"{_described(value)} for {name!r} of {what}", "a tensor")
        if value.shape != due.shape or value.dtype != due.dtype or value.device != due.device:
            caller.refuse(f"{_described(value)} for {name!r} of {what}", _described(due))


# --- what the checks share ---------------------------------------------------------------------

_Fits = Callable[[Any], Any]
_WHOLE = frozenset({"epochs", "batch_size", "local_steps"})


def _or_unset(fits: _Fits) -> _Fits:
    """Return a test that NaN passes, too."""
    return lambda values: np.isnan(values) | fits(values)


# What each field of `Hyperparameters` must be, in words and as a test of an array.
_NUMBERS: tuple[tuple[str, str, _Fits], ...] = (
    ("lr", "finite and not negative", lambda v: np.isfinite(v) & (v >= 0)),
    ("epochs", f"at least 1, or {EVERYTHING}", lambda v: (v >= 1) | (v == EVERYTHING)),
    ("batch_size", "at least 1", lambda v: v >= 1),
    ("local_steps", f"at least 0, or {EVERYTHING}", lambda v: v >= EVERYTHING),
    ("sent_fraction", "above 0 and at most 1, or NaN", _or_unset(lambda v: (v > 0) & (v <= 1))),
    ("frequency", "above 0, or NaN", _or_unset(lambda v: v > 0)),
    ("target_seconds", "above 0, or NaN", _or_unset(lambda v: v > 0)),
)


def _any(value: object) -> Any:
    """Return a value without the type that only an annotation promises."""
    return value


def _numbers(found: Any, caller: Caller, due: str) -> Ints:
    """Check numbers of devices or orders: whole ones, in an array or in any sequence."""
    if isinstance(found, Sequence) and not isinstance(found, str | bytes):
        if not all(map(_whole, found)):
            caller.refuse(_described(found), due)
        try:
            return np.array(found, dtype=np.int64)
        except OverflowError:
            caller.refuse(_described(found), due)
    if not isinstance(found, np.ndarray):
        caller.refuse(f"{_described(found)} for an array", f"{due} (numpy.array(…))")
    if found.dtype == bool:
        caller.refuse("an array of True and False", f"{due} (numpy.flatnonzero(…))")
    if found.ndim != 1 or (found.dtype.kind not in "iu" and len(found)):
        caller.refuse(f"an array of {found.dtype} and shape {list(found.shape)}", due)
    return found.astype(np.int64, copy=False)


def _repeated(values: Sequence[int] | Ints) -> list[int]:
    """Return the values that are there more than once."""
    if len(set(np.asarray(values, dtype=np.int64).tolist())) == len(values):
        return []
    known, times = np.unique(np.asarray(values, dtype=np.int64), return_counts=True)
    found: list[int] = known[times > 1].tolist()
    return found


def _whole(value: Any) -> bool:
    """Return whether a value is a whole number; True and False are none."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _listed(values: Iterable[Any]) -> str:
    """Return the first few of some values as text."""
    return ", ".join(map(str, list(values)[:5]))


def _described(value: Any) -> str:
    """Return a value as an error quotes it: with its type, and not too long."""
    if isinstance(value, Tensor):
        return f"a tensor of {value.dtype} and shape {list(value.shape)} on {value.device}"
    if value is None:
        return "None"
    if isinstance(value, Mapping):
        return f"the {type(value).__name__} {{{_listed(value)}}}"
    text = " ".join(repr(value).split())
    short = text if len(text) <= _MOST else f"{text[: _MOST - 1]}…"
    return f"the {type(value).__name__} {short}"
