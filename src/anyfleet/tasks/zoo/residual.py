"""Residual networks: FedResCuE's ResNet (C.9), ResNet-18 (C.11), WideResNet (C.13)."""

from torch import Tensor, nn


class Bottleneck(nn.Module):
    """A bottleneck block: 1 x 1, 3 x 3 with the stride, 1 x 1 to four times the width.

    The shortcut is projected.
    """

    def __init__(self, fan_in: int, width: int, *, stride: int, tracked: bool) -> None:
        super().__init__()
        wide = 4 * width
        self.body = nn.Sequential(
            nn.Conv2d(fan_in, width, 1, bias=False),
            _norm(width, tracked),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, stride=stride, padding=1, bias=False),
            _norm(width, tracked),
            nn.ReLU(),
            nn.Conv2d(width, wide, 1, bias=False),
            _norm(wide, tracked),
        )
        self.shortcut = _projection(fan_in, wide, stride=stride, tracked=tracked)
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.relu(self.body(x) + self.shortcut(x))
        return out


class BasicBlock(nn.Module):
    """A block of two 3 x 3 convolutions; its shortcut is projected only where the shape changes."""

    def __init__(self, fan_in: int, width: int, *, stride: int, tracked: bool) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(fan_in, width, 3, stride=stride, padding=1, bias=False),
            _norm(width, tracked),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            _norm(width, tracked),
        )
        same = stride == 1 and fan_in == width
        self.shortcut = (
            nn.Identity() if same else _projection(fan_in, width, stride=stride, tracked=tracked)
        )
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.relu(self.body(x) + self.shortcut(x))
        return out


class WideBlock(nn.Module):
    """The pre-activation block of WideResNet: norm and ReLU before each convolution."""

    def __init__(
        self, fan_in: int, width: int, *, stride: int, dropout: float, tracked: bool
    ) -> None:
        super().__init__()
        self.open = nn.Sequential(_norm(fan_in, tracked), nn.ReLU())
        self.body = nn.Sequential(
            nn.Conv2d(fan_in, width, 3, stride=stride, padding=1, bias=False),
            _norm(width, tracked),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
        )
        self.changes_shape = stride != 1 or fan_in != width
        self.shortcut = (
            nn.Conv2d(fan_in, width, 1, stride=stride, bias=False)
            if self.changes_shape
            else nn.Identity()
        )

    def forward(self, x: Tensor) -> Tensor:
        opened = self.open(x)
        # A projected shortcut sees the activated input, an identity shortcut the raw one.
        kept = self.shortcut(opened if self.changes_shape else x)
        out: Tensor = self.body(opened) + kept
        return out


def resnet_s2(channels: int = 3, classes: int = 10, *, tracked: bool = False) -> nn.Module:
    """Return FedResCuE's ResNet (C.9): 7 x 7 stem, one bottleneck per stage, 32 x 32 input.

    FedResCuE trains with batch statistics only; `tracked=True` keeps running statistics.
    """
    layers: list[nn.Module] = [
        nn.Conv2d(channels, 64, 7, stride=2, padding=3, bias=False),
        _norm(64, tracked),
        nn.ReLU(),
        nn.MaxPool2d(3, stride=2, padding=1),
    ]
    fan_in = 64
    for width, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
        layers.append(Bottleneck(fan_in, width, stride=stride, tracked=tracked))
        fan_in = 4 * width
    return nn.Sequential(*layers, *_classifier(fan_in, classes))


def resnet18(
    channels: int = 3,
    classes: int = 10,
    *,
    widths: tuple[int, ...] = (64, 128, 256, 512),
    tracked: bool = True,
) -> nn.Module:
    """Return ResNet-18 (C.11) for 32 x 32 images: 3 x 3 stem, no pooling, two blocks per stage."""
    first = widths[0]
    layers: list[nn.Module] = [
        nn.Conv2d(channels, first, 3, padding=1, bias=False),
        _norm(first, tracked),
        nn.ReLU(),
    ]
    fan_in = first
    for stage, width in enumerate(widths):
        stride = 1 if stage == 0 else 2
        layers.append(BasicBlock(fan_in, width, stride=stride, tracked=tracked))
        layers.append(BasicBlock(width, width, stride=1, tracked=tracked))
        fan_in = width
    return nn.Sequential(*layers, *_classifier(fan_in, classes))


def wide_resnet(
    depth: int = 16,
    widen: int = 2,
    *,
    channels: int = 3,
    classes: int = 10,
    dropout: float = 0.0,
    tracked: bool = True,
) -> nn.Module:
    """Return WideResNet (C.13; Zagoruyko and Komodakis 2016), by default WRN-16-2.

    `depth` is 6 n + 4.
    """
    if depth < 10 or (depth - 4) % 6:
        raise ValueError(f"wide_resnet: depth must be 10, 16, 22, 28 … (6 n + 4), got {depth}.")
    layers: list[nn.Module] = [nn.Conv2d(channels, 16, 3, padding=1, bias=False)]
    fan_in = 16
    for stage, width in enumerate((16 * widen, 32 * widen, 64 * widen)):
        for block in range((depth - 4) // 6):
            stride = 2 if stage > 0 and block == 0 else 1
            layers.append(WideBlock(fan_in, width, stride=stride, dropout=dropout, tracked=tracked))
            fan_in = width
    return nn.Sequential(*layers, _norm(fan_in, tracked), nn.ReLU(), *_classifier(fan_in, classes))


def _norm(width: int, tracked: bool) -> nn.Module:
    return nn.BatchNorm2d(width, track_running_stats=tracked)


def _projection(fan_in: int, fan_out: int, *, stride: int, tracked: bool) -> nn.Module:
    convolution = nn.Conv2d(fan_in, fan_out, 1, stride=stride, bias=False)
    return nn.Sequential(convolution, _norm(fan_out, tracked))


def _classifier(features: int, classes: int) -> list[nn.Module]:
    return [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(features, classes)]
