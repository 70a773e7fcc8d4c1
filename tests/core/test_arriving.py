"""Numbers that devices measured, on their way from where they were computed."""

import numpy as np
import torch

from anyfleet.core.arriving import on_host


def test_columns_of_all_stacks_come_back_as_they_were() -> None:
    stacks = [
        {
            "loss": torch.tensor([0.1, 0.2]),
            "bits": torch.tensor([2.0**40 + 1, 0.5], dtype=torch.float64),
            "vector": torch.arange(6.0).reshape(2, 3),
            "flags": torch.tensor([[True, False], [False, False]]),
        },
        {"loss": torch.tensor([float("nan")]), "count": torch.tensor([2**40 + 1])},
        {},
    ]
    found = on_host(stacks)
    assert [set(columns) for columns in found] == [set(columns) for columns in stacks]
    for columns, arrays in zip(stacks, found, strict=True):
        for name, column in columns.items():
            assert arrays[name].dtype == np.float64
            assert np.array_equal(arrays[name], column.double().numpy(), equal_nan=True)
