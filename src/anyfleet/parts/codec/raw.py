"""Codecs that send numbers as they are, in fewer bits at most, or nothing at all."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor

from anyfleet.core.codec_calls import distortion
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

    precision: Literal["same", "fp32", "fp16", "bf16"] = "same"  # same: as they are

    def __post_init__(self) -> None:
        if self.precision not in ("same", *_TYPES):
            raise ValueError(
                f"Raw.precision may be same, {', '.join(_TYPES)}; got {self.precision!r}."
            )

    def compress(
        self, rows: Params, sent_fraction: Tensor, layout: MessageLayout, state: Params
    ) -> Compressed:
        to = self._type(layout)
        symbols = Symbols(numbers={name: _rounded(each, to) for name, each in rows.items()})
        # Rows that nothing is done to are handed on without a copy.
        same = to == layout.dtype
        received = dict(rows) if same else self.restore(symbols, layout)[0]
        error = torch.zeros(len(sent_fraction)) if same else distortion(rows, received, layout)
        return Compressed(received, {}, symbols, self.bits(symbols, layout), {}, error)

    def bits(self, symbols: Symbols, layout: MessageLayout) -> Tensor:
        size = 8 * self._type(layout).itemsize
        devices = len(next(iter(symbols.numbers.values()), layout.key))
        ends = [sum(each) for each in zip(*(t.ends for t in layout.tensors.values()), strict=True)]
        sums = [size * (end - begin) for begin, end in pairwise([0, *(ends or [0])])]
        return torch.tensor(sums, dtype=torch.float64).expand(devices, -1)

    def pack(self, symbols: Symbols, layout: MessageLayout) -> tuple[bytes, ...]:
        there = layout.columns if symbols.columns is None else symbols.columns
        return tuple(
            b"".join(
                _bytes(symbols.numbers[name][0, tensor.begins(column) : tensor.ends[column]])
                for name, tensor in layout.tensors.items()
            )
            for column in range(there)
        )

    def unpack(self, columns: Sequence[bytes], layout: MessageLayout) -> Symbols:
        to, tensors = self._type(layout), layout.tensors
        pieces: dict[str, list[Tensor]] = {name: [] for name in tensors}
        for column, data in enumerate(columns):
            sizes = [each.ends[column] - each.begins(column) for each in tensors.values()]
            if len(data) != sum(sizes) * to.itemsize:
                raise BadMessage(
                    f"{len(data)} bytes for {sum(sizes)} numbers of {to.itemsize} bytes each"
                )
            flat = torch.frombuffer(bytearray(data), dtype=to) if data else torch.zeros(0, dtype=to)
            for name, piece in zip(tensors, torch.split(flat, sizes), strict=True):
                pieces[name].append(piece)
        numbers = {name: _joined(pieces[name], tensor, to) for name, tensor in tensors.items()}
        return Symbols(numbers=numbers, columns=len(columns))

    def restore(self, symbols: Symbols, layout: MessageLayout) -> tuple[Params, Params]:
        rows = {name: each.to(layout.dtype) for name, each in symbols.numbers.items()}
        came = layout.delivered(symbols.columns)
        if came:
            rows = {name: each * came[name] for name, each in rows.items()}
        return rows, came

    def _type(self, layout: MessageLayout) -> torch.dtype:
        return _TYPES.get(self.precision, layout.dtype)


@dataclass(frozen=True)
class Nothing(Codec):
    """No tensors at all: for devices that share nothing (the reference row `local`)."""

    def compress(
        self, rows: Params, sent_fraction: Tensor, layout: MessageLayout, state: Params
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


def _rounded(rows: Tensor, to: torch.dtype) -> Tensor:
    if to == rows.dtype:
        return rows
    most = torch.finfo(to).max
    # Infinite numbers stay so: a receiver must be able to refuse them.
    return torch.where(rows.isinf(), rows, rows.clamp(-most, most)).to(to)


def _bytes(numbers: Tensor) -> bytes:
    # numpy has no bfloat16, so numbers of every type are seen as bytes.
    plain = numbers.detach().cpu().contiguous()
    return plain.view(torch.uint8).numpy().tobytes() if plain.numel() else b""


def _joined(pieces: Sequence[Tensor], tensor: TensorLayout, to: torch.dtype) -> Tensor:
    rest = tensor.entries - sum(map(len, pieces))
    return torch.cat([*pieces, torch.zeros(rest, dtype=to)]).unsqueeze(0)
