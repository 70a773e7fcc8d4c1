"""The IDX format of MNIST and Fashion-MNIST: plain, or compressed with gzip or xz.

What was compressed is kept in the user's cache, by the digest of the file that it comes from.
"""

import gzip
import hashlib
import lzma
import math
import zlib
from collections.abc import Callable
from importlib.resources.abc import Traversable

import numpy as np
from numpy.typing import NDArray

from anyfleet import cache
from anyfleet.errors import MissingData

_UNSIGNED_BYTE = 0x08
_OPENERS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.decompress,
    ".xz": lzma.decompress,
}


def read_idx(folder: Traversable, name: str) -> NDArray[np.uint8]:
    """Return the array in `name`, `name.gz` or `name.xz` in `folder`."""
    for ending, decompress in _OPENERS.items():
        file = folder / (name + ending)
        if file.is_file():
            return _decode(file, decompress)
    raise MissingData(f"{name}[.gz] is not in {folder}.")


def _decode(file: Traversable, decompress: Callable[[bytes], bytes]) -> NDArray[np.uint8]:
    try:
        raw = _unpacked(file.read_bytes(), decompress)
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise ValueError(f"{file} cannot be decompressed ({error}): fetch it again.") from error
    if len(raw) < 4 or raw[:3] != bytes([0, 0, _UNSIGNED_BYTE]):
        raise ValueError(f"{file} is not an IDX file of bytes: fetch it again.")
    start = 4 + 4 * raw[3]
    if len(raw) < start:
        raise ValueError(f"{file} ends within its header: fetch it again.")
    shape = tuple(int.from_bytes(raw[at : at + 4], "big") for at in range(4, start, 4))
    values = np.frombuffer(raw, np.uint8, offset=start)
    if values.size != math.prod(shape):
        raise ValueError(
            f"{file} announces {shape} values but holds {values.size}: fetch it again."
        )
    return values.reshape(shape)


def _unpacked(content: bytes, decompress: Callable[[bytes], bytes]) -> bytes | memoryview:
    if decompress is bytes:
        return content
    key = {"sha256 of the packed file": hashlib.sha256(content).hexdigest()}
    found = cache.read("images", key)
    if found is None:
        unpacked = decompress(content)
        cache.write("images", key, unpacked)
        return unpacked
    return found
