"""The ledger: what every order cost, one row each, appended as it happens."""

from dataclasses import asdict, dataclass, replace

from anyfleet.types import Charges, Orders, Updates, measured


@dataclass(frozen=True)
class Row:
    """One order, from issue to answer or loss."""

    step: int  # the server step that closed with it
    order: int
    device: int
    kind: str
    issued_at: int  # the server step that issued it
    choice: int  # the menu entry the device chose, or -1
    parameters: int  # sent down
    flops: float
    download: float  # seconds
    compute: float  # seconds
    upload: float  # seconds
    bits_down: float
    bits_up: float
    loss: float  # mean training loss the device reported, or NaN
    lost: str  # the reason, or ""

    def as_dict(self) -> dict[str, int | float | str]:
        """Plain data, for a file."""
        return asdict(self)


class Ledger:
    """Collects rows until a step closes."""

    def __init__(self) -> None:
        self._open: list[Row] = []

    def answered(self, order: Orders, update: Updates, charges: Charges, lost: str) -> None:
        """An answer came in; `lost` says why it does not count, if so."""
        row = _row(order, charges, lost)
        self._open.append(replace(row, loss=measured(update.report[0], "loss")))

    def lost(self, order: Orders, charges: Charges | None, reason: str) -> None:
        """An order will never be answered."""
        self._open.append(_row(order, charges, reason))

    def close(self, step: int) -> tuple[Row, ...]:
        """The rows of this step, by order."""
        rows = sorted(self._open, key=lambda row: row.order)
        self._open = []
        return tuple(replace(row, step=step) for row in rows)


def _row(order: Orders, charges: Charges | None, lost: str) -> Row:
    spent = {
        name: 0.0 if charges is None else float(getattr(charges, name)[0])
        for name in ("flops", "down", "up", "download", "compute", "upload")
    }
    model = order.trees[0].get("model", {})
    return Row(
        step=-1,
        order=int(order.id[0]),
        device=int(order.device[0]),
        kind=str(order.kind),
        issued_at=order.step,
        choice=int(order.choice[0]),
        parameters=sum(value.numel() for value in model.values()),
        bits_down=spent.pop("down"),
        bits_up=spent.pop("up"),
        loss=float("nan"),
        lost=lost,
        **spent,
    )
