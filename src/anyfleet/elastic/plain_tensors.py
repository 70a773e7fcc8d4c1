"""Plain tensors for caches, whatever mode of torch the caller is in."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils._python_dispatch import _disable_current_modes


@contextmanager
def plain_tensors() -> Iterator[None]:
    """Make tensors in here that are neither fake, nor of inference, nor part of a transform.

    One that is would stay in a cache after its mode has ended, and be of no use to anybody.
    """
    with (
        temporarily_clear_interpreter_stack(),
        _disable_current_modes(),
        torch.inference_mode(False),
    ):
        yield
