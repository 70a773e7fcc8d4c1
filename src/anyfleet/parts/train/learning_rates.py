"""Local learning rates, as functions of the round."""

from dataclasses import dataclass
from typing import Protocol

from anyfleet.arguments import checked
from anyfleet.formulas import fedpmt_learning_rate


class LearningRate(Protocol):
    """A local learning rate for each round."""

    def __call__(self, round_index: int) -> float:
        """Return the learning rate of all local steps of a round."""


@checked
@dataclass(frozen=True)
class Decaying:
    """The rate `start * factor ** round_index`; a factor of 1 keeps it constant."""

    start: float = 0.01
    factor: float = 1.0

    def __post_init__(self) -> None:
        if not self.start > 0:
            raise ValueError(f"Decaying.start must be positive, got {self.start}.")
        if not 0 < self.factor <= 1:
            raise ValueError(
                f"Decaying.factor must lie in (0, 1], got {self.factor}. "
                "It multiplies the rate once a round; 1 keeps it constant."
            )

    def __call__(self, round_index: int) -> float:
        return self.start * self.factor**round_index


@checked
@dataclass(frozen=True)
class Inverse:
    """The rate `2 / (mu * epsilon * (round_index + offset))` of FedPMT's bound (§F.1)."""

    mu: float
    epsilon: float
    offset: float = 1.0

    def __post_init__(self) -> None:
        for name, value in (("mu", self.mu), ("epsilon", self.epsilon), ("offset", self.offset)):
            if not value > 0:
                raise ValueError(f"Inverse.{name} must be positive, got {value}.")

    def __call__(self, round_index: int) -> float:
        return fedpmt_learning_rate(
            round_index, convexity=self.mu, ratio=self.epsilon, offset=self.offset
        )
