"""Models are compared bit by bit."""

import torch

from anyfleet.deployment.practice import _compared


def test_numbers_are_the_same_only_if_their_bits_are() -> None:
    nan = float("nan")
    one = {"a": torch.tensor([0.0, 1.0, nan]), "b": torch.tensor(2), "c": torch.zeros(0)}
    assert _compared(one, dict(one), replayed=False)[:2] == (4, 0)
    other = {**one, "a": torch.tensor([-0.0, 1.0, 3.0]), "b": torch.tensor(3)}
    assert _compared(other, one, replayed=False).differing == 3
    assert _compared({"a": torch.ones(2).double()}, {"a": torch.ones(2)}, replayed=False)[1] == 2
