"""Networks in which the batch lies somewhere unusual, or in which samples see each other.

All take pictures [B, 1, 8, 8] and return [B, 10].
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional

PIXELS = 8
Forward = Callable[["Layers", Tensor], Tensor]


class StandardConv(nn.Conv2d):
    """Weights are standardised by a batch norm over themselves."""

    def forward(self, x: Tensor) -> Tensor:
        flat = self.weight.reshape(1, self.out_channels, -1)
        weight = functional.batch_norm(flat, None, None, training=True, momentum=0.0)
        return functional.conv2d(x, weight.reshape_as(self.weight), self.bias, padding=1)


class Layers(nn.Module):
    """A few layers, and what `forward` does with them."""

    def __init__(self, forward: Forward) -> None:
        super().__init__()
        self.how = forward
        self.inner, self.norm, self.head = nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Linear(6, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.how(self, x.squeeze(1))  # [B, 8, 8]: rows of the picture are time


class Standardised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = StandardConv(1, 4, 3), StandardConv(4, 6, 3)
        self.norm, self.head = nn.BatchNorm2d(4), nn.Linear(6, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.relu(self.norm(self.one(x)))
        out: Tensor = self.head(functional.relu(self.two(x)).mean((2, 3)))
        return out


class JoinedImages(nn.Module):
    """Instance norm written as a batch norm of all channels of all samples side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(1, 5, 3), nn.Linear(5, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        flat = x.reshape(1, -1, *x.shape[2:])
        x = functional.batch_norm(flat, None, None, training=True).reshape(x.shape)
        out: Tensor = self.head(functional.relu(x).mean((2, 3)))
        return out


class RunningInstance(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(1, 5, 3), nn.Linear(5, 10)
        self.norm = nn.InstanceNorm2d(5, affine=True, track_running_stats=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(functional.relu(self.norm(self.conv(x))).mean((2, 3)))
        return out


class RunningMean(nn.Module):
    """Centres its features by a running mean of its own."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(64, 6), nn.Linear(6, 10)
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x.flatten(1))
        if self.training:
            self.mean.mul_(0.9).add_(0.1 * x.detach().mean(0))
        out: Tensor = self.head(x - self.mean)
        return out


def _time_first(m: Layers, x: Tensor) -> Tensor:
    batch, time, _ = x.shape
    flat = m.norm(m.inner(x.transpose(0, 1).reshape(time * batch, -1)))
    out: Tensor = m.head(flat.reshape(time, batch, -1).relu().mean(0))
    return out


def _batch_first(m: Layers, x: Tensor) -> Tensor:
    batch, time, _ = x.shape
    flat = m.norm(m.inner(x.reshape(batch * time, -1)))
    out: Tensor = m.head(flat.reshape(batch, time, -1).relu().mean(1))
    return out


def _between(m: Layers, x: Tensor) -> Tensor:
    """[2 · B · T]: views around the samples, time inside them."""
    both = torch.cat([x, x.flip(1)], 0)
    flat = m.norm(m.inner(both.flatten(0, 1))).relu()
    out: Tensor = m.head(flat.view(2, x.shape[0], x.shape[1], -1).mean((0, 2)))
    return out


def _in_space(m: Layers, x: Tensor) -> Tensor:
    """The batch lies where a map is: [T, C, B]."""
    maps = m.norm(m.inner(x).permute(1, 2, 0)).relu()
    out: Tensor = m.head(maps.mean(0).t())
    return out


def _views(split: Callable[[Tensor, int], tuple[Tensor, ...]]) -> Forward:
    def forward(m: Layers, x: Tensor) -> Tensor:
        one, two = x.mean(1), x.amax(1)
        flat = m.norm(m.inner(torch.cat([one, two], 0))).relu()
        first, second = split(flat, x.shape[0])
        out: Tensor = m.head(first - 2 * second)
        return out

    return forward


def _three_views(m: Layers, x: Tensor) -> Tensor:
    pair = torch.cat([x.mean(1), x.amax(1)])
    flat = m.norm(m.inner(torch.cat([pair, x[:, 0]])))
    out: Tensor = m.head(flat[: 2 * x.shape[0]].relu().chunk(2)[1] + flat[-x.shape[0] :])
    return out


def _dropped(m: Layers, x: Tensor) -> Tensor:
    dropped = functional.dropout(m.inner(x.transpose(0, 1)), 0.3, m.training)
    out: Tensor = m.head(dropped.mean(0))
    return out


def _last(m: Layers, x: Tensor) -> Tensor:
    hidden = m.norm(m.inner(x).transpose(1, 2)).transpose(1, 2)
    at = (x.sum((1, 2)) > 0).long() + 3
    out: Tensor = m.head(hidden[torch.arange(x.shape[0], device=x.device), at])
    return out


def _plain(change: Callable[[Tensor], Tensor]) -> Forward:
    def forward(m: Layers, x: Tensor) -> Tensor:
        out: Tensor = m.head(change(m.norm(m.inner(x.mean(1))).tanh()))
        return out

    return forward


# Padding is harmless: every sample stays by itself, apart from the statistics of batch norms.
APART: Mapping[str, Callable[[], nn.Module]] = {
    "standardised weights": Standardised,
    "joined images": JoinedImages,
    "running instance norm": RunningInstance,
    "time first": lambda: Layers(_time_first),
    "batch first": lambda: Layers(_batch_first),
    "between": lambda: Layers(_between),
    "in space": lambda: Layers(_in_space),
    "two views, chunk": lambda: Layers(_views(lambda x, _: x.chunk(2))),
    "two views, split": lambda: Layers(_views(torch.split)),
    "two views, sliced": lambda: Layers(_views(lambda x, n: (x[:n], x[n:]))),
    "two views, shaped": lambda: Layers(_views(lambda x, n: x.view(2, n, -1).unbind(0))),
    "three views": lambda: Layers(_three_views),
    "by its own number": lambda: Layers(_last),
    "nothing": lambda: Layers(_plain(lambda z: z + torch.ones(z.shape[0], 1) * z.softmax(1))),
    "einsum by sample": lambda: Layers(
        _plain(lambda z: z * torch.einsum("bd,bd->b", z, z)[:, None])
    ),
    "einsum with dots": lambda: Layers(_plain(lambda z: torch.einsum("...d,...e->...d", z, z))),
}
# Samples see each other; by the word that tells how.
TOGETHER: Mapping[str, tuple[Callable[[], nn.Module], str]] = {
    name: (lambda change=change: Layers(_plain(change)), how)
    for name, (change, how) in {
        "centred": (lambda z: z - z.mean(0), "mean (the outermost module) runs over the batch"),
        "softmax": (lambda z: z * z.softmax(0), "runs over the batch"),
        "similar": (lambda z: z + (z @ z.T).softmax(1) @ z, "compares samples with each other"),
        "pairs": (lambda z: (z[:, None] - z[None]).abs().mean(1), "compares samples"),
        "all pairs": (
            lambda z: z + (z @ z.T).view(-1).view(z.shape[0], -1).amax(1, keepdim=True),
            "compares samples",
        ),
        "einsum": (lambda z: torch.einsum("bd,be,ce->cd", z, z, z), "sums over the batch"),
        "einsum without arrow": (lambda z: z + torch.einsum("bd,bd", z, z), "sums over the batch"),
        "sorted": (lambda z: z.sort(0)[0], "runs over the batch"),
        "rolled": (lambda z: z - z.roll(1, 0), "runs over the batch"),
        "flipped": (lambda z: z + z.flip(0), "runs over the batch"),
        "picked": (lambda z: z - z[torch.arange(z.shape[0] - 1, -1, -1)], "picks samples"),
        "first": (lambda z: z - z[0], "runs over the batch"),
        "next": (lambda z: z - functional.pad(z[1:], (0, 0, 0, 1)), "picks samples"),
        "halves": (lambda z: torch.cat(z.chunk(2)[::-1]), "picks samples"),
        "summed up": (lambda z: z.cumsum(0), "runs over the batch"),
        "attention": (
            lambda z: functional.scaled_dot_product_attention(z[None], z[None], z[None])[0],
            "runs over the batch",
        ),
        "divided": (lambda z: z.sum(0) / z.shape[0] + z, "runs over the batch"),
        "number": (lambda z: z / z.shape[0], "computes with the number of samples"),
        "a tenth": (lambda z: z * (z.shape[0] * 0.1), "computes with the number of samples"),
        "one less": (
            lambda z: (z - z.mean(0)).square().sum(0) / (z.shape[0] - 1) + z,
            "computes with the number of samples",
        ),
        "scrambled": (lambda z: z.reshape(6, -1).t(), "cuts rows in another way"),
        "repeated": (lambda z: z.repeat(2, 1).view(2, *z.shape).sum(0), "not known"),
        "a queue": (lambda z: torch.cat([z, torch.ones(3, 6)]).softmax(1)[:-3], "behind"),
        "as time": (lambda z: functional.avg_pool1d(z.t(), 3, 1, 1).t(), "runs over the batch"),
    }.items()
} | {"own running mean": (RunningMean, "reduces the batch|runs over the batch")}
