"""A traced network as plain data: ATen calls with sizes that follow the axes and the batch."""

import hashlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import msgspec
import torch
from torch import Tensor

# A dimension is a concatenation of products of axis names; () is the empty product, of size 1.
Dim = tuple[tuple[str, ...], ...]

BATCH = "batch"

# Operators that make a tensor out of nothing: they need to be told where and of which dtype.
CREATIONS = frozenset(
    (
        "arange",
        "empty",
        "eye",
        "full",
        "linspace",
        "ones",
        "rand",
        "randn",
        "scalar_tensor",
        "zeros",
    )
)


def length(dim: Dim, sizes: Mapping[str, int]) -> int:
    """Return the size of a dimension, given the size of every axis."""
    return sum(math.prod(sizes[axis] for axis in product) for product in dim)


class Value(msgspec.Struct, frozen=True, tag="value"):
    """The result of an earlier node, or an input of the network."""

    name: str


class Held(msgspec.Struct, frozen=True, tag="held"):
    """A parameter, a buffer or a constant."""

    name: str


class Size(msgspec.Struct, frozen=True, tag="size"):
    """A number that follows the axes of the (small) model and the batch."""

    dim: Dim


class Linear(msgspec.Struct, frozen=True, tag="linear"):
    """A number that Python computes from the batch size: `plus` + `times` · B."""

    times: int | float
    plus: int | float


class Named(msgspec.Struct, frozen=True, tag="named"):
    """A torch constant: a dtype ("model" is that of the parameters) or a memory format."""

    text: str


class Items(msgspec.Struct, frozen=True, tag="items"):
    """A list argument."""

    items: tuple["Arg", ...]


Arg = Value | Held | Size | Linear | Named | Items | bool | int | float | str | None


@dataclass(frozen=True)
class Node:
    """A call: `name = op(*args, **options)`.

    `dims` are the dimensions of the result (None if it is a list of tensors); `where` is the module
    that made the call; `site` numbers the calls that draw random numbers; `always` is set where one
    draws in evaluation too.
    """

    name: str
    op: str
    args: tuple[Arg, ...]
    options: Mapping[str, Arg]
    dims: tuple[Dim, ...] | None
    where: str = ""
    site: int = 0
    always: bool = False

    @property
    def operator(self) -> str:
        """The operator without namespace and overload, as in "conv2d"."""
        return self.op.split(".")[1] if "." in self.op else self.op

    @property
    def arguments(self) -> tuple[Arg, ...]:
        """The positional arguments, then the named ones."""
        return (*self.args, *self.options.values())


@dataclass(frozen=True)
class Constant:
    """A tensor that travels with the program: lifted constants and non-persistent buffers."""

    dims: tuple[Dim, ...]
    shape: tuple[int, ...]
    dtype: str
    data: bytes

    @staticmethod
    def of(tensor: Tensor, dims: tuple[Dim, ...]) -> "Constant":
        """Return a tensor as a constant."""
        plain = tensor.detach().cpu().contiguous()
        data = plain.reshape(-1).view(torch.uint8).numpy().tobytes()
        dtype = str(plain.dtype).removeprefix("torch.")
        return Constant(dims, tuple(plain.shape), dtype, data)

    @cached_property
    def _memory(self) -> bytearray:
        return bytearray(self.data)

    def tensor(self) -> Tensor:
        """Return a new tensor over the same memory, not to be written to.

        Never cache it: one made under a fake or inference mode would stay so.
        """
        if not self.data:
            return torch.empty(self.shape, dtype=dtype_of(self.dtype))
        raw = torch.frombuffer(self._memory, dtype=dtype_of(self.dtype))
        return raw.reshape(self.shape)


@dataclass(frozen=True)
class Input:
    """One input of the network: the batch comes first; dtype "model" is that of the parameters."""

    name: str
    dims: tuple[Dim, ...]
    dtype: str


@dataclass(frozen=True)
class Program:
    """The calls in order, and which value is the output.

    `updates` are (buffer, value) pairs: what the network itself writes into its buffers while
    training, apart from the statistics of batch norm.
    """

    inputs: tuple[Input, ...]
    nodes: tuple[Node, ...]
    constants: Mapping[str, Constant]
    output: str
    updates: tuple[tuple[str, str], ...] = ()

    @cached_property
    def digest(self) -> bytes:
        """The hash of the program's content."""
        return hashlib.sha256(msgspec.msgpack.encode(self)).digest()


def dtype_of(text: str) -> torch.dtype:
    """Return torch.float32 for "float32"; raise ValueError for what is not a dtype."""
    found = getattr(torch, text, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{text!r} is not a torch dtype")
    return found


def held_names(args: tuple[Arg, ...]) -> Iterator[str]:
    """Yield every parameter, buffer or constant among the arguments, in order."""
    for arg in args:
        if isinstance(arg, Held):
            yield arg.name
        elif isinstance(arg, Items):
            yield from held_names(arg.items)


def value_names(args: tuple[Arg, ...]) -> Iterator[str]:
    """Yield every earlier result among the arguments, in order."""
    for arg in args:
        if isinstance(arg, Value):
            yield arg.name
        elif isinstance(arg, Items):
            yield from value_names(arg.items)
