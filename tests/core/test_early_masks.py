"""Masks that labels decide: what a reply takes is known before its device has trained."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from anyfleet.core.messages import Params
from anyfleet.core.slots import TrainingContext, TrainingResult, TrainingState
from anyfleet.errors import BadReturn
from anyfleet.methods import heterofl
from anyfleet.parts.train import Gradient
from anyfleet.runtime import Sequential, Stacked
from anyfleet.runtime.simulated.engines import Engine
from tests.helpers import small

METHOD = heterofl(widths=(1.0, 0.5), count=6, lr=0.1)


class Untold(Gradient):
    """A trainer that does not tell its masks before it has trained."""

    def mask(self, context: TrainingContext, seen: Tensor) -> Params | None:  # type: ignore[override]
        return None

    def finish(self, context: TrainingContext, state: TrainingState) -> TrainingResult:
        plain = replace(self, label_rows=False)
        masks = Gradient.mask(self, context, state["seen"])
        return Gradient.finish(plain, context, state)._replace(mask=masks)


class Copied(Gradient):
    """A trainer whose masks are whole tensors in the end, as those that a CUDA graph writes."""

    def finish(self, context: TrainingContext, state: TrainingState) -> TrainingResult:
        result = super().finish(context, state)
        return result._replace(
            mask={
                name: mask.clone(memory_format=torch.contiguous_format)
                for name, mask in result.mask.items()
            }
        )


def of(kind: type[Gradient]) -> Gradient:
    assert isinstance(METHOD.train, Gradient)
    assert METHOD.train.label_rows
    return kind(**vars(METHOD.train))


@pytest.mark.parametrize("kind", [Untold, Copied])
@pytest.mark.parametrize("engine", [Sequential(), Stacked()])
def test_a_reply_is_as_long_as_when_masks_are_read_after_training(
    engine: Engine, kind: type[Gradient]
) -> None:
    problem = small.task()
    told = small.steps(METHOD, problem, 2, engine=engine)
    untold = small.steps(replace(METHOD, train=of(kind)), problem, 2, engine=engine)
    for one, other in zip(told, untold, strict=True):
        assert one.ledger.bits_up.tolist() == other.ledger.bits_up.tolist()
        assert small.identical(one.params, other.params)


def test_some_labels_are_missing_somewhere_or_the_test_above_says_nothing() -> None:
    problem = small.task()
    masked = small.steps(METHOD, problem, 1)[0].ledger.bits_up
    plain = replace(METHOD, train=replace(METHOD.train, label_rows=False))  # type: ignore[type-var]
    assert (masked > small.steps(plain, problem, 1)[0].ledger.bits_up).any()


@pytest.mark.parametrize("engine", [Sequential(), Stacked()])
def test_masks_of_other_parameters_than_told_are_refused(engine: Engine) -> None:
    class Other(Gradient):
        def mask(self, context: TrainingContext, seen: Tensor) -> Params:
            return {"elsewhere": seen.to(torch.float32)}

        def finish(self, context: TrainingContext, state: TrainingState) -> TrainingResult:
            return super().finish(context, state)._replace(mask={})

    with pytest.raises(BadReturn, match=r"masks of \[\] from `finish`.*\['elsewhere'\]"):
        small.steps(replace(METHOD, train=of(Other)), small.task(), 1, engine=engine)
