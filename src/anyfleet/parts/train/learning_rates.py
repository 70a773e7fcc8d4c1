"""Learning rates as a function of the server step."""

from dataclasses import dataclass
from typing import Protocol

from anyfleet.arguments import checked
from anyfleet.formulas import fedpmt_learning_rate


class LearningRate(Protocol):
    """The local learning rate of a round."""

    def __call__(self, round_index: int) -> float: ...


@checked
@dataclass(frozen=True)
class Decaying:
    """`start * factor ** step`; a factor of 1 is constant."""

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
    """`2 / (mu * epsilon * (step + offset))`: the rate of FedPMT's bound (specification §F.1)."""

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
