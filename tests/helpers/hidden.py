"""A machine without the range coder, such as a Raspberry Pi."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from anyfleet.parts.codec import entropy_tables, range_coder
from anyfleet.wire.jobs import decode_job


@contextmanager
def without_range_coder() -> Iterator[None]:
    """Hide the library of the range coder, and what was kept of it."""

    def forget() -> None:
        for kept in (range_coder._library, entropy_tables.gaps, decode_job):
            kept.cache_clear()

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "constriction", None)
        forget()
        try:
            yield
        finally:
            forget()
