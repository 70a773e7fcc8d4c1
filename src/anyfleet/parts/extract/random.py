"""Sub-models of random channels."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from anyfleet import rng
from anyfleet.core.messages import SubModelSize
from anyfleet.core.slots import Extract, State
from anyfleet.core.view import View
from anyfleet.elastic import Slice
from anyfleet.papers import FEDDROP, FEDERATED_DROPOUT, Paper


@dataclass(frozen=True)
class Random(Extract):
    """Channels drawn uniformly without replacement, anew for every device and round.

    FedDrop, specification §1.4. There is one draw for each axis, so that whatever is added together
    keeps the same channels. They are in ascending order, so that width 1 is the whole model. A
    smaller entry of a menu lies inside a larger one. An evaluation takes the leading channels.
    """

    personal: ClassVar[bool] = True
    papers: ClassVar[tuple[Paper, ...]] = (FEDDROP, FEDERATED_DROPOUT)

    def __call__(
        self, size: SubModelSize, view: View, state: State, key: Tensor, device: int | None
    ) -> Slice:
        blueprint = view.blueprint
        keep = {
            axis: rng.sample(rng.fold(key, axis), blueprint.axes[axis].size, count).tolist()
            for axis, count in size.counts(blueprint).items()
            if count < blueprint.axes[axis].size
        }
        return Slice.of(keep, blueprint, size.first_trained_layer)
