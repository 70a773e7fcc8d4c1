"""What is handed to `trace` and does not fit: the error says what to hand in."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from anyfleet.elastic import TraceError, trace

X = torch.zeros(2, 4)
NET = nn.Linear(4, 3)


class Nothing(nn.Module):
    def __init__(self, *out: Any) -> None:
        super().__init__()
        self.a, self.out = nn.Linear(4, 3), out

    def forward(self, x: Tensor) -> Any:
        self.a(x)
        return self.out[0] if self.out else ()


CASES: dict[str, tuple[Any, Any, str]] = {
    "dict": (NET, {"x": X}, "is a mapping (x). Hand in one tensor, or a tuple of tensors"),
    "None": (NET, None, "example_inputs is None. Hand in one tensor"),
    "list of numbers": (NET, [1.0, 2.0], "example_inputs[0] is an object of type float"),
    "optional": (NET, (X, None), "example_inputs[1] is None. Leave an optional argument out"),
    "nested": (NET, ((X,),), "example_inputs[0] is an object of type tuple"),
    "nothing": (NET, (), "example_inputs is empty"),
    "number": (NET, torch.zeros(()), "a tensor without dimensions"),
    "numbers": (NET, (X, torch.zeros(())), "example_inputs[1] is a tensor without dimensions"),
    "text": (NET, "x", "example_inputs is an object of type str"),
    "class": (nn.ReLU, X, "got the class ReLU. Hand in an instance"),
    "function": (torch.relu, X, "a trace takes a torch module, got an object of type"),
    "lazy": (nn.Sequential(nn.LazyLinear(3)), X, "(0.weight, 0.bias). Call the module once"),
    "lazy norm": (nn.LazyBatchNorm1d(), X, "Call the module once on a sample"),
    "returns None": (Nothing(None), X, "forward() must return a tensor"),
    "returns a number": (Nothing(3), X, "forward() must return a tensor"),
    "returns nothing": (Nothing(), X, "forward() must return a tensor"),
    "too many": (NET, (X, X), "too many positional arguments"),
}


@pytest.mark.parametrize("name", CASES)
def test_the_error_says_what_to_hand_in(name: str) -> None:
    module, inputs, said = CASES[name]
    with pytest.raises(TraceError) as caught:
        trace(module, inputs)
    assert said in str(caught.value)
    assert "python3" not in str(caught.value)


def test_a_list_of_tensors_is_taken_like_a_tuple() -> None:
    several: Any = [X]
    assert trace(NET, several) == trace(NET, (X,)) == trace(NET, X)
