from pathlib import Path

import numpy as np
from tools.embed import embed

from anyfleet.tasks.idx import read_idx
from tests.helpers.sets import write_idx


def test_the_first_images_of_each_class_are_kept_in_order(tmp_path: Path) -> None:
    write_idx(tmp_path / "whole", train=30, test=2100, side=2)
    (tmp_path / "small").mkdir()
    embed(tmp_path / "whole", tmp_path / "small")
    for split, kept in (("train", 30), ("t10k", 2000)):
        for kind in ("labels-idx1", "images-idx3"):
            whole = read_idx(tmp_path / "whole", f"{split}-{kind}-ubyte")
            small = read_idx(tmp_path / "small", f"{split}-{kind}-ubyte")
            # Labels of the test data run 0 … 9 again and again, so the first 200 of each lead.
            assert np.array_equal(small, whole[:kept])
