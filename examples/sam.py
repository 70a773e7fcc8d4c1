"""A trainer of one's own: sharpness-aware minimisation (SAM), two gradients for each local step.

>>> from anyfleet.parts import try_train
>>> net, x, y = torch.nn.Linear(2, 2), torch.eye(2), torch.tensor([0, 1])
>>> try_train(Sam(rho=0.1), net, x, y).params["weight"].shape
torch.Size([2, 2])
"""

from dataclasses import dataclass

import torch

from anyfleet.parts import Gradient


@dataclass(frozen=True)
class Sam(Gradient):
    """Descends along the gradient that is found `rho` uphill from the model."""

    rho: float = 0.05

    def gradient(self, context, params, state, batch):
        here = super().gradient(context, params, state, batch)
        norm = torch.stack([g.norm() for g in here.gradients.values()]).norm() + 1e-12
        uphill = {n: params[n] + self.rho * g / norm for n, g in here.gradients.items()}
        there = super().gradient(context, {**params, **uphill}, state, batch)
        return here._replace(gradients=there.gradients)

    def work(self, priced, processed, local_steps):
        return 2 * super().work(priced, processed, local_steps)
