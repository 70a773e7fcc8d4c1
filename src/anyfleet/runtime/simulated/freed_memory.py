"""Freed memory: what a local step gives back, the next one takes again."""

import ctypes
import os
import sys
from functools import cache

# Numbers of the settings of `mallopt`, as the C library of Linux (glibc) has them.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -2, -3, -8
_LARGEST = (1 << 31) - 1  # number that a setting takes
_MMAP_MOST = 32 << 20  # bytes: the most that it accepts
_PAD = 64 << 20  # bytes that are asked for beyond what is needed, so that it is asked for seldom


@cache
def keep_freed_memory() -> None:
    """Let this process keep the memory that tensors on a CPU give back, where it can be told so.

    Otherwise large tensors come from fresh pages in every local step, which the system has to fill
    with zeros: with stacks of a network of half a million parameters that took a third of the
    time. One process has one heap then, since each of several is too small for stacks. No result
    depends on it. Whoever sets `MALLOC_…` in the environment decides instead, and so does another
    C library or allocator.
    """
    told = any(name.startswith("MALLOC_") for name in os.environ)
    if sys.platform != "linux" or told or "GLIBC_TUNABLES" in os.environ:
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return
    for setting, value in (
        (_ARENA_MAX, 1),
        (_MMAP_THRESHOLD, _MMAP_MOST),
        (_TRIM_THRESHOLD, _LARGEST),
        (_TOP_PAD, _PAD),
    ):
        mallopt(setting, value)
