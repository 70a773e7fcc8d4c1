"""The range coder that turns symbols into words: a library that some machines do not have.

It is imported when the first word is written or read. All else works without it, the number of
bits of a message included.
"""

from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from anyfleet.errors import AnyfleetError

Model = Any  # of symbols
_MISSING = (
    "the library constriction, which writes and reads entropy-coded messages, is not installed "
    "here. Use a method whose messages are plain numbers (codec.Raw), such as fedavg or heterofl, "
    "or install it; on Linux with ARM it has to be built (docs/devices.md, Processors and boards)."
)


@cache
def _library() -> Any:
    try:
        import constriction
    except ImportError as error:
        raise AnyfleetError(_MISSING) from error
    return constriction.stream


def missing() -> str:
    """Return why there is no range coder on this machine, and what to do; "" if there is one."""
    try:
        _library()
    except AnyfleetError as error:
        return str(error)
    return ""


def encoder() -> Any:
    """Return a new range encoder."""
    return _library().queue.RangeEncoder()


def decoder(words: NDArray[np.uint32]) -> Any:
    """Return a range decoder of words."""
    return _library().queue.RangeDecoder(words)


def uniform(size: int) -> Model:
    """Return the model of `size` symbols that are equally likely."""
    return _library().model.Uniform(size)


def categorical(probabilities: NDArray[np.float64]) -> Model:
    """Return the model of symbols with these probabilities."""
    return _library().model.Categorical(probabilities, perfect=False)
