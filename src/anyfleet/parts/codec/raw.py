"""Codecs that send numbers as they are, in fewer bits at most, or nothing at all."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from anyfleet.core.layout import MessageLayout, Symbols, TensorLayout
from anyfleet.core.messages import Params
from anyfleet.core.slots import Codec, Compressed
from anyfleet.errors import BadMessage

_TYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Raw(Codec):
    """Every number, one after the other, as it is or rounded to a shorter format.

    A number beyond the range of "fp16" travels as the largest that it has. The bits are exact.
    """

    precision: Literal["same", "fp32", "fp16", "bf16"] = "same"

    def __post_init__(self) -> None:
        if self.precision not in ("same", *_TYPES):
            raise ValueError(
                f"Raw.precision may be same, {', '.join(_TYPES)}; got {self.precision!r}."
            )

    def compress(
        self, tree: Params, state: Params, sent_fraction: Tensor, layout: MessageLayout
    ) -> Compressed:
        laid, to = layout.flattened(tree), self._type(layout)
        numbers = {name: _rounded(rows, to) for name, rows in laid.items()}
        symbols = Symbols(numbers=numbers)
        # What nothing is done to is handed on as it is, without a copy.
        same = to == layout.dtype
        received = dict(tree) if same else self.restore(symbols, layout)[0]
        error = torch.zeros(len(sent_fraction)) if same else distortion(tree, received)
        return Compressed(received, {}, symbols, self.bits(symbols, layout), {}, error)

    def bits(self, symbols: Symbols, layout: MessageLayout) -> Tensor:
        size = 8 * self._type(layout).itemsize
        rows = max((len(rows) for rows in symbols.numbers.values()), default=len(layout.key))
        sums = [
            sum(lane.ends[column] - lane.begins(column) for lane in layout.tensors.values())
            for column in range(layout.columns)
        ]
        return torch.tensor(sums, dtype=torch.float64).mul(size).expand(rows, -1)

    def pack(self, symbols: Symbols, layout: MessageLayout) -> tuple[bytes, ...]:
        there = layout.columns if symbols.columns is None else symbols.columns
        return tuple(
            b"".join(
                _bytes(symbols.numbers[name][0, lane.begins(column) : lane.ends[column]])
                for name, lane in layout.tensors.items()
            )
            for column in range(there)
        )

    def unpack(self, columns: Sequence[bytes], layout: MessageLayout) -> Symbols:
        to, lanes = self._type(layout), layout.tensors
        pieces: dict[str, list[Tensor]] = {name: [] for name in lanes}
        for column, data in enumerate(columns):
            sizes = [lane.ends[column] - lane.begins(column) for lane in lanes.values()]
            if len(data) != sum(sizes) * to.itemsize:
                raise BadMessage(
                    f"{len(data)} bytes for {sum(sizes)} numbers of {to.itemsize} bytes each"
                )
            flat = torch.frombuffer(bytearray(data), dtype=to) if data else torch.zeros(0, dtype=to)
            for name, piece in zip(lanes, torch.split(flat, sizes), strict=True):
                pieces[name].append(piece)
        numbers = {name: _joined(pieces[name], lane, to) for name, lane in lanes.items()}
        return Symbols(numbers=numbers, columns=len(columns))

    def restore(self, symbols: Symbols, layout: MessageLayout) -> tuple[Params, Params]:
        numbers = {name: rows.to(layout.dtype) for name, rows in symbols.numbers.items()}
        came = delivered(symbols, layout)
        if came:
            numbers = {name: rows * came[name] for name, rows in numbers.items()}
        return layout.unflattened(numbers), layout.unflattened(came) if came else {}

    def _type(self, envelope: MessageLayout) -> torch.dtype:
        return _TYPES.get(self.precision, envelope.dtype)


@dataclass(frozen=True)
class Nothing(Codec):
    """Sends no tensors at all: a device that shares nothing (the reference row `local`)."""

    def compress(
        self, tree: Params, state: Params, sent_fraction: Tensor, layout: MessageLayout
    ) -> Compressed:
        nothing = torch.zeros(len(sent_fraction), layout.columns, dtype=torch.float64)
        return Compressed({}, {}, Symbols(), nothing, {}, torch.ones(len(sent_fraction)))

    def bits(self, symbols: Symbols, layout: MessageLayout) -> Tensor:
        return torch.zeros(1, layout.columns, dtype=torch.float64)

    def pack(self, symbols: Symbols, layout: MessageLayout) -> tuple[bytes, ...]:
        return ()

    def unpack(self, columns: Sequence[bytes], layout: MessageLayout) -> Symbols:
        if any(columns):
            raise BadMessage(f"{sum(map(len, columns))} bytes where nothing is sent")
        return Symbols()

    def restore(self, symbols: Symbols, layout: MessageLayout) -> tuple[Params, Params]:
        return {}, {}


def distortion(sent: Params, received: Params) -> Tensor:
    """Squared error over squared norm of every row; 0 where there is nothing to send (§F.7)."""
    errors = sum(_squares(received[name] - value) for name, value in sent.items())
    totals = sum(_squares(value) for value in sent.values())
    if not isinstance(errors, Tensor) or not isinstance(totals, Tensor):
        return torch.zeros(1)
    return torch.where(totals > 0, errors / totals.clamp(min=1e-300), 0.0)


def delivered(symbols: Symbols, envelope: MessageLayout) -> dict[str, Tensor]:
    """For every lane, 1 for entries of columns that came and 0 for the others; empty: all came."""
    if symbols.columns is None or symbols.columns >= envelope.columns:
        return {}
    return {
        name: _leading(lane, symbols.columns, envelope.dtype)
        for name, lane in envelope.tensors.items()
    }


def _leading(lane: TensorLayout, columns: int, dtype: torch.dtype) -> Tensor:
    flags = torch.zeros(1, lane.entries, dtype=dtype)
    flags[:, : lane.begins(columns)] = 1
    return flags


def _squares(value: Tensor) -> Tensor:
    # In double precision without a copy in it.
    norms: Tensor = torch.linalg.vector_norm(value.flatten(1), dim=1, dtype=torch.float64)
    return norms.square()


def _rounded(rows: Tensor, to: torch.dtype) -> Tensor:
    if to == rows.dtype:
        return rows
    most = torch.finfo(to).max
    # What is infinite stays so: whoever receives it must be able to refuse it.
    return torch.where(rows.isinf(), rows, rows.clamp(-most, most)).to(to)


def _bytes(numbers: Tensor) -> bytes:
    # Numpy has no bfloat16: its bytes are those of 16-bit integers.
    plain = numbers.detach().cpu().contiguous()
    return plain.view(torch.uint8).numpy().tobytes() if plain.numel() else b""


def _joined(pieces: Sequence[Tensor], lane: TensorLayout, to: torch.dtype) -> Tensor:
    rest = lane.entries - sum(map(len, pieces))
    return torch.cat([*pieces, torch.zeros(rest, dtype=to)]).unsqueeze(0)
