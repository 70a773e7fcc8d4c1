"""Tensors on disk: the blocks of memory that they lie in, in a safetensors file.

Values of a run share memory: rows of an array, slices of the model, one tree for all orders of a
cohort. So a file holds not tensors but the blocks of memory that they cover, and the document says
of every tensor where in which block it lies. Read again, tensors share memory as before, with the
same strides and the same alignment, so that the libraries below compute the same bits with them.
"""

import itertools
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import msgspec
import torch
from safetensors import safe_open
from torch import Tensor

from anyfleet.errors import StoreError

ALIGNMENT = 64  # bytes; torch allocates so, and the widest instructions load so many

# Types of numbers, as safetensors calls them.
TYPES: Mapping[torch.dtype, str] = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.uint16: "U16",
    torch.int32: "I32",
    torch.uint32: "U32",
    torch.int64: "I64",
    torch.uint64: "U64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}

Node = dict[str, Any]


class Writable(Protocol):
    """Something that takes bytes, such as a file."""

    def write(self, content: bytes | memoryview, /) -> int: ...


@dataclass(frozen=True, eq=False)
class _Place:
    """A tensor, and the node of the document that will say where it lies."""

    tensor: Tensor
    name: str
    node: Node

    @property
    def low(self) -> int:
        return int(self.tensor.storage_offset())

    @property
    def high(self) -> int:
        """The position after its last element."""
        sizes = zip(self.tensor.shape, self.tensor.stride(), strict=True)
        return self.low + 1 + sum((size - 1) * stride for size, stride in sizes)


@dataclass(eq=False)
class Blocks:
    """Tensors that are collected; `close` says where each lies, and returns the blocks."""

    _places: dict[Hashable, list[_Place]] = field(default_factory=dict)

    def add(self, tensor: Tensor, node: Node, name: str, memory: Hashable = None) -> Node:
        """Add a tensor that is not empty; return its node, which `close` completes in place.

        `memory` names the memory it lies in, if that is not torch's own.
        """
        node["shape"] = list(tensor.shape)
        pointer = tensor.untyped_storage().data_ptr() if memory is None else memory
        key = pointer, tensor.dtype, tensor.device
        self._places.setdefault(key, []).append(_Place(tensor.detach(), name, node))
        return node

    def close(self) -> dict[str, Tensor]:
        """Complete the nodes of all tensors, and return the blocks by name."""
        blocks: dict[str, Tensor] = {}
        for places in self._places.values():
            for cluster in _clusters(sorted(places, key=lambda place: place.low)):
                # A name may contain dots, so that two paths can have the same text.
                name = cluster[0].name
                name = f"{name}#{len(blocks)}" if name in blocks else name
                blocks[name] = _block(name, cluster)
        return blocks


def _clusters(places: list[_Place]) -> Iterator[list[_Place]]:
    """Yield groups of tensors that overlap or touch; the memory between groups is not written."""
    cluster, end = [places[0]], places[0].high
    for place in places[1:]:
        if place.low > end:
            yield cluster
            cluster, end = [], place.high
        cluster.append(place)
        end = max(end, place.high)
    yield cluster


def _block(name: str, places: list[_Place]) -> Tensor:
    """Return the memory that these tensors cover, and write into their nodes where they lie."""
    first = places[0].tensor
    step = ALIGNMENT // first.element_size()
    low = places[0].low // step * step
    high = max(place.high for place in places)
    for place in places:
        strides = _strides(place.tensor)
        offset = {"offset": place.low - low} if place.low > low else {}
        place.node.update({"block": name, **strides, **offset})
    block = torch.as_strided(first, (high - low,), (1,), low)
    whole = first.is_contiguous() and first.numel() == high - low
    return (block.reshape(first.shape) if whole else block).cpu()


def _strides(tensor: Tensor) -> dict[str, list[int]]:
    """Return the strides unless they are the usual ones.

    Those of sizes of 1 count too: torch tells memory formats by them.
    """
    strides = list(tensor.stride())
    return {} if strides == _contiguous(list(tensor.shape)) else {"strides": strides}


def view(flat: Tensor, node: Mapping[str, Any]) -> Tensor:
    """Return the tensor that a node describes, in its block."""
    shape = node["shape"]
    strides = node.get("strides") or _contiguous(shape)
    offset = int(flat.storage_offset()) + node.get("offset", 0)
    return torch.as_strided(flat, shape, strides, offset)


def _contiguous(shape: list[int]) -> list[int]:
    """Return strides without gaps, as torch makes them."""
    steps = itertools.accumulate((max(1, size) for size in shape[:0:-1]), int.__mul__, initial=1)
    return list(steps)[::-1] if shape else []


def write(out: Writable, blocks: Mapping[str, Tensor]) -> None:
    """Write a safetensors file, block after block, without a copy of all in memory."""
    header: dict[str, Any] = {}
    position = 0
    for name, block in blocks.items():
        end = position + block.numel() * block.element_size()
        header[name] = {
            "dtype": TYPES[block.dtype],
            "shape": list(block.shape),
            "data_offsets": [position, end],
        }
        position = end
    text = msgspec.json.encode(header)
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    out.write(len(text).to_bytes(8, "little") + text)
    for block in blocks.values():
        out.write(content(block))


def content(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor, row by row; no copy is made if they lie like that."""
    plain = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return memoryview(plain.numpy().data)


def read(file: Path) -> dict[str, Tensor]:
    """Return the blocks of a file, flat, in torch's own memory."""
    with safe_open(file, framework="pt") as opened:
        return {name: opened.get_tensor(name).reshape(-1).clone() for name in opened.keys()}  # noqa: SIM118 - no mapping


def checked(tensor: Tensor) -> Tensor:
    """Return the tensor; raise StoreError if it has no plain memory."""
    if tensor.layout != torch.strided or tensor.dtype not in TYPES or tensor.is_quantized:
        raise StoreError(f"a tensor of {tensor.dtype} and {tensor.layout}")
    if tensor.requires_grad:
        raise StoreError("a tensor that requires grad; keep `tensor.detach()`")
    return tensor
