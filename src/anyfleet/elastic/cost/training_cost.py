"""The cost of a slice for its device: parameters, bytes, FLOP, calls, memory."""

from dataclasses import dataclass, field
from functools import cached_property, lru_cache

from anyfleet.elastic.blueprint import WHOLE, Blueprint, Slice
from anyfleet.elastic.cost import flops, memory
from anyfleet.elastic.cost import memory_traffic as traffic
from anyfleet.elastic.cost.passes import ITEM
from anyfleet.elastic.slice_width import narrowed
from anyfleet.elastic.slice_width import width as slice_width


@dataclass(frozen=True)
class Cost:
    """The cost of one slice; work and activations are those of one batch.

    `nbytes` is the size of all parameters of the small model. Calls and moved bytes are those of
    all operators (see `memory_traffic`): what takes time besides arithmetic. `subject` is what all
    this is the cost of: the small model, its first trained layer and the batch. Memory is computed
    on demand, as it takes longer than all the rest.
    """

    params: int
    sent_params: int
    nbytes: int
    largest_bytes: int  # of the largest parameter that is trained
    input_bytes: int  # of the samples themselves
    forward_flops: int
    backward_flops: int
    forward_calls: int
    backward_calls: int
    forward_moved: int
    backward_moved: int
    subject: tuple[Blueprint, int, int] = field(repr=False)

    @property
    def flops(self) -> int:
        """FLOP, forward and backward together."""
        return self.forward_flops + self.backward_flops

    @property
    def calls(self) -> int:
        """Operator calls, forward and backward together."""
        return self.forward_calls + self.backward_calls

    @property
    def moved(self) -> int:
        """Bytes that operators read and write, forward and backward together."""
        return self.forward_moved + self.backward_moved

    @property
    def memory(self) -> int:
        """Parameters, gradients of those trained, and activations, in bytes.

        The least that any way of training needs, and what `Budget.memory` limits; for what ours
        takes, see `Train.work`.
        """
        return self.nbytes + ITEM * self.sent_params + self.activation_bytes

    @property
    def activation_bytes(self) -> int:
        """Bytes that autograd saves for the backward pass (see `memory.saved_bytes`)."""
        return memory.saved_bytes(*self.subject)

    @property
    def pass_bytes(self) -> int:
        """Bytes that a forward and a backward pass hold at their peak besides the model.

        Gradients included.
        """
        return memory.pass_bytes(*self.subject)


@dataclass(frozen=True)
class Priced:
    """A slice with its costs, for one sample and for a batch, and with those of what it contains.

    A trainer that also runs narrower models inside the slice asks `within` for their costs.
    """

    blueprint: Blueprint
    slice: Slice
    batch_size: int
    planned_width: float | None = None  # before it was rounded up to whole channels, where known

    @property
    def width(self) -> float:
        """The width of the slice: as planned, or else that of its channels."""
        if self.planned_width is not None:
            return self.planned_width
        return slice_width(self.slice, self.blueprint)

    @cached_property
    def sample(self) -> Cost:
        """The cost of one sample."""
        return cost(self.blueprint, self.slice)

    @cached_property
    def batch(self) -> Cost:
        """The cost of one batch."""
        return cost(self.blueprint, self.slice, self.batch_size)

    def within(self, width: float) -> "Priced":
        """Return the costs of the leading part of the slice, up to a width of the whole model."""
        part = narrowed(self.slice, width, self.blueprint)
        return Priced(self.blueprint, part, self.batch_size, width)


@lru_cache(maxsize=4096)
def cost(blueprint: Blueprint, slice: Slice = WHOLE, batch: int = 1) -> Cost:
    """Return the cost of training a slice of the model, per batch of that size."""
    # How many indices, not which: otherwise a network with constants along an axis would be
    # counted anew for every index set, and norms give new ones in every round.
    leading = tuple((axis, tuple(range(count))) for axis, count in slice.shape(blueprint)[0])
    return _cost(blueprint.local(Slice(leading)), slice.first_trained_layer, batch)


@lru_cache(maxsize=4096)
def _cost(small: Blueprint, first: int, batch: int) -> Cost:
    # Apart from the slice: slices of equal shape share one entry.
    work = flops.count(small, first, batch)
    besides = traffic.count(small, first, batch)
    params, trained = small.numel(), small.trained(first)
    return Cost(
        params=params,
        sent_params=small.numel(trained),
        nbytes=ITEM * params,
        largest_bytes=ITEM * max((small.numel([name]) for name in trained), default=0),
        input_bytes=memory.input_bytes(small, batch),
        forward_flops=work.forward,
        backward_flops=work.backward,
        forward_calls=besides.forward_calls,
        backward_calls=besides.backward_calls,
        forward_moved=besides.forward_bytes,
        backward_moved=besides.backward_bytes,
        subject=(small, first, batch),
    )
