"""The ledger: what was asked of a device, what it cost and what came of it, one row per order."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from anyfleet.arrays import Arrays, Flags, Floats, Ints
from anyfleet.core.message_size import measured_sent_fraction
from anyfleet.core.messages import Charges, Devices, Report, measured
from anyfleet.core.orders import Cohort
from anyfleet.core.stacks import Replies
from anyfleet.elastic import Blueprint, channel_share, narrowed, trained_share, width

# The numbers of a device's report that have a field. A part asks for them (`reports`).
REPORTED = ("loss", "norm", "fisher", "distortion")
# The facts about a training result.
_RESULT = ("measured_sent_fraction", "channel_share", "trained_share")
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
        return _ledger({name: [row[name] for row in listed] for name in names})


class LedgerWriter:
    """The rows of a round while it is open."""

    def __init__(self, devices: Devices, blueprint: Blueprint) -> None:
        self._devices, self._blueprint = devices, blueprint
        self._rows: list[dict[str, Any]] = []

    def replied(self, order: Cohort, reply: Replies, charges: Charges, failure: str) -> None:
        """Add an order whose reply arrived; `failure` says why it does not count, or is ""."""
        self._append(order, charges, failure, reply.report_of(0), self._result(order, reply))

    def failed(self, order: Cohort, charges: Charges, failure: str) -> None:
        """Add an order that no reply will come to."""
        self._append(order, charges, failure, {}, {})

    def close(self, round_index: int, now: float) -> Ledger:
        """Return the rows of the round that ends now, sorted by order, and begin the next."""
        rows, self._rows = self._rows, []
        names = [f.name for f in fields(Ledger)]
        late: dict[str, Any] = {"round_index": round_index, "wait_seconds": 0.0}
        ledger = _ledger({name: [(late | row)[name] for row in rows] for name in names})
        waited = np.maximum(0.0, now - (ledger.began + ledger.seconds))
        ledger = replace(ledger, wait_seconds=waited)
        return ledger.take(np.argsort(ledger.order, kind="stable"))

    def _append(
        self,
        order: Cohort,
        charges: Charges,
        failure: str,
        report: Report,
        result: dict[str, float],
    ) -> None:
        self._rows.append(
            self._planned(order)
            | {f.name: getattr(charges, f.name)[0].item() for f in fields(Charges)}
            | {name: measured(report, name) for name in REPORTED}
            | dict.fromkeys(_RESULT, np.nan)
            | dict(result)
            | {"failure": failure}
        )

    def _result(self, order: Cohort, reply: Replies) -> dict[str, float]:
        """Return the facts about a training result; none for a reply of another kind."""
        if not reply.trained[0]:
            return {}
        arrived = narrowed(order.slice_of(0), float(reply.delivered_width[0]), self._blueprint)
        return {
            "measured_sent_fraction": measured_sent_fraction(order, reply, self._blueprint),
            "channel_share": channel_share(arrived, self._blueprint),
            "trained_share": trained_share(arrived, self._blueprint),
        }

    def _planned(self, order: Cohort) -> dict[str, Any]:
        slice_, hyperparameters = order.slice_of(0), order.hyperparameters
        device = int(order.device[0])
        return {
            **{f.name: getattr(hyperparameters, f.name)[0].item() for f in fields(hyperparameters)},
            "order": int(order.id[0]),
            "device": device,
            "level": int(self._devices.level[device]),
            "kind": str(order.kind),
            "issued_round": order.round_index,
            "width": float(order.width[0]),
            "slice_width": width(slice_, self._blueprint),
            "first_trained_layer": slice_.first_trained_layer,
            "choice": int(order.choice[0]),
            "utility": float(order.utility[0]),
            "parameters": self._blueprint.local(slice_).numel(),
        }


def _ledger(values: Mapping[str, Sequence[Any]]) -> Ledger:
    made: dict[str, Any] = {}
    for f in fields(Ledger):
        given = values[f.name]
        if f.name in _TEXTS:
            made[f.name] = tuple(given)
        elif f.type is Ints:
            made[f.name] = np.array(given, dtype=np.int64)
        else:
            numbers = [np.nan if value is None else value for value in given]
            made[f.name] = np.array(numbers, dtype=np.float64)
    return Ledger(**made)


def _plain(values: Any) -> list[Any]:
    return values.tolist() if isinstance(values, np.ndarray) else list(values)
