"""What a slice costs its device."""

from dataclasses import dataclass
from functools import lru_cache

from anyfleet.elastic import flops, memory
from anyfleet.elastic.blueprint import Blueprint, Slice

# Bytes of one parameter: models are trained in float32.
ITEM = 4


@dataclass(frozen=True)
class Cost:
    """The cost of one slice; work and activations are those of one batch.

    `nbytes` is the size of all parameters of the small model, `activation_bytes` what autograd
    saves for the backward pass (see `memory.saved_bytes`).
    """

    params: int
    sent_params: int
    nbytes: int
    forward_flops: int
    backward_flops: int
    activation_bytes: int

    @property
    def flops(self) -> int:
        """Forward and backward together."""
        return self.forward_flops + self.backward_flops

    @property
    def memory(self) -> int:
        """Parameters, gradients of those trained, and activations, in bytes."""
        return self.nbytes + ITEM * self.sent_params + self.activation_bytes


_ALL = Slice()


@lru_cache(maxsize=4096)
def cost(blueprint: Blueprint, slice: Slice = _ALL, batch: int = 1) -> Cost:
    """The cost of training a slice of the model, per batch of that size."""
    return _cost(blueprint.local(slice), slice.first, batch)


@lru_cache(maxsize=4096)
def _cost(small: Blueprint, first: int, batch: int) -> Cost:
    # Apart from the slice: slices of equal shape share one entry.
    work = flops.count(small, first, batch)
    params = small.numel()
    return Cost(
        params=params,
        sent_params=small.numel(small.trained(first)),
        nbytes=ITEM * params,
        forward_flops=work.forward,
        backward_flops=work.backward,
        activation_bytes=memory.saved_bytes(small, first, batch),
    )
