"""FedSlim: slimmable training on devices; prefixes learn from the whole model, in one step with it.

Yu, Yang, Xu, Yang, Huang: Slimmable neural networks. ICLR 2019; in a federation in Zhu, Hong, Drew,
Zhou, ICML 2022, Algorithm 3. Specification §1.7, §1.8. The more `samples`, the less stable; sweep
them.
"""

from dataclasses import replace
from typing import Unpack

from anyfleet.arguments import checked
from anyfleet.core.method import Method
from anyfleet.methods.fedavg import Training
from anyfleet.methods.fedrescue import WIDTHS, usual
from anyfleet.methods.fjord import fjord
from anyfleet.papers import SLIMMABLE
from anyfleet.parts.train import Slim
from anyfleet.parts.train.nested import NESTED_WIDTHS

PAPER = SLIMMABLE


@checked
def fedslim(
    *,
    widths: tuple[float, ...] = WIDTHS,  # of each level, strongest first
    samples: int = 1,  # nested models that a minibatch trains
    nested_widths: tuple[float, ...] = NESTED_WIDTHS,  # of nested models, to draw from
    count: int = 5,
    **training: Unpack[Training],
) -> Method:
    """Return FedSlim; arguments as in `fjord`."""
    return replace(
        fjord(widths=widths, count=count), train=Slim(usual(**training), nested_widths, samples)
    )
