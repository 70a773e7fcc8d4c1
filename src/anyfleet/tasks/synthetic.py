"""The synthetic data of FedPNS (specification §B)."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from anyfleet.arguments import checked
from anyfleet.core.limits import MOST_DEVICES
from anyfleet.tasks.data import Data
from anyfleet.tasks.split import Division

FEATURES, CLASSES = 60, 10
Floats = NDArray[np.float64]


@checked
@dataclass(frozen=True)
class Generator:
    """The generator of synthetic data: Gaussian inputs, labels by the largest of ten functions.

    The first `sigma` of the devices draw x ~ N(0, diag(h^-1.2)) and share one labelling (W, b).
    Each of the others has inputs around its own centre o[j] ~ N(B, 1), B ~ N(0, rho_s), and its own
    labelling; with `shared_w` they all share W. `rho_is_std` reads rho_s as a standard deviation,
    as the public code does, instead of a variance.
    """

    devices: int = 50
    samples: int = 1000
    sigma: float = 0.5
    rho_s: float = 1.0
    shared_w: bool = False
    rho_is_std: bool = False

    def __post_init__(self) -> None:
        if self.devices < 1 or self.samples < 2:
            raise ValueError("Generator needs at least one device and two samples per device.")
        if self.devices > MOST_DEVICES:
            raise ValueError(
                f"Generator.devices must be at most {MOST_DEVICES:,}, got {self.devices}."
            )
        if not 0 <= self.sigma <= 1:
            raise ValueError(f"Generator.sigma must lie in [0, 1], got {self.sigma}.")
        if self.rho_s < 0:
            raise ValueError(f"Generator.rho_s must not be negative, got {self.rho_s}.")

    @property
    def even(self) -> int:
        """The number of devices with i.i.d. data; they come first."""
        return round(self.sigma * self.devices)

    def generate(
        self, key: int, *, test_share: float = 0.2, server: int = 0
    ) -> tuple[Data, Division]:
        """Return all rows, device after device, and their division; the server's rows are i.i.d."""
        rng = np.random.default_rng(key)
        weight, bias = rng.standard_normal((CLASSES, FEATURES)), rng.standard_normal(CLASSES)
        owned = [self._device(rng, k, weight, bias) for k in range(self.devices)]
        store = _data(np.concatenate([x for x, _ in owned]), np.concatenate([y for _, y in owned]))
        tested = round(test_share * self.samples)
        rows = torch.arange(len(store)).view(self.devices, self.samples)
        train_rows = tuple(part[: self.samples - tested] for part in rows)
        test_rows = tuple(part[self.samples - tested :] for part in rows)
        kept = _data(*_label(_inputs(rng, server), weight, bias))
        return store, Division(train_rows, test_rows, kept)

    def _device(
        self, rng: np.random.Generator, device: int, weight: Floats, bias: Floats
    ) -> tuple[Floats, NDArray[np.int64]]:
        if device < self.even:
            return _label(_inputs(rng, self.samples), weight, bias)
        spread = self.rho_s if self.rho_is_std else np.sqrt(self.rho_s)
        centre = rng.normal(rng.normal(0.0, spread), 1.0, FEATURES)
        own = weight if self.shared_w else rng.standard_normal((CLASSES, FEATURES))
        return _label(centre + _inputs(rng, self.samples), own, rng.standard_normal(CLASSES))


def _inputs(rng: np.random.Generator, count: int) -> Floats:
    deviations = np.arange(1, FEATURES + 1) ** -0.6
    return rng.standard_normal((count, FEATURES)) * deviations


def _label(x: Floats, weight: Floats, bias: Floats) -> tuple[Floats, NDArray[np.int64]]:
    return x, (x @ weight.T + bias).argmax(axis=1)


def _data(x: Floats, y: NDArray[np.int64]) -> Data:
    return Data(torch.from_numpy(x).float(), torch.from_numpy(y))
