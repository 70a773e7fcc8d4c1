"""Small networks of every supported family, and some of the harder ones."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional

from anyfleet.elastic import Blueprint, trace


class LeNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c1, self.c2 = nn.Conv2d(1, 4, 3), nn.Conv2d(4, 6, 3)
        self.f1, self.f2 = nn.Linear(6 * 4, 12), nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.max_pool2d(functional.relu(self.c1(x)), 2)
        x = functional.max_pool2d(functional.relu(self.c2(x)), 2)
        out: Tensor = self.f2(functional.relu(self.f1(x.flatten(1))))
        return out


def vgg(norm: Callable[[int], nn.Module]) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        norm(8),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 12, 3, padding="same"),
        norm(12),
        nn.ReLU(),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(12 * 4, 10),
        nn.ReLU(),
        nn.Dropout(0.2),
        nn.Linear(10, 5),
    )


class Basic(nn.Module):
    def __init__(self, fan_in: int, fan_out: int, stride: int) -> None:
        super().__init__()
        self.c1, self.b1 = nn.Conv2d(fan_in, fan_out, 3, stride, 1), nn.BatchNorm2d(fan_out)
        self.c2, self.b2 = nn.Conv2d(fan_out, fan_out, 3, 1, 1), nn.BatchNorm2d(fan_out)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or fan_in != fan_out:
            self.shortcut = nn.Sequential(
                nn.Conv2d(fan_in, fan_out, 1, stride, bias=False), nn.BatchNorm2d(fan_out)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = self.b2(self.c2(functional.relu(self.b1(self.c1(x)))))
        y += self.shortcut(x)
        return functional.relu(y)


class Bottleneck(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.c1, self.b1 = nn.Conv2d(width, inner, 1, bias=False), nn.BatchNorm2d(inner)
        self.c2, self.b2 = nn.Conv2d(inner, inner, 3, 1, 1, bias=False), nn.BatchNorm2d(inner)
        self.c3, self.b3 = nn.Conv2d(inner, width, 1, bias=False), nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        y = functional.relu(self.b2(self.c2(functional.relu(self.b1(self.c1(x))))))
        return functional.relu(self.b3(self.c3(y)) + x)


class Residual(nn.Module):
    def __init__(self, *blocks: nn.Module, width: int, out: int) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width)
        self.blocks, self.head = nn.Sequential(*blocks), nn.Linear(out, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(functional.relu(self.norm(self.stem(x))))
        out: Tensor = self.head(functional.adaptive_avg_pool2d(x, 1).flatten(1))
        return out


class Inverted(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.grow, self.b1 = nn.Conv2d(width, inner, 1, bias=False), nn.BatchNorm2d(inner)
        self.deep = nn.Conv2d(inner, inner, 3, 1, 1, groups=inner, bias=False)
        self.b2 = nn.BatchNorm2d(inner)
        self.shrink, self.b3 = nn.Conv2d(inner, width, 1, bias=False), nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        y = functional.relu6(self.b2(self.deep(functional.relu6(self.b1(self.grow(x))))))
        out: Tensor = x + self.b3(self.shrink(y))
        return out


class Grouped(nn.Module):
    """ResNeXt-like: groups of channels, and a depthwise layer with a multiplier."""

    def __init__(self) -> None:
        super().__init__()
        self.c1 = nn.Conv2d(3, 8, 3, padding=1)
        self.c2 = nn.Conv2d(8, 12, 3, padding=1, groups=4)
        self.c3 = nn.Conv2d(12, 24, 3, padding=1, groups=12)
        self.head = nn.Linear(24, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.silu(self.c3(functional.relu(self.c2(functional.relu(self.c1(x))))))
        out: Tensor = self.head(x.mean((2, 3)))
        return out


class SqueezeExcite(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c1, self.c2 = nn.Conv2d(3, 8, 3, 1, 1), nn.Conv2d(8, 6, 3, 2, 1)
        self.down, self.up, self.head = nn.Linear(8, 4), nn.Linear(4, 8), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.relu(self.c1(x))
        gate = torch.sigmoid(self.up(functional.relu(self.down(x.mean((2, 3))))))
        out: Tensor = self.head(functional.relu(self.c2(x * gate[:, :, None, None])).mean((2, 3)))
        return out


def conv1d() -> nn.Module:
    return nn.Sequential(
        nn.Conv1d(3, 8, 5, padding=2),
        nn.BatchNorm1d(8),
        nn.Tanh(),
        nn.MaxPool1d(2),
        nn.Conv1d(8, 6, 3),
        nn.LeakyReLU(),
        nn.AdaptiveAvgPool1d(2),
        nn.Flatten(),
        nn.Linear(12, 5),
    )


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, *, by_hand: bool) -> None:
        super().__init__()
        self.heads, self.by_hand = heads, by_hand
        self.q, self.k = nn.Linear(width, width), nn.Linear(width, width)
        self.v, self.out = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, steps, _ = x.shape
        q, k, v = (
            part(x).view(batch, steps, self.heads, -1).transpose(1, 2)
            for part in (self.q, self.k, self.v)
        )
        if self.by_hand:
            scores = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
            past = torch.ones(steps, steps, dtype=torch.bool, device=x.device).tril()
            mixed = scores.masked_fill(~past, float("-inf")).softmax(-1) @ v
        else:
            mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, steps, -1))
        return out


class Block(nn.Module):
    def __init__(self, width: int, heads: int, *, by_hand: bool) -> None:
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads, by_hand=by_hand)
        self.f1, self.f2 = nn.Linear(width, 10), nn.Linear(10, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.attention(self.n1(x)))
        out: Tensor = x + self.f2(functional.gelu(self.f1(self.n2(x))))
        return out


class Language(nn.Module):
    def __init__(self, *, by_hand: bool, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.place = nn.Parameter(torch.randn(1, 9, 8) * 0.1)
        self.blocks = nn.Sequential(Block(8, 2, by_hand=by_hand), Block(8, 2, by_hand=by_hand))
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 11, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.place[:, : tokens.shape[1]]
        out: Tensor = self.head(self.norm(self.blocks(x)))
        return out


class Vision(nn.Module):
    """A transformer on patches, with mean pooling and a fixed sinusoid as non-persistent buffer."""

    sinusoid: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 8, 4, 4)
        self.register_buffer("sinusoid", torch.randn(4, 8), persistent=False)
        self.block, self.head = Block(8, 2, by_hand=False), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2) + self.sinusoid
        out: Tensor = self.head(self.block(x).mean(1))
        return out


def perceptron() -> nn.Module:
    return nn.Sequential(
        nn.Linear(6, 8), nn.LayerNorm(8), nn.ELU(), nn.Linear(8, 7), nn.Sigmoid(), nn.Linear(7, 5)
    )


class Joined(nn.Module):
    """Concatenation and fused projections: harder families, frozen for now."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.both = nn.Linear(6, 4), nn.Linear(6, 4), nn.Linear(8, 12)
        self.head = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        one, two, three = self.both(torch.cat([self.a(x), self.b(x)], -1)).chunk(3, -1)
        out: Tensor = self.head(functional.relu(one) * two + three)
        return out


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.rnn = nn.Embedding(11, 6), nn.LSTM(6, 7, batch_first=True)
        self.head = nn.Linear(7, 11)

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.head(self.rnn(self.embed(tokens))[0])
        return out


def images(size: int = 8, channels: int = 3) -> Callable[[], Tensor]:
    return lambda: torch.randn(4, channels, size, size)


def tokens() -> Tensor:
    return torch.randint(0, 11, (4, 7))


Net = tuple[Callable[[], nn.Module], Callable[[], Tensor]]

# The families that must be cut.
FAMILIES: Mapping[str, Net] = {
    "lenet": (LeNet, images(14, 1)),
    "vgg_batch": (lambda: vgg(nn.BatchNorm2d), images()),
    "vgg_group": (lambda: vgg(lambda width: nn.GroupNorm(2, width)), images()),
    "resnet_basic": (
        lambda: Residual(Basic(8, 8, 1), Basic(8, 12, 2), width=8, out=12),
        images(),
    ),
    "resnet_bottleneck": (
        lambda: Residual(Bottleneck(8, 4), Bottleneck(8, 6), width=8, out=8),
        images(),
    ),
    "mobilenet": (lambda: Residual(Inverted(6, 12), Inverted(6, 9), width=6, out=6), images()),
    "grouped": (Grouped, images()),
    "squeeze_excite": (SqueezeExcite, images()),
    "conv1d": (conv1d, lambda: torch.randn(4, 3, 12)),
    "language_fused": (lambda: Language(by_hand=False), tokens),
    "language_by_hand": (lambda: Language(by_hand=True), tokens),
    "vision": (Vision, images()),
    "perceptron": (perceptron, lambda: torch.randn(4, 6)),
}
# The families that are traced and run, with some axes frozen.
HARDER: Mapping[str, Net] = {
    "joined": (Joined, lambda: torch.randn(4, 6)),
    "recurrent": (Recurrent, tokens),
    "tied": (lambda: Language(by_hand=False, tied=True), tokens),
}
NETS: Mapping[str, Net] = {**FAMILIES, **HARDER}


@dataclass(frozen=True)
class Traced:
    module: nn.Module
    inputs: Tensor
    blueprint: Blueprint
    params: dict[str, Tensor]
    buffers: dict[str, Tensor]


@cache
def traced(name: str) -> Traced:
    """A net with random weights, statistics and input in float64, and its blueprint."""
    make, example = NETS[name]
    torch.manual_seed(7)
    return of(make(), example())


def of(module: nn.Module, inputs: Tensor) -> Traced:
    blueprint = trace(module, inputs)
    module = module.double()
    inputs = inputs.double() if inputs.is_floating_point() else inputs
    params = {n: p.detach() + 0.1 * torch.randn_like(p) for n, p in module.named_parameters()}
    state = module.state_dict()
    buffers = {n: state[n].clone() for n in blueprint.buffers}
    for site in blueprint.norms:
        if site.mean and site.variance:
            buffers[site.mean] = torch.randn_like(buffers[site.mean])
            buffers[site.variance] = 0.5 + torch.rand_like(buffers[site.variance])
    return Traced(module, inputs, blueprint, params, buffers)
