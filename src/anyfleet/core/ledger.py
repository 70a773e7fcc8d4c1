"""The ledger: what every order was, cost and came to; in columns, appended as it happens."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from anyfleet.arrays import Arrays, Floats, Ints
from anyfleet.core.message_size import measured_sent_fraction
from anyfleet.core.messages import Charges, Devices, Replies, Report, measured
from anyfleet.core.orders import Cohort
from anyfleet.elastic import Blueprint, alpha, narrowed, width
from anyfleet.formulas.anycost import anycost_contraction, anycost_divergence, anycost_gain

_THEORY = ("measured_sent_fraction", "gain", "divergence")
_TOLD = ("loss", "norm", "fisher", "distortion")  # of a device's report


@dataclass(frozen=True, eq=False)
class Ledger(Arrays):
    """Orders from issue to answer or loss, one row each. Seconds, joules, bits."""

    order: Ints
    round_index: Ints  # the server step that closed with it
    device: Ints
    level: Ints  # declared by the device
    kind: tuple[str, ...]
    issued_round: Ints  # the server step that issued it
    # -- the plan
    width: Floats  # of the model's width, as planned
    slice_width: Floats  # of the slice, in whole channels
    first_trained_layer: Ints  # first trained layer
    choice: Ints  # which entry of the planner's menu the device chose, or -1
    utility: Floats  # by which it chose, from 0 to 1, or NaN
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
    wait_seconds: Floats  # from the end of its own work to the end of the server's step
    download_joules: Floats
    compute_joules: Floats
    upload_joules: Floats
    bits_down: Floats
    bits_up: Floats
    # -- what came of it
    delivered_down: Floats  # share of the model's columns that came through the link
    delivered_up: Floats
    loss: Floats  # mean training loss the device reported, or NaN
    norm: Floats  # of its update, where some part asks for it, or NaN
    fisher: Floats  # mean trace of its Fisher information, where some part asks for it, or NaN
    distortion: Floats  # squared error of the compressed update over its squared norm, or NaN
    # -- AnycostFL's theory of a training result (specification §F.3); NaN where none came in
    measured_sent_fraction: Floats  # bits of the result over those of an uncompressed one
    gain: Floats  # alpha^4 × rate: what the step learns from it, at most 1
    divergence: Floats  # how far it is from what the whole model, uncompressed, would have said
    contraction: Floats  # Z of the step, for the best loss that there can be: 1 − least gain
    failure: tuple[str, ...]  # the reason, or ""

    @property
    def seconds(self) -> Floats:
        """What the device was busy for."""
        return self.download_seconds + self.compute_seconds + self.upload_seconds

    @property
    def joules(self) -> Floats:
        return self.download_joules + self.compute_joules + self.upload_joules

    @property
    def counted(self) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """Which rows are answers that count."""
        return np.array([not reason for reason in self.failure], dtype=bool)

    def as_dicts(self) -> list[dict[str, Any]]:
        """Every row as plain data, for a file."""
        columns = {f.name: _plain(getattr(self, f.name)) for f in fields(self)}
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]

    @staticmethod
    def of(rows: Iterable[Mapping[str, Any]]) -> "Ledger":
        """The inverse of `as_dicts`; None stands for not a number, as in JSON.

        So does a column that the rows do not have: those of older runs have fewer.
        """
        listed = list(rows)
        return _entries({f.name: [row.get(f.name) for row in listed] for f in fields(Ledger)})


class LedgerWriter:
    """Collects rows until a step closes, column by column."""

    def __init__(self, devices: Devices, blueprint: Blueprint) -> None:
        self._devices, self._blueprint = devices, blueprint
        self._open: dict[str, list[Any]] = {}

    def replied(self, order: Cohort, update: Replies, charges: Charges, lost: str) -> None:
        """An answer came in; `lost` says why it does not count, if so."""
        self._append(order, charges, lost, update.report[0], self._theory(order, update))

    def failed(self, order: Cohort, charges: Charges, reason: str) -> None:
        """An order will never be answered."""
        self._append(order, charges, reason, {}, dict.fromkeys(_THEORY, np.nan))

    def close(self, step: int, now: float) -> Ledger:
        """The rows of this step, by order."""
        columns, self._open = self._open, {}
        count = len(columns.get("order", []))
        blank = {f.name: [0] * count for f in fields(Ledger)}
        entries = _entries({**blank, **columns, "round_index": [step] * count})
        wait = np.maximum(0.0, now - (entries.began + entries.seconds))
        left = np.full(count, _contraction(entries))
        entries = replace(entries, wait_seconds=wait, contraction=left)
        return entries.take(np.argsort(entries.order, kind="stable"))

    def _append(
        self,
        order: Cohort,
        charges: Charges,
        lost: str,
        report: Report,
        theory: Mapping[str, float],
    ) -> None:
        told = {name: measured(report, name) for name in _TOLD}
        for name, value in {**self._row(order, charges, lost), **told, **theory}.items():
            self._open.setdefault(name, []).append(value)

    def _theory(self, order: Cohort, update: Replies) -> dict[str, float]:
        if not update.trained:
            return dict.fromkeys(_THEORY, np.nan)
        held = narrowed(order.slices[0], float(update.delivered_width[0]), self._blueprint)
        rate, share = (
            measured_sent_fraction(order, update, self._blueprint),
            alpha(held, self._blueprint),
        )
        gain, index = float(anycost_gain(share, rate)), float(anycost_divergence(share, rate))
        return dict(zip(_THEORY, (rate, gain, index), strict=True))

    def _row(self, order: Cohort, charges: Charges, lost: str) -> dict[str, Any]:
        spent = {f.name: getattr(charges, f.name)[0].item() for f in fields(Charges)}
        (slice_,), numbers = order.slices, order.hyperparameters
        device = int(order.device[0])
        return {
            **{f.name: getattr(numbers, f.name)[0].item() for f in fields(numbers)},
            **spent,
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
            "failure": lost,
        }


def _contraction(entries: Ledger) -> float:
    """Of a step with these results: a condition number and a gradient ratio of 1."""
    gains = entries.gain[entries.counted & ~np.isnan(entries.gain)]
    if not len(gains):
        return float("nan")
    return anycost_contraction(float(gains.min()), convexity=1.0, smoothness=1.0, ratio=1.0)


def _entries(columns: Mapping[str, Sequence[Any]]) -> Ledger:
    made: dict[str, Any] = {}
    for f in fields(Ledger):
        column = columns[f.name]
        if f.name in ("kind", "failure"):
            made[f.name] = tuple(column)
        elif f.type is Ints:
            made[f.name] = np.array(column, dtype=np.int64)
        else:
            numbers = [np.nan if value is None else value for value in column]
            made[f.name] = np.array(numbers, dtype=np.float64)
    return Ledger(**made)


def _plain(column: Any) -> list[Any]:
    return column.tolist() if isinstance(column, np.ndarray) else list(column)
