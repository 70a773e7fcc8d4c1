"""The blueprint of a model: axes, the tensors they index, layers; and slices of it."""

import hashlib
import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, lru_cache
from typing import Any, Literal

import msgspec

from anyfleet.elastic.indexing import index, take
from anyfleet.elastic.plain_tensors import plain_tensors
from anyfleet.elastic.program import Constant, Dim, Program, length
from anyfleet.errors import SliceError
from anyfleet.formulas.sub_models import kept_channels

Rounding = Literal["ceil", "round"]

# Cut by a plain width.
SHARED_KINDS = frozenset({"channels", "heads"})
# May be cut at all.
FREE_KINDS = SHARED_KINDS | {"head_dim", "groups"}
# Fields of a blueprint that came later: where they are empty its bytes are those of before.
_SELDOM = frozenset({"aliases", "evaluation"})


@dataclass(frozen=True)
class Axis:
    """Coordinates that are kept or dropped together, wherever they index a tensor.

    `whole` is the size in the global model. Kinds: "channels" and "heads" are cut by a plain width,
    "head_dim" and "groups" only when named; "output" (the classes), "fixed" (`why` gives the
    reason) and "batch" are never cut.
    """

    size: int
    whole: int
    kind: str
    why: str = ""

    @property
    def free(self) -> bool:
        """Whether the axis may be cut."""
        return self.kind in FREE_KINDS


@dataclass(frozen=True)
class Layer:
    """Parameters and buffers trained together; a norm belongs to the layer before it."""

    name: str
    params: tuple[str, ...]
    buffers: tuple[str, ...]


@dataclass(frozen=True)
class BatchNormSite:
    """The tensors of one batch norm; None where the module has none."""

    weight: str | None
    bias: str | None
    mean: str | None
    variance: str | None
    count: str | None


@dataclass(frozen=True)
class Slice:
    """The indices kept on each axis, and the first trained layer.

    Canonical: sorted by axis; an axis kept whole in its natural order is absent. Build with
    `Slice.of`.
    """

    keep: tuple[tuple[str, tuple[int, ...]], ...] = ()
    first_trained_layer: int = 0

    @staticmethod
    def of(
        keep: Mapping[str, Sequence[int]], blueprint: "Blueprint", first_trained_layer: int = 0
    ) -> "Slice":
        """Return a checked and canonical slice; raise SliceError if there is no such slice.

        Indices stay in the order given: rolling windows wrap.
        """
        if first_trained_layer % 1 or not 0 <= first_trained_layer < max(1, len(blueprint.layers)):
            raise SliceError(
                f"there is no first trained layer {first_trained_layer}: the model has layers 0 to "
                f"{len(blueprint.layers) - 1}"
            )
        kept = {name: _whole_numbers(name, keep[name]) for name in sorted(keep)}
        for name, indices in kept.items():
            _check_indices(name, indices, blueprint)
        return Slice(
            tuple(
                (name, indices)
                for name, indices in kept.items()
                if indices != tuple(range(blueprint.axes[name].size))
            ),
            first_trained_layer,
        )

    @cached_property
    def _hash(self) -> int:
        return hash((self.keep, self.first_trained_layer))

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _kept(self) -> dict[str, tuple[int, ...]]:
        return dict(self.keep)

    def kept(self, axis: str) -> tuple[int, ...] | None:
        """Return the indices kept on an axis; None when it is whole."""
        return self._kept.get(axis)

    def sent(self, blueprint: "Blueprint") -> tuple[str, ...]:
        """Return the parameters this slice trains, in forward order."""
        return blueprint.trained(self.first_trained_layer)

    def shape(self, blueprint: "Blueprint") -> tuple[tuple[tuple[str, int], ...], int]:
        """Return a key that is equal for slices whose small models can be stacked."""
        counts = ((axis, len(indices)) for axis, indices in self.keep)
        return tuple(
            (axis, n) for axis, n in counts if n != blueprint.axes[axis].size
        ), self.first_trained_layer


WHOLE = Slice()


def _whole_numbers(axis: str, indices: Sequence[int]) -> tuple[int, ...]:
    try:
        found = tuple(operator.index(i) for i in indices)
    except TypeError as error:
        raise SliceError(f"axis {axis!r} takes whole numbers as indices, got {indices}") from error
    if any(isinstance(i, bool) for i in indices):
        raise SliceError(f"axis {axis!r} takes indices, not a mask of booleans: name what is kept")
    return found


def _check_indices(name: str, indices: tuple[int, ...], blueprint: "Blueprint") -> None:
    axis = blueprint.axes.get(name)
    if axis is None:
        known = ", ".join(n for n, a in blueprint.axes.items() if a.free)
        raise SliceError(f"unknown axis {name!r}; axes that can be cut: {known}")
    if not axis.free:
        why = axis.why or "see Axis.kind"
        raise SliceError(f"axis {name!r} cannot be cut ({axis.kind}: {why}); leave it out")
    if not indices:
        raise SliceError(f"axis {name!r} would be empty; keep at least one index")
    if min(indices) < 0 or max(indices) >= axis.size:
        raise SliceError(
            f"axis {name!r} has indices 0 to {axis.size - 1}, got {min(indices)} to {max(indices)}"
        )
    if len(set(indices)) != len(indices):
        raise SliceError(f"axis {name!r} has repeated indices; keep each of them once")


@dataclass(frozen=True, eq=False)
class Blueprint:
    """A traced model as plain data: cut, run and costed without its module or a tracer.

    `program` is what the module computes in training; `evaluation` what it does after `eval()`,
    where that is another function (dropout and batch norm follow the `Mode` in either). `aliases`
    are the other names under which the module's state_dict has a tensor, and its name here.
    """

    axes: Mapping[str, Axis]
    params: Mapping[str, tuple[Dim, ...]]
    buffers: Mapping[str, tuple[Dim, ...]]
    layers: tuple[Layer, ...]
    frozen: tuple[str, ...]
    program: Program
    norms: tuple[BatchNormSite, ...]
    scaled: tuple[str, ...]
    remarks: tuple[str, ...]
    aliases: Mapping[str, str] = field(default_factory=dict)
    evaluation: Program | None = None

    @cached_property
    def _plain(self) -> dict[str, Any]:
        """The fields; those that most networks leave empty are there only if they are used."""
        held = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: value for name, value in held.items() if value or name not in _SELDOM}

    @cached_property
    def digest(self) -> bytes:
        """The hash of the blueprint's content."""
        own = ("program", "evaluation")
        plain = [value for name, value in self._plain.items() if name not in own]
        programs = b"".join(program.digest for program in self.programs)
        return hashlib.sha256(msgspec.msgpack.encode(plain) + programs).digest()

    @property
    def evaluated(self) -> Program:
        """The program that the module computes in evaluation."""
        return self.evaluation or self.program

    @property
    def programs(self) -> tuple[Program, ...]:
        """The program of training, and that of evaluation where it is another."""
        return (self.program,) if self.evaluation is None else (self.program, self.evaluation)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Blueprint):
            return NotImplemented
        return self is other or self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    @cached_property
    def sizes(self) -> dict[str, int]:
        """The size of every axis; the batch counts as 1."""
        return {name: axis.size for name, axis in self.axes.items()}

    @cached_property
    def output_rows(self) -> tuple[tuple[str, int], ...]:
        """(parameter, dimension) pairs indexed by the classes of the output."""
        return tuple(
            (name, position)
            for name, dims in self.params.items()
            for position, dim in enumerate(dims)
            if any(self.axes[axis].kind == "output" for product in dim for axis in product)
        )

    def dims(self, name: str) -> tuple[Dim, ...]:
        """Return the dimensions of a parameter or buffer."""
        found = self.params.get(name, self.buffers.get(name))
        if found is None:
            raise KeyError(f"{name!r} is neither a parameter nor a buffer: see .params, .buffers")
        return found

    def axes_of(self, name: str, dimension: int = 0) -> tuple[str, ...]:
        """Return the axes that index one dimension of a tensor, outermost first."""
        return tuple(axis for product in self.dims(name)[dimension] for axis in product)

    def output_axes(self, name: str) -> tuple[str, ...]:
        """Return the axes of a tensor's first dimension: the channels that its rows produce.

        Empty for a tensor without dimensions, and where the rows are several products joined.
        """
        dims = self.dims(name)
        return dims[0][0] if dims and len(dims[0]) == 1 else ()

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the sizes of the dimensions of a parameter or buffer."""
        return tuple(length(dim, self.sizes) for dim in self.dims(name))

    def numel(self, names: Iterable[str] | None = None) -> int:
        """Return how many elements the named tensors have; all parameters by default."""
        return sum(
            math.prod(self.shape(name)) for name in (self.params if names is None else names)
        )

    def trained(self, first_trained_layer: int = 0) -> tuple[str, ...]:
        """Return the trainable parameters from the first trained layer on, in forward order."""
        frozen = set(self.frozen)
        layers = self.layers[first_trained_layer:]
        return tuple(p for layer in layers for p in layer.params if p not in frozen)

    def counts(
        self, width: float | Mapping[str, float], rounding: Rounding = "ceil"
    ) -> dict[str, int]:
        """Return how many indices of each axis a width keeps, at least one.

        A mapping gives a width for each axis that it names; the others stay whole.
        """
        if isinstance(width, Mapping):
            widths = dict(width)
        elif not 0 < width <= 1:
            raise SliceError(f"a width must lie in (0, 1], got {width}")
        else:
            widths = {n: float(width) for n, a in self.axes.items() if a.kind in SHARED_KINDS}
        for name, own in widths.items():
            _check_indices(name, (0,), self)
            if not 0 < own <= 1:
                raise SliceError(f"a width must lie in (0, 1], got {own} for axis {name!r}")
        return {
            n: min(self.axes[n].size, kept_channels(own, self.axes[n].whole, rounding))
            for n, own in widths.items()
        }

    def prefix(
        self,
        width: float | Mapping[str, float],
        first_trained_layer: int = 0,
        rounding: Rounding = "ceil",
    ) -> Slice:
        """Return the slice that keeps the leading indices of each axis."""
        keep = {n: range(c) for n, c in self.counts(width, rounding).items()}
        return Slice.of(keep, self, first_trained_layer)

    def local(self, slice: Slice) -> "Blueprint":
        """Return the blueprint of the small model: sizes change, `whole` stays."""
        return _local(self, slice) if slice.keep else self

    def to_bytes(self) -> bytes:
        """Return the blueprint as bytes; `from_bytes` reads them."""
        return msgspec.msgpack.encode(self._plain)

    @staticmethod
    def from_bytes(data: bytes) -> "Blueprint":
        """Return the blueprint that `to_bytes` wrote."""
        return msgspec.msgpack.decode(data, type=Blueprint)


def _mentions(dims: tuple[Dim, ...], axes: set[str]) -> bool:
    return any(axis in axes for dim in dims for product in dim for axis in product)


@lru_cache(maxsize=4096)
def _local(blueprint: Blueprint, slice: Slice) -> Blueprint:
    small = _resized(blueprint, slice.shape(blueprint)[0])
    cut_axes = {axis for axis, _ in slice.keep}
    # Only constants need the indices themselves; without them one blueprint serves every slice of
    # that shape.
    held = [c for program in blueprint.programs for c in program.constants.values()]
    if not any(_mentions(constant.dims, cut_axes) for constant in held):
        return small
    with plain_tensors():
        program, *others = (_with_constants(p, slice, blueprint) for p in blueprint.programs)
    return replace(small, program=program, evaluation=next(iter(others), None))


@lru_cache(maxsize=1024)
def _resized(blueprint: Blueprint, counts: tuple[tuple[str, int], ...]) -> Blueprint:
    sizes = dict(counts)
    axes = {n: replace(a, size=sizes.get(n, a.size)) for n, a in blueprint.axes.items()}
    return replace(blueprint, axes=axes)


def _with_constants(program: Program, slice: Slice, blueprint: Blueprint) -> Program:
    kept, sizes = dict(slice.keep), blueprint.sizes
    constants = {
        n: Constant.of(take(c.tensor(), tuple(index(d, kept, sizes) for d in c.dims)), c.dims)
        for n, c in program.constants.items()
    }
    return replace(program, constants=constants)
