"""The ledger: what was asked of a device, what it cost and what came of it, one row per order."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from anyfleet.arrays import Arrays, Flags, Floats, Ints, join
from anyfleet.core.message_size import received
from anyfleet.core.messages import Charges, Devices, Hyperparameters
from anyfleet.core.method import Job
from anyfleet.core.orders import IssuedOrders
from anyfleet.core.stacks import Replies
from anyfleet.elastic import Blueprint, Slice, channel_share, trained_share, width

# The numbers of a device's report that have a field. A part asks for them (`reports`).
REPORTED = ("loss", "norm", "fisher", "distortion")
# The facts about a training result.
_RESULT = ("measured_sent_fraction", "channel_share", "trained_share")
# The fields that an order has under the same name.
_ORDERED = ("order", "device", "width", "choice", "utility")
_TEXTS = ("kind", "failure")


@dataclass(frozen=True, eq=False)
class Ledger(Arrays):
    """All orders of a round or of a run, one row each. Units are seconds, joules and bits.

    A number that nobody measured, or that makes no sense for an order, is NaN.
    """

    order: Ints
    round_index: Ints  # the round in which the order ended
    device: Ints
    level: Ints  # declared by the device
    kind: tuple[str, ...]
    issued_round: Ints  # the round in which the order was issued
    # -- what was planned
    width: Floats
    slice_width: Floats  # of the slice: a width in whole channels
    first_trained_layer: Ints
    choice: Ints  # which entry of the planner's menu the device chose, or -1
    utility: Floats  # by which the device chose, from 0 to 1
    lr: Floats
    epochs: Ints
    batch_size: Ints
    local_steps: Ints
    sent_fraction: Floats
    frequency: Floats
    parameters: Ints  # of the slice
    # -- what it cost
    flops: Floats
    began: Floats  # seconds since the start of the run
    download_seconds: Floats
    compute_seconds: Floats
    upload_seconds: Floats
    wait_seconds: Floats  # from the end of the device's own work to the end of the round
    download_joules: Floats
    compute_joules: Floats
    upload_joules: Floats
    bits_down: Floats
    bits_up: Floats
    # -- what came of it
    delivered_down: Floats  # share of the model's columns that came through the link
    delivered_up: Floats
    # -- what the device reported
    loss: Floats  # mean training loss
    norm: Floats  # of the update
    fisher: Floats  # mean trace of the Fisher information
    distortion: Floats  # squared error of the compressed update over its squared norm
    # -- facts about the training result
    measured_sent_fraction: Floats  # bits of the result over those of an uncompressed one
    channel_share: Floats  # share of all channels in the sub-model that arrived
    trained_share: Floats  # share of the sub-model's parameters that was trained
    failure: tuple[str, ...]  # the reason, or "" for a reply that counts

    @property
    def seconds(self) -> Floats:
        """The seconds that each device worked: download, computation and upload."""
        return self.download_seconds + self.compute_seconds + self.upload_seconds

    @property
    def joules(self) -> Floats:
        """The joules that each device spent: download, computation and upload."""
        return self.download_joules + self.compute_joules + self.upload_joules

    @property
    def known_joules(self) -> Floats:
        """The joules of each device as far as they are known."""
        compute = known(self.compute_joules)
        return known(self.download_joules) + compute + known(self.upload_joules)

    @property
    def counted(self) -> Flags:
        """The rows whose replies counted."""
        return np.array([not reason for reason in self.failure], dtype=bool)

    def as_dicts(self) -> list[dict[str, Any]]:
        """Return every row as plain data, for a file."""
        values = {f.name: _plain(getattr(self, f.name)) for f in fields(self)}
        return [dict(zip(values, row, strict=True)) for row in zip(*values.values(), strict=True)]

    @staticmethod
    def from_dicts(rows: Iterable[Mapping[str, Any]]) -> "Ledger":
        """Return the ledger of rows that `as_dicts` made; None stands for NaN, as in JSON.

        Raise ValueError if a row lacks a field.
        """
        listed = list(rows)
        names = [f.name for f in fields(Ledger)]
        if missing := [name for name in names if any(name not in row for row in listed)]:
            raise ValueError(f"rows lack {', '.join(missing)}")
        return _ledger({n: [np.nan if row[n] is None else row[n] for row in listed] for n in names})


class _Entry(NamedTuple):
    """Orders that ended together."""

    orders: IssuedOrders
    charges: Charges
    failures: tuple[str, ...]
    told: Mapping[str, Floats]  # what their devices reported, and facts about their results


class LedgerWriter:
    """The rows of a round while it is open."""

    def __init__(self, devices: Devices, job: Job, blueprint: Blueprint) -> None:
        self._devices, self._job, self._blueprint = devices, job, blueprint
        self._entries: list[_Entry] = []

    def replied(
        self, orders: IssuedOrders, replies: Replies, charges: Charges, failures: Sequence[str]
    ) -> None:
        """Add orders whose replies arrived; a failure says why a reply does not count, or is ""."""
        told = {name: replies.reported(name) for name in REPORTED} | self._results(orders, replies)
        self._entries.append(_Entry(orders, charges, tuple(failures), told))

    def failed(self, orders: IssuedOrders, charges: Charges, failures: Sequence[str]) -> None:
        """Add orders that no replies will come to."""
        unknown = dict.fromkeys((*REPORTED, *_RESULT), np.full(len(orders), np.nan))
        self._entries.append(_Entry(orders, charges, tuple(failures), unknown))

    def close(self, round_index: int, now: float) -> Ledger:
        """Return the rows of the round that ends now, sorted by order, and begin the next."""
        entries, self._entries = self._entries, []
        if not entries:
            return Ledger.from_dicts(())
        orders = join([each.orders for each in entries])
        charges = join([each.charges for each in entries])
        told = {
            name: np.concatenate([each.told[name] for each in entries])
            for name in (*REPORTED, *_RESULT)
        }
        facts = self._facts(orders.slices)
        ended = charges.began + (
            charges.download_seconds + charges.compute_seconds + charges.upload_seconds
        )
        columns: dict[str, Any] = {
            **{f.name: getattr(charges, f.name) for f in fields(charges)},
            **{f.name: getattr(orders.hyperparameters, f.name) for f in fields(Hyperparameters)},
            **{name: getattr(orders, name) for name in _ORDERED},
            **{name: values[orders.slice_index] for name, values in facts.items()},
            **told,
            "round_index": np.full(len(orders), round_index),
            "issued_round": orders.round_index,
            "level": self._devices.level[orders.device],
            "kind": tuple(orders.kind.tolist()),
            "wait_seconds": np.maximum(0.0, now - ended),
            "failure": tuple(reason for each in entries for reason in each.failures),
        }
        return _ledger(columns).take(np.argsort(orders.order, kind="stable"))

    def _results(self, orders: IssuedOrders, replies: Replies) -> dict[str, Floats]:
        """Return the facts about training results; NaN for replies of another kind."""
        came, trained = received(orders, replies, self._job, self._blueprint), replies.trained
        channels, shares = (
            np.array([fact(each, self._blueprint) for each in came.slices])[came.slice_index]
            for fact in (channel_share, trained_share)
        )
        facts = zip(_RESULT, (came.sent_fraction, channels, shares), strict=True)
        return {name: np.where(trained, values, np.nan) for name, values in facts}

    def _facts(self, slices: Sequence[Slice]) -> dict[str, NDArray[Any]]:
        """Return what the ledger says of slices: an array each."""
        return {
            "slice_width": np.array([width(each, self._blueprint) for each in slices]),
            "first_trained_layer": np.array([each.first_trained_layer for each in slices]),
            "parameters": np.array([_parameters(each, self._blueprint) for each in slices]),
        }


@lru_cache(maxsize=4096)
def _parameters(slice_: Slice, blueprint: Blueprint) -> int:
    """Return how many parameters a slice has."""
    return blueprint.local(slice_).numel()


def known(values: Floats) -> Floats:
    """Return numbers for a sum: 0 for each one that nobody knows."""
    return np.where(np.isnan(values), 0.0, values)


def _ledger(values: Mapping[str, Any]) -> Ledger:
    made: dict[str, Any] = {}
    for f in fields(Ledger):
        given = values[f.name]
        number = np.int64 if f.type is Ints else np.float64
        made[f.name] = tuple(given) if f.name in _TEXTS else np.asarray(given, dtype=number)
    return Ledger(**made)


def _plain(values: Any) -> list[Any]:
    return values.tolist() if isinstance(values, np.ndarray) else list(values)
