"""Write the Fashion-MNIST subset that ships inside the package.

    python tools/embed.py FOLDER

FOLDER holds the four public IDX files (plain or .gz). Of each class the first 1,200 training and
the first 200 test images are kept, in their published order, as IDX files compressed with xz. The
same input gives the same bytes.
"""

import lzma
import sys
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from anyfleet.tasks.idx import read_idx

PER_CLASS = {"train": 1200, "t10k": 200}
TARGET = Path(__file__).parents[1] / "src" / "anyfleet" / "tasks" / "embedded"


def encode_idx(array: NDArray[np.uint8]) -> bytes:
    """Return the bytes of an uncompressed IDX file of `array`."""
    header = bytes([0, 0, 8, array.ndim])  # 8: unsigned bytes
    sizes = b"".join(size.to_bytes(4, "big") for size in array.shape)
    return header + sizes + np.ascontiguousarray(array).tobytes()


def embed(folder: Path, target: Path = TARGET) -> None:
    """Read the public files in `folder` and write the four small ones into `target`."""
    for split, count in PER_CLASS.items():
        labels = read_idx(folder, f"{split}-labels-idx1-ubyte")
        images = read_idx(folder, f"{split}-images-idx3-ubyte")
        rows = np.sort(np.concatenate([np.flatnonzero(labels == c)[:count] for c in range(10)]))
        for kind, array in (("labels-idx1", labels[rows]), ("images-idx3", images[rows])):
            data = lzma.compress(encode_idx(array), preset=9 | lzma.PRESET_EXTREME)
            (target / f"{split}-{kind}-ubyte.xz").write_bytes(data)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    embed(Path(sys.argv[1]))
