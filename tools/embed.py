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

from anyfleet.tasks.idx import encode_idx, read_idx

PER_CLASS = {"train": 1200, "t10k": 200}
TARGET = Path(__file__).parents[1] / "src" / "anyfleet" / "tasks" / "embedded"


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
