from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from anyfleet.elastic import require_faithful, trace
from anyfleet.tasks import zoo

GREY, COLOUR, SMALL_COLOUR = (1, 28, 28), (3, 32, 32), (3, 28, 28)

# network, input shape, total parameters, parameters of each module that has any (specification §C)
TABLE: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int, list[int]]] = {
    "C.1": (zoo.perceptron, GREY, 515_610, [314_000, 120_300, 60_200, 20_100, 1_010]),
    "C.2": (zoo.cnn_mnist, GREY, 37_610, [208, 3_216, 32_896, 1_290]),
    "C.3": (zoo.cnn_cifar, COLOUR, 567_858, [1_216, 12_832, 400_500, 150_300, 3_010]),
    "C.4": (zoo.mcmahan_cnn, GREY, 1_663_370, [832, 51_264, 1_606_144, 5_130]),
    "C.5": (zoo.logistic, GREY, 7_850, [7_850]),
    "C.5 synthetic": (lambda: zoo.logistic(60), (60,), 610, [610]),
    "C.6": (zoo.cnn_m, GREY, 21_840, [260, 5_020, 16_050, 510]),
    "C.7": (zoo.cnn_c, COLOUR, 62_006, [456, 2_416, 48_120, 10_164, 850]),
    "C.8": (
        zoo.vgg9,
        COLOUR,
        3_491_530,
        [896, 18_496, 73_856, 147_584, 295_168, 590_080, 2_097_664, 262_656, 5_130],
    ),
    "C.10": (
        zoo.digits_net,
        SMALL_COLOUR,
        14_214_090,
        [4_864, 128, 102_464, 128, 204_928, 256, 12_847_104, 1_049_088, 5_130],
    ),
}
TOTALS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int]] = {
    "C.9": (zoo.resnet_s2, COLOUR, 8_036_426),
    "C.11": (zoo.resnet18, COLOUR, 11_173_962),
    "C.13 WRN-16-2": (zoo.wide_resnet, COLOUR, 691_674),
    "C.12 activities": (
        zoo.har_cnn,
        (6, 128),
        (6 * 5 + 1) * 64 + (64 * 5 + 1) * 128 + (128 * 32 + 1) * 256 + 257 * 6,
    ),
}


def count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def per_module(module: nn.Module) -> list[int]:
    sizes = [sum(p.numel() for p in m.parameters(recurse=False)) for m in module.modules()]
    return [size for size in sizes if size]


@pytest.mark.parametrize("row", TABLE)
def test_parameters_of_every_layer_equal_the_published_table(row: str) -> None:
    make, _, total, layers = TABLE[row]
    module = make()
    assert per_module(module) == layers
    assert count(module) == total


@pytest.mark.parametrize("row", TOTALS)
def test_total_parameters_equal_the_published_table(row: str) -> None:
    make, _, total = TOTALS[row]
    assert count(make()) == total


def test_bottleneck_net_splits_into_convolutions_norms_and_linear_as_printed() -> None:
    module = zoo.resnet_s2()
    kinds = {nn.Conv2d: 7_996_608, nn.BatchNorm2d: 19_328, nn.Linear: 20_490}
    for kind, expected in kinds.items():
        assert sum(count(m) for m in module.modules() if type(m) is kind) == expected


@pytest.mark.parametrize("row", [*TABLE, *TOTALS])
def test_forward_gives_one_row_of_logits_per_sample(row: str) -> None:
    make, shape = (TABLE | TOTALS)[row][:2]
    torch.manual_seed(1)
    logits: Tensor = make()(torch.randn(2, *shape))
    assert logits.shape == (2, 6 if row == "C.12 activities" else 10)
    assert logits.isfinite().all()
    # A ReLU on the logits would leave no negative value.
    assert (logits < 0).any()


SMALL = [row for row in (*TABLE, *TOTALS) if (TABLE | TOTALS)[row][2] < 2_000_000]


@pytest.mark.parametrize("row", SMALL)
def test_a_task_takes_every_network(row: str) -> None:
    """The large ones are left out, as their layers are those of the others."""
    make, shape = (TABLE | TOTALS)[row][:2]
    torch.manual_seed(0)
    module, x = make(), torch.randn(2, *shape)
    blueprint = trace(module, x)
    require_faithful(module, (x,), blueprint)
    assert row.startswith("C.5") or any(axis.free for axis in blueprint.axes.values())


@pytest.mark.parametrize(
    ("make", "channels", "side"),
    [
        (zoo.cnn_mnist, 3, 28),
        (zoo.cnn_cifar, 1, 32),
        (zoo.cnn_m, 3, 28),
        (zoo.cnn_c, 1, 32),
        (zoo.digits_net, 1, 28),
        (zoo.wide_resnet, 1, 28),
    ],
)
def test_grey_and_colour_are_an_argument(
    make: Callable[..., nn.Module], channels: int, side: int
) -> None:
    assert make(channels=channels)(torch.randn(2, channels, side, side)).shape == (2, 10)


@pytest.mark.parametrize(("share", "total"), [(2, 417_482), (4, 105_194), (8, 26_714), (16, 6_890)])
def test_mcmahan_widths_have_the_exact_sizes_of_methods_0_2(share: int, total: int) -> None:
    assert count(zoo.mcmahan_cnn(widths=(32 // share, 64 // share, 512 // share))) == total


def test_digits_net_keeps_no_running_statistics() -> None:
    assert not dict(zoo.digits_net().named_buffers())
    assert not dict(zoo.resnet_s2().named_buffers())
    assert dict(zoo.resnet18().named_buffers())


def test_transformer_has_the_declared_layers() -> None:
    vocabulary, width, hidden, length = 65, 256, 512, 64
    attention = 4 * (width * width + width)
    feed_forward = width * hidden + hidden + hidden * width + width
    block = attention + feed_forward + 4 * width
    head = width * vocabulary + vocabulary
    expected = (vocabulary + length) * width + 4 * block + 2 * width + head
    assert count(zoo.Transformer(vocabulary)) == expected


def test_transformer_never_looks_ahead() -> None:
    net = zoo.Transformer(11, layers=2, width=16, heads=4, hidden=8, length=9).eval()
    tokens = torch.randint(11, (2, 9))
    changed = tokens.clone()
    changed[:, 5] = (changed[:, 5] + 1) % 11
    before, after = net(tokens), net(changed)
    assert before.shape == (2, 9, 11)
    assert torch.equal(before[:, :5], after[:, :5])
    assert not torch.allclose(before[:, 5:], after[:, 5:])


def test_impossible_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="6 n \\+ 4"):
        zoo.wide_resnet(depth=17)
    with pytest.raises(ValueError, match="multiple of heads"):
        zoo.Transformer(11, width=10, heads=4)
