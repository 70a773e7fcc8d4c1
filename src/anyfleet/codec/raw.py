"""Codecs that change nothing, or send nothing."""

from dataclasses import dataclass
from itertools import accumulate
from typing import ClassVar

import torch
from torch import Tensor

from anyfleet.elastic import Blueprint, Slice
from anyfleet.errors import BadMessage
from anyfleet.method import Shapes, Squeezed
from anyfleet.packing import dense
from anyfleet.types import Params


@dataclass(frozen=True)
class Raw:
    """Every number as it is, one after the other."""

    slot: ClassVar[str] = ""

    def squeeze(self, tree: Params, memory: Params, key: Tensor, rate: Tensor) -> Squeezed:
        bits = torch.tensor(float(_bits(tree)))
        return Squeezed(tree, {}, tree, bits, {}, torch.tensor(0.0))

    def narrow(self, symbols: Params, sub: Slice, local: Blueprint) -> tuple[Params, float]:
        part = dense(symbols, sub, local)
        return part, float(_bits(part))

    def pack(self, symbols: Params) -> bytes:
        return b"".join(
            value.detach().cpu().contiguous().numpy().tobytes() for value in symbols.values()
        )

    def unpack(self, data: bytes, shapes: Shapes, dtype: torch.dtype) -> dict[str, Tensor]:
        sizes = [torch.Size(shape).numel() for shape in shapes.values()]
        if len(data) != sum(sizes) * dtype.itemsize:
            raise BadMessage(
                f"{len(data)} bytes for {sum(sizes)} numbers of {dtype.itemsize} bytes each"
            )
        flat = torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.zeros(0)
        ends = list(accumulate(sizes))
        return {
            name: flat[end - size : end].reshape(shape)
            for (name, shape), size, end in zip(shapes.items(), sizes, ends, strict=True)
        }

    def restore(self, symbols: Params, shapes: Shapes) -> tuple[Params, Params]:
        return symbols, {}


@dataclass(frozen=True)
class Nothing:
    """Sends no tensors at all: a device that shares nothing (the reference row `local`)."""

    slot: ClassVar[str] = ""

    def squeeze(self, tree: Params, memory: Params, key: Tensor, rate: Tensor) -> Squeezed:
        return Squeezed({}, {}, None, torch.tensor(0.0), {}, torch.tensor(1.0))

    def narrow(self, symbols: None, sub: Slice, local: Blueprint) -> tuple[None, float]:
        return None, 0.0

    def pack(self, symbols: None) -> bytes:
        return b""

    def unpack(self, data: bytes, shapes: Shapes, dtype: torch.dtype) -> None:
        if data:
            raise BadMessage(f"{len(data)} bytes where nothing is sent")

    def restore(self, symbols: None, shapes: Shapes) -> tuple[Params, Params]:
        return {}, {}


def _bits(tree: Params) -> int:
    return sum(8 * value.element_size() * value.numel() for value in tree.values())
