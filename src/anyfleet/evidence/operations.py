"""Operations of one mini-batch, for FedPMT's Table II: an item that is computed, not played."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from anyfleet import config
from anyfleet.arguments import checked
from anyfleet.errors import refuse
from anyfleet.formulas.fedpmt import (
    CNN_CIFAR,
    CNN_MNIST,
    FCNN,
    Rule,
    feddrop_layers,
    fedpmt_complexity,
)

_NETWORKS = {"fcnn": FCNN, "cnn_mnist": CNN_MNIST, "cnn_cifar": CNN_CIFAR}


@checked
@dataclass(frozen=True)
class Minibatch:
    """One mini-batch on a network of the table: all layers run forward, the trained ones backward.

    FedPMT trains the last layers only; FedDrop keeps a share of the neurons of every hidden linear
    layer, and trains all layers.
    """

    network: Literal["fcnn", "cnn_mnist", "cnn_cifar"]
    batch: int  # samples
    trained: int | None = None  # of the last layers; none: all
    keep: float = 1.0  # share of the hidden neurons
    rule: Rule = "paper"  # by which operations are counted (specification §2)

    def __post_init__(self) -> None:
        layers = len(_NETWORKS[self.network])
        refuse(
            (
                "" if self.batch >= 1 else f"batch must be at least 1, got {self.batch}.",
                ""
                if self.trained is None or 1 <= self.trained <= layers
                else f"trained must lie in 1 … {layers}, got {self.trained}.",
                "" if 0 < self.keep <= 1 else f"keep must lie in (0, 1], got {self.keep}.",
            )
        )

    @property
    def operations(self) -> float:
        """The operations of training on it."""
        whole = _NETWORKS[self.network]
        layers = feddrop_layers(whole, self.keep) if self.keep < 1 else whole
        first = 0 if self.trained is None else len(whole) - self.trained
        return fedpmt_complexity(layers, self.batch, self.rule, first=first, whole=whole)


def operations(method: str, parameters: Mapping[str, Any]) -> float | None:
    """Return the operations of the mini-batch that parameters have for a method; None without one.

    Raise ConfigError with all that is wrong with them.
    """
    if method not in parameters:
        return None
    minibatch: Minibatch = config.load(parameters[method], Minibatch)
    return minibatch.operations
