"""How much a trainer makes a device do: FLOP, bytes of memory, operator calls, bytes moved.

An amount is a number for one order, or an array with a value for each order of a cohort; of a
cohort, too, one number may stand for all.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from anyfleet.arrays import Ints
from anyfleet.elastic import Priced

FLOAT_BYTES = 4
UPDATE_PASSES = 5  # lr × gradient: read, write; parameter − step: read both, write
_TEMPORARY = 2  # copies of one parameter, while an optimiser computes its new value

Counted = int | Ints  # of one order, or of every order of a cohort
Amounts = float | NDArray[np.floating[Any]]  # the same of what need not be whole


@dataclass(frozen=True)
class Work:
    """The work of an order, for the clock and for the memory of its device.

    The sum of two is one after the other: all is added up, but for memory, of which the larger
    peak counts. A multiple is the same work several times over, in the same memory.
    """

    flops: Amounts
    memory: Amounts  # bytes at the peak
    calls: Amounts  # of operators
    moved: Amounts  # bytes that operators read and write

    def __add__(self, after: "Work") -> "Work":
        return Work(
            flops=self.flops + after.flops,
            memory=np.maximum(self.memory, after.memory),
            calls=self.calls + after.calls,
            moved=self.moved + after.moved,
        )

    def __mul__(self, times: Amounts) -> "Work":
        return Work(self.flops * times, self.memory, self.calls * times, self.moved * times)

    __rmul__ = __mul__


def descent_work(
    priced: Priced, processed: Counted, local_steps: Counted, *, copies: int = 0
) -> Work:
    """Return the work of gradient descent: a forward and a backward pass and an update each step.

    `processed` samples go through the sub-model in all. `copies` is the number of tensors that the
    optimiser keeps for each trained parameter.
    """
    sample, batch = priced.sample, priced.batch
    trained, state = FLOAT_BYTES * sample.sent_params, state_bytes(priced, copies)
    # All the time: the model as it came (what is sent is the difference) and the state.
    held = sample.nbytes + state
    # The new state is made beside the old one, while gradients and samples are still there.
    updating = trained + state + _TEMPORARY * sample.largest_bytes + batch.input_bytes
    peak = float(held + max(batch.pass_bytes, updating))
    passes = passes_work(priced, processed, local_steps)
    moved = passes.moved + update_work(priced, local_steps, copies=copies).moved
    return Work(passes.flops, peak, passes.calls, moved)


def passes_work(priced: Priced, processed: Counted, local_steps: Counted) -> Work:
    """Return the work of the forward and backward passes alone.

    Without memory, which takes longer to find than all the rest.
    """
    sample, batch = priced.sample, priced.batch
    return Work(
        flops=float(sample.flops) * processed,
        memory=0.0,
        calls=float(batch.calls) * local_steps,
        moved=float(batch.moved) * local_steps,
    )


def forward_work(priced: Priced, processed: Counted, local_steps: Counted) -> Work:
    """Return the work of forward passes alone, without memory."""
    sample, batch = priced.sample, priced.batch
    return Work(
        flops=float(sample.forward_flops) * processed,
        memory=0.0,
        calls=float(batch.forward_calls) * local_steps,
        moved=float(batch.forward_moved) * local_steps,
    )


def update_work(priced: Priced, local_steps: Counted, *, copies: int = 0) -> Work:
    """Return the work of the updates alone: each goes over gradient, step and parameter."""
    return Work(0.0, 0.0, 0.0, float(UPDATE_PASSES * state_bytes(priced, copies)) * local_steps)


def state_bytes(priced: Priced, copies: int = 0) -> int:
    """Return the bytes of what is trained and of what an optimiser keeps of it."""
    return FLOAT_BYTES * priced.sample.sent_params * (1 + copies)
