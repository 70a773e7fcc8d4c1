"""The ledger: what was asked of a device, what it cost and what came of it, one row per order."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from anyfleet.arrays import Arrays, Flags, Floats, Ints, join
from anyfleet.core.messages import Charges, Devices
from anyfleet.core.orders import IssuedOrders
from anyfleet.core.replies import RepliedOrders
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
    def known_seconds(self) -> Floats:
        """The seconds of each device's work as far as they are known."""
        compute = known(self.compute_seconds)
        return known(self.download_seconds) + compute + known(self.upload_seconds)

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


_NUMBERS: Mapping[str, type[Any]] = {
    f.name: np.int64 if f.type is Ints else np.float64
    for f in fields(Ledger)
    if f.name not in _TEXTS
}


class _Entry(NamedTuple):
    """Orders that ended together."""

    orders: IssuedOrders
    charges: Charges
    failures: tuple[str, ...]
    replied: RepliedOrders | None = None  # with what their devices sent; None: nothing came


class LedgerWriter:
    """The rows of a round while it is open."""

    def __init__(self, blueprint: Blueprint) -> None:
        self._blueprint = blueprint
        self._entries: list[_Entry] = []

    def replied(self, replied: RepliedOrders, failures: Sequence[str]) -> None:
        """Add orders whose replies arrived; a failure says why a reply does not count, or is ""."""
        entry = _Entry(replied.orders, replied.charges, tuple(failures), replied)
        self._entries.append(entry)

    def failed(self, orders: IssuedOrders, charges: Charges, failures: Sequence[str]) -> None:
        """Add orders that no replies will come to."""
        self._entries.append(_Entry(orders, charges, tuple(failures)))

    def close(self, devices: Devices, round_index: int, now: float) -> Ledger:
        """Return the rows of the round that ends now, sorted by order, and begin the next."""
        entries, self._entries = self._entries, []
        if not entries:
            return Ledger.from_dicts(())
        orders = join([each.orders for each in entries])
        charges = join([each.charges for each in entries])
        each_told = [self._told(each) for each in entries]
        told = {name: np.concatenate([each[name] for each in each_told]) for name in each_told[0]}
        ended = charges.began + (
            charges.download_seconds + charges.compute_seconds + charges.upload_seconds
        )
        columns: dict[str, Any] = {
            **vars(charges),
            **vars(orders.hyperparameters),
            **{name: getattr(orders, name) for name in _ORDERED},
            **self._facts(orders.slices, orders.slice_index),
            **told,
            "round_index": np.full(len(orders), round_index),
            "issued_round": orders.round_index,
            "level": devices.level[orders.device],
            "kind": tuple(orders.kind.tolist()),
            "wait_seconds": np.maximum(0.0, now - ended),
            "failure": tuple(chain.from_iterable(each.failures for each in entries)),
        }
        return _ledger(columns).take(np.argsort(orders.order, kind="stable"))

    def _told(self, entry: _Entry) -> dict[str, Floats]:
        """Return what devices reported, and facts about their results; NaN where nothing came."""
        if entry.replied is None:
            return dict.fromkeys((*REPORTED, *_RESULT), np.full(len(entry.orders), np.nan))
        reports = entry.replied.replies.reports
        return {name: reports.number(name) for name in REPORTED} | self._results(entry.replied)

    def _results(self, replied: RepliedOrders) -> dict[str, Floats]:
        """Return the facts about training results; NaN for replies of another kind."""
        shares = self._facts(replied.slices, replied.slice_index)
        facts = {"measured_sent_fraction": replied.sent_fraction, **shares}
        return {n: np.where(replied.replies.trained, facts[n], np.nan) for n in _RESULT}

    def _facts(self, slices: Sequence[Slice], index: Ints) -> dict[str, Floats]:
        """Return what the ledger says of the slices with these numbers: an array each."""
        facts = np.array([_facts_of(each, self._blueprint) for each in slices])
        return dict(zip(_SliceFacts._fields, facts.reshape(-1, 5)[index].T, strict=True))


class _SliceFacts(NamedTuple):
    """What the ledger says of a slice."""

    slice_width: float
    first_trained_layer: int
    parameters: int
    channel_share: float
    trained_share: float


@lru_cache(maxsize=4096)
def _facts_of(slice_: Slice, blueprint: Blueprint) -> _SliceFacts:
    return _SliceFacts(
        slice_width=width(slice_, blueprint),
        first_trained_layer=slice_.first_trained_layer,
        parameters=blueprint.local(slice_).numel(),
        channel_share=channel_share(slice_, blueprint),
        trained_share=trained_share(slice_, blueprint),
    )


def known(values: Floats) -> Floats:
    """Return numbers for a sum: 0 for each one that nobody knows."""
    return np.where(np.isnan(values), 0.0, values)


def _ledger(values: Mapping[str, Any]) -> Ledger:
    made: dict[str, Any] = {name: tuple(values[name]) for name in _TEXTS}
    made |= {name: np.asarray(values[name], dtype=number) for name, number in _NUMBERS.items()}
    return Ledger(**made)


def _plain(values: Any) -> list[Any]:
    return values.tolist() if isinstance(values, np.ndarray) else list(values)
