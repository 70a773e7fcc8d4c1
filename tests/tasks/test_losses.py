import pytest
import torch
from torch import Tensor
from torch.func import grad, vmap
from torch.nn import functional

from anyfleet.tasks import absolute_error, accuracy, cross_entropy, squared_error


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def test_cross_entropy_of_classes_equals_torch() -> None:
    output, target = draw(6, 4), torch.tensor([0, 3, 1, 2, 2, 0])
    expected = functional.cross_entropy(output, target, reduction="none")
    assert torch.allclose(cross_entropy(output, target), expected, atol=1e-12)


def test_sequences_are_averaged_within_a_sample() -> None:
    output, target = draw(3, 5, 4), torch.randint(4, (3, 5))
    expected = functional.cross_entropy(output.transpose(1, 2), target, reduction="none").mean(1)
    assert torch.allclose(cross_entropy(output, target), expected, atol=1e-12)


def test_accuracy_counts_positions() -> None:
    logits = torch.eye(3)
    assert accuracy(logits, torch.tensor([0, 1, 0])).tolist() == [1, 1, 0]
    sequence = logits.unsqueeze(0)
    assert accuracy(sequence, torch.tensor([[0, 1, 0]])).tolist() == pytest.approx([2 / 3])


def test_errors_of_numbers_take_either_shape() -> None:
    output = torch.tensor([[1.0], [4.0]])
    for target in (torch.tensor([3.0, 3.0]), torch.tensor([[3.0], [3.0]])):
        assert squared_error(output, target).tolist() == [4, 1]
        assert absolute_error(output, target).tolist() == [2, 1]
    wide = torch.tensor([[1.0, 3.0]])
    assert squared_error(wide, torch.zeros(1, 2)).tolist() == [5]


@pytest.mark.parametrize("shape", [(2, 6, 4), (2, 6, 3, 4)])
def test_losses_run_stacked(shape: tuple[int, ...]) -> None:
    output, target = draw(*shape), torch.randint(4, shape[:-1])

    def total(output: Tensor, target: Tensor) -> Tensor:
        return cross_entropy(output, target).sum()

    stacked = vmap(grad(total))(output, target)
    alone = torch.stack([grad(total)(o, t) for o, t in zip(output, target, strict=True)])
    assert torch.allclose(stacked, alone, atol=1e-12)
    assert vmap(accuracy)(output, target).shape == shape[:2]
