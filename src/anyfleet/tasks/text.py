"""Text as windows of characters, for next-character prediction."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from anyfleet.tasks.partition import IntArray


class TextWindows(NamedTuple):
    """Windows of character numbers; a target is its input shifted by one character."""

    x: IntArray
    y: IntArray
    owners: IntArray
    vocabulary: str


def text_windows(texts: Sequence[str], length: int) -> TextWindows:
    """Return windows of `length` characters that do not overlap, text by text.

    The vocabulary is every character that occurs, in code-point order; a character's number is its
    position there. `owners` has the number of each window's text. The rest at the end of a text,
    and texts shorter than `length + 1`, are dropped.
    """
    if length < 1:
        raise ValueError(f"text_windows: length must be at least 1, got {length}.")
    codes = [_code_points(text) for text in texts]
    known = np.unique(np.concatenate(codes)) if codes else np.empty(0, np.uint32)
    numbered = [np.searchsorted(known, code) for code in codes]
    counts = [max(0, (len(code) - 1) // length) for code in codes]
    if not sum(counts):
        raise ValueError(f"text_windows: no text has more than {length} characters.")
    x = [code[: n * length].reshape(n, length) for code, n in zip(numbered, counts, strict=True)]
    y = [
        code[1 : n * length + 1].reshape(n, length)
        for code, n in zip(numbered, counts, strict=True)
    ]
    owners = np.repeat(np.arange(len(texts)), counts)
    return TextWindows(np.concatenate(x), np.concatenate(y), owners, "".join(map(chr, known)))


def _code_points(text: str) -> NDArray[np.uint32]:
    return np.frombuffer(text.encode("utf-32-le"), "<u4").astype(np.uint32)
