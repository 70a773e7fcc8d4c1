"""Networks as people write them that trap a tracer: rows that meet, gradients of one's own, modes.

Each is small and has free axes where its trap allows any.
"""

import random
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

Net = tuple[Callable[[], nn.Module], Callable[[], Tensor]]


def flat() -> Tensor:
    return torch.randn(4, 6)


def pictures() -> Tensor:
    return torch.randn(4, 3, 6, 6)


def series() -> Tensor:
    return torch.randn(4, 5, 6)


class Between(nn.Module):
    """Two linear layers and a function between them."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 3)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.b(self.function(torch.tanh(self.a(x))))
        return out


def between(function: Callable[[Tensor], Tensor]) -> Callable[[], nn.Module]:
    return lambda: Between(function)


# --- batch norm where the rows are no samples -------------------------------------------------


class StandardConv(nn.Conv2d):
    """Weights standardised by a batch norm over [1, filters, …], as BiT does."""

    def forward(self, input: Tensor) -> Tensor:
        flat = self.weight.reshape(1, self.out_channels, -1)
        weight = functional.batch_norm(flat, None, None, training=True, momentum=0.0, eps=1e-5)
        return functional.conv2d(
            input, weight.reshape_as(self.weight), self.bias, self.stride, self.padding
        )


class ScaledConv(nn.Conv2d):
    """The same with a gain per filter as the norm's weight."""

    def __init__(self, *args: Any, **given: Any) -> None:
        super().__init__(*args, **given)
        self.gain = nn.Parameter(torch.full((self.out_channels,), 0.7))

    def forward(self, input: Tensor) -> Tensor:
        flat = self.weight.reshape(1, self.out_channels, -1)
        weight = functional.batch_norm(
            flat, None, None, weight=self.gain, training=True, momentum=0.0
        )
        return functional.conv2d(
            input, weight.reshape_as(self.weight), self.bias, self.stride, self.padding
        )


class Standardised(nn.Module):
    def __init__(self, conv: type[nn.Conv2d]) -> None:
        super().__init__()
        self.c1, self.c2 = conv(3, 6, 3, padding=1), conv(6, 8, 3, padding=1)
        self.norm, self.head = nn.BatchNorm2d(8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.relu(self.norm(self.c2(functional.relu(self.c1(x)))))
        out: Tensor = self.head(x.mean((2, 3)))
        return out


class InstanceByReshape(nn.Module):
    """Every sample and channel by itself: [1, B·C, H, W] through a batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        flat = x.reshape(1, -1, *x.shape[2:])
        x = functional.batch_norm(flat, None, None, training=True).reshape(x.shape)
        out: Tensor = self.head(functional.relu(x).mean((2, 3)))
        return out


class TimeFirst(nn.Module):
    """Batch norm over [T·B, C]: the batch is the inner part of the rows."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        batch, steps, _ = x.shape
        rows = self.a(x).transpose(0, 1).reshape(steps * batch, -1)
        rows = functional.relu(self.norm(rows)).reshape(steps, batch, -1)
        out: Tensor = self.b(rows.mean(0))
        return out


class TwoViews(nn.Module):
    """Two views of every sample go through the norm together."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        both = functional.relu(self.norm(self.a(torch.cat([x, x.flip(1) * 0.5]))))
        one, other = both.chunk(2)
        out: Tensor = self.b(one + other)
        return out


class NormedTable(nn.Module):
    """Batch norm over the rows of an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Parameter(torch.randn(11, 8)), nn.Linear(8, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        table = functional.batch_norm(self.table, None, None, training=True)
        out: Tensor = self.head(functional.embedding(tokens, table).mean(1))
        return out


class GhostNorm(nn.Module):
    """Batch norm over halves of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        parts = [self.norm(part) for part in self.a(x).chunk(2)]
        out: Tensor = self.b(torch.cat(parts))
        return out


# --- rows that meet ---------------------------------------------------------------------------


def contrast(x: Tensor) -> Tensor:
    normal = functional.normalize(x, dim=1)
    return (normal @ normal.T / 0.5).softmax(1) @ x


def spread(x: Tensor) -> Tensor:
    """The minibatch deviation of a discriminator, added to every feature."""
    return x + x.std(0).mean()


def mixed_up(x: Tensor) -> Tensor:
    return 0.8 * x + 0.2 * x.flip(0)


# --- gradients of one's own -------------------------------------------------------------------


class _Sign(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return torch.where(x > 0, 1.0, -1.0).to(x)

    @staticmethod
    def backward(_: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


class _Reverse(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(_: Any, *gradients: Tensor) -> Tensor:
        return -gradients[0]


def straight_through(x: Tensor) -> Tensor:
    out: Tensor = _Sign.apply(x)  # type: ignore[no-untyped-call]
    return out


def reversal(x: Tensor) -> Tensor:
    out: Tensor = _Reverse.apply(x)  # type: ignore[no-untyped-call]
    return out


def without_gradient(x: Tensor) -> Tensor:
    with torch.no_grad():
        gate = torch.sigmoid(x)
    return x * gate


# --- features that lie last -------------------------------------------------------------------


class Pooled(nn.Module):
    """[B, T, C] pooled along C."""

    def __init__(self, pool: Callable[[Tensor], Tensor], left: int) -> None:
        super().__init__()
        self.a, self.pool, self.b = nn.Linear(6, 8), pool, nn.Linear(5 * left, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.b(self.pool(torch.tanh(self.a(x))).flatten(1))
        return out


# --- modes ------------------------------------------------------------------------------------


class SoftmaxInEvaluation(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.b(functional.relu(self.a(x)))
        return out if self.training else out.softmax(-1)


class AuxiliaryHead(nn.Module):
    """A second head whose output is added in training only."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm = nn.Linear(6, 8), nn.BatchNorm1d(8)
        self.b, self.side = nn.Linear(8, 3), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.relu(self.norm(self.a(x)))
        out: Tensor = self.b(x)
        return out + 0.3 * self.side(x) if self.training else out


class CentredIn(nn.Module):
    """Samples meet in one mode only."""

    def __init__(self, *, training: bool) -> None:
        super().__init__()
        self.a, self.b, self.when = nn.Linear(6, 8), nn.Linear(8, 3), training

    def forward(self, x: Tensor) -> Tensor:
        x = functional.relu(self.a(x))
        out: Tensor = self.b(x - x.mean(0) if self.training is self.when else x)
        return out


# --- numbers from outside ---------------------------------------------------------------------


def by_root_of_batch(x: Tensor) -> Tensor:
    out: Tensor = x / x.shape[0] ** 0.5
    return out


def by_half_of_batch(x: Tensor) -> Tensor:
    return x * (x.shape[0] // 2)


def by_python(x: Tensor) -> Tensor:
    return x * 2 if random.random() < 0.5 else x


def by_numpy(x: Tensor) -> Tensor:
    return x * float(np.random.rand())  # noqa: NPY002 - as people write it


# --- one module twice, squeezing --------------------------------------------------------------


class Twice(nn.Module):
    """One block under two names, with a batch norm inside."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 8)
        self.block = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU())
        self.again, self.b = self.block, nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.b(self.again(self.block(self.a(x))))
        return out


class Squeezing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 8, 6), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(functional.relu(self.conv(x)).squeeze())
        return out


# --- frozen without a note --------------------------------------------------------------------


class OtherRank(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 8, 3), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        maps = self.conv(x)
        out: Tensor = self.head(maps.mean((2, 3)).type_as(maps))
        return out


def by_channel() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.GroupNorm(8, 8),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 3),
    )


def local_response() -> nn.Module:
    return nn.Sequential(
        nn.Conv1d(5, 8, 3), nn.LocalResponseNorm(3), nn.Flatten(), nn.Linear(32, 3)
    )


# --- what a self-check must not stumble over --------------------------------------------------


class Floating(nn.Module):
    """Says `.float()`, wherever the numbers come from."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.b(functional.relu(self.norm(self.a(x.float() / 4))).float())
        return out


class InFloat(nn.Module):
    """Takes one step in float32, whatever the rest is in."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        out: Tensor = self.b(x.float().softmax(-1).to(x.dtype))
        return out


class Complex(nn.Module):
    """A filter in the frequencies and a complex product."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 3)
        self.filter = nn.Parameter(torch.randn(5, dtype=torch.complex64))
        self.mix = nn.Parameter(torch.randn(5, 5, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        frequencies = torch.fft.rfft(self.a(x)) * self.filter @ self.mix
        out: Tensor = self.b(torch.fft.irfft(frequencies, n=8))
        return out


class Rotating(nn.Module):
    """A complex weight that is used as pairs of real numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Parameter(torch.randn(3, dtype=torch.complex64))
        self.b = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.reshape(-1, 3, 2))
        out: Tensor = self.b(torch.view_as_real(pairs * self.turn).flatten(1))
        return out


class Checkpointed(nn.Module):
    """A block that is run again for its gradients; with or without some to pass on."""

    def __init__(self, *, reentrant: bool, behind: bool = False) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.first = nn.Linear(6, 6) if behind else nn.Identity()
        self.a = nn.Sequential(
            nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 8)
        )
        self.b = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.b(checkpoint(self.a, self.first(x), use_reentrant=self.reentrant))
        return out


class Positive(nn.Module):
    """Logarithms of inputs and weights that must be positive."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.b = nn.Parameter(torch.full((6,), 2.0)), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.b(x.log() * self.scale.log())
        return out


class Masked(nn.Module):
    """Logits that are minus infinity."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 3)
        self.closed: Tensor
        self.register_buffer("closed", torch.tensor([False, True, False]))

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.b(functional.relu(self.a(x)))
        return logits.masked_fill(self.closed, float("-inf"))


class UnbiasedNorm(nn.Module):
    """A norm of one's own, whose deviation needs two features."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        out: Tensor = self.b((x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-6))
        return out


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def tokens() -> Tensor:
    return torch.randint(0, 11, (4, 5))


# Section by section: each is right, apart from those that are `REFUSED`.
FOREIGN: Mapping[str, Net] = {
    "weight standardisation": (lambda: Standardised(StandardConv), pictures),
    "weight standardisation with gain": (lambda: Standardised(ScaledConv), pictures),
    "instance norm by reshape": (InstanceByReshape, pictures),
    "batch norm over time first": (TimeFirst, series),
    "batch norm over two views": (TwoViews, flat),
    "batch norm of a table": (NormedTable, tokens),
    "batch norm over halves": (GhostNorm, lambda: torch.randn(8, 6)),
    "minus the mean of the batch": (between(lambda x: x - x.mean(0)), flat),
    "contrast within the batch": (between(contrast), flat),
    "deviation of the batch": (between(spread), flat),
    "mixed with another row": (between(mixed_up), flat),
    "rolled rows": (between(lambda x: x + x.roll(1, 0)), flat),
    "normalised over the batch": (between(lambda x: functional.normalize(x, dim=0)), flat),
    "softmax over the batch": (between(lambda x: x.softmax(0)), flat),
    "running sum over the batch": (between(lambda x: x.cumsum(0)), flat),
    "product over the batch": (between(lambda x: x @ (x.T @ x)), flat),
    "first row subtracted": (between(lambda x: x - x[:1]), flat),
    "straight through": (between(straight_through), flat),
    "gradient reversal": (between(reversal), flat),
    "a block without gradient": (between(without_gradient), flat),
    "average pooling along features": (
        lambda: Pooled(lambda x: functional.adaptive_avg_pool1d(x, 4), 4),
        series,
    ),
    "max pooling along features": (
        lambda: Pooled(lambda x: functional.max_pool1d(x, 2), 4),
        series,
    ),
    "interpolation along features": (
        lambda: Pooled(lambda x: functional.interpolate(x, size=16), 16),
        series,
    ),
    "softmax in evaluation": (SoftmaxInEvaluation, flat),
    "an auxiliary head in training": (AuxiliaryHead, flat),
    "centred in evaluation only": (lambda: CentredIn(training=False), flat),
    "centred in training only": (lambda: CentredIn(training=True), flat),
    "root of the batch size": (between(by_root_of_batch), flat),
    "half of the batch size": (between(by_half_of_batch), flat),
    "a branch on Python's random": (between(by_python), flat),
    "a number of numpy's": (between(by_numpy), flat),
    "one module under two names": (Twice, flat),
    "squeeze": (Squeezing, pictures),
    "type_as of another rank": (OtherRank, pictures),
    "a norm of every channel": (by_channel, pictures),
    "local response norm": (local_response, series),
}
# What no program can say, and a part of the sentence that says why.
REFUSED: Mapping[str, str] = {
    "straight through": "_Sign is a torch.autograd.Function with a backward of its own",
    "gradient reversal": "_Reverse is a torch.autograd.Function with a backward of its own",
    "root of the batch size": "Python computes it from the batch size",
    "half of the batch size": "Python computes it from the batch size",
    "a branch on Python's random": "forward() is not the same twice",
    "a number of numpy's": "forward() is not the same twice",
}
# Right, but nothing can be cut, and a part of the note that says why.
WHOLE: Mapping[str, str] = {
    "contrast within the batch": "reduced by linalg_vector_norm",
    "rolled rows": "unknown operator roll",
    "average pooling along features": "adaptive_avg_pool1d runs along it",
    "max pooling along features": "max_pool1d runs along it",
    "interpolation along features": "upsample_nearest1d runs along it",
    "one module under two names": "is tied to block.0.weight",
    "local response norm": "padded (1)",
}
# Right, without padding: the modes in which samples see each other.
BOTH = ("training", "evaluation")
MIXED: Mapping[str, tuple[str, ...]] = {
    "batch norm over halves": BOTH,
    "minus the mean of the batch": BOTH,
    "contrast within the batch": BOTH,
    "deviation of the batch": BOTH,
    "mixed with another row": BOTH,
    "rolled rows": BOTH,
    "normalised over the batch": BOTH,
    "softmax over the batch": BOTH,
    "running sum over the batch": BOTH,
    "product over the batch": BOTH,
    "first row subtracted": BOTH,
    "centred in evaluation only": ("evaluation",),
    "centred in training only": ("training",),
}
# A self-check must pass them.
HARMLESS: Mapping[str, Net] = {
    "explicit float": (Floating, flat),
    "explicit float on bytes": (
        Floating,
        lambda: torch.randint(0, 255, (4, 6), dtype=torch.uint8),
    ),
    "one step in float32": (InFloat, flat),
    "bfloat16": (lambda: Between(torch.relu).bfloat16(), lambda: flat().bfloat16()),
    "bfloat16 with a step in float32": (
        lambda: InFloat().bfloat16(),
        lambda: flat().bfloat16(),
    ),
    "complex weights": (Complex, flat),
    "complex weights as pairs": (Rotating, flat),
    "a checkpoint": (lambda: Checkpointed(reentrant=False), flat),
    "a reentrant checkpoint": (lambda: Checkpointed(reentrant=True), flat),
    "a reentrant checkpoint behind a layer": (
        lambda: Checkpointed(reentrant=True, behind=True),
        flat,
    ),
    "logarithms": (Positive, lambda: torch.rand(4, 6) + 0.1),
    "infinite logits": (Masked, flat),
    "an unbiased norm": (UnbiasedNorm, flat),
    "an example of zeros": (plain, lambda: torch.zeros(2, 6)),
}
