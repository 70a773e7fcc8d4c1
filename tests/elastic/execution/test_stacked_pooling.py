"""Max-pooling of stacks as it is written for any device, against torch's own, on a CPU.

The kernels of a CUDA device are tested in tests/gpu.
"""

import pytest
import torch
from torch import Tensor
from torch.func import grad, vjp, vmap

from anyfleet.elastic.execution import replaced_operators, stacked_pooling
from anyfleet.elastic.execution.stacked_pooling import Window

SHAPES = [(3, 8, 8, (2, 2)), (5, 7, 9, (2, 3)), (1, 4, 4, (4, 4)), (2, 17, 17, (8, 8))]


def pooled(x: Tensor, kernel: list[int], own: bool) -> Tensor:
    return stacked_pooling.max_pool(x, kernel) if own else torch.max_pool2d(x, kernel)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_maxima_and_gradients_are_those_of_torch(
    shape: tuple[int, int, int, tuple[int, int]],
) -> None:
    channels, rows, columns, kernel = shape
    # Few different numbers: many are equal. (Of undefined ones torch on a CPU takes the last.)
    x = torch.randint(-3, 3, (2, 3, channels, rows, columns)).float()

    def passes(own: bool, x: Tensor) -> tuple[Tensor, Tensor]:
        out, back = vjp(lambda value: pooled(value, [*kernel], own), x)  # type: ignore[misc]
        return out, back(out.cos())[0]

    for mine, theirs in zip(
        vmap(lambda v: passes(True, v))(x), vmap(lambda v: passes(False, v))(x), strict=True
    ):
        assert torch.equal(mine, theirs)


def test_gradients_of_samples_and_second_gradients_are_those_of_torch() -> None:
    x = torch.randn(2, 3, 4, 6, 6)

    def of_samples(own: bool, x: Tensor) -> Tensor:
        def slope(sample: Tensor) -> Tensor:
            found: Tensor = grad(lambda v: pooled(v[None], [2, 2], own).sin().sum())(sample)
            return found

        found: Tensor = vmap(slope)(x)
        return found

    def twice(own: bool, x: Tensor) -> Tensor:
        found: Tensor = grad(lambda v: of_samples(own, v).square().sum())(x)
        return found

    for run in (of_samples, twice):
        mine, theirs = (vmap(lambda v, own=own, run=run: run(own, v))(x) for own in (True, False))
        torch.testing.assert_close(mine, theirs)


class Elsewhere:
    """What `fits` asks of samples, as if they were on a CUDA device."""

    is_cuda, dtype, shape = True, torch.float32, torch.Size((1, 3, 40, 40))


@pytest.mark.parametrize(
    ("kernel", "further", "fits"),
    [
        ([2, 2], [], True),
        ([2, 2], [[2, 2]], True),
        ([8, 8], [[]], True),
        ([2, 2], [[1, 1]], False),  # windows overlap
        ([2, 2], [[2, 2], [1, 1]], False),  # padded
        ([17, 17], [], False),  # more entries than a place has numbers
        ([41, 2], [], False),
    ],
)
def test_only_windows_side_by_side_are_pooled_so(
    kernel: list[int], further: list[list[int]], fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stacked_pooling, "has_kernels", lambda: True)
    x: Tensor = Elsewhere()  # type: ignore[assignment]
    assert stacked_pooling.fits(x, kernel, further) == fits


def test_windows_count_what_they_cover() -> None:
    window = Window(2, 3, 7, 8)
    assert (window.down, window.right) == (3, 2)


def test_samples_whose_channels_lie_last_may_be_viewed_in_another_shape() -> None:
    """As after a kernel of ours: torch's own view would refuse them."""
    x = torch.randn(2, 4, 4, 3).movedim(-1, -3)
    with pytest.raises(RuntimeError, match="view"):
        x.view(2, -1)
    view = replaced_operators.SPECIAL["aten.view.default"]
    found = view(None, [x, [2, -1]], None)  # type: ignore[arg-type]
    assert torch.equal(found, x.contiguous().view(2, -1))
