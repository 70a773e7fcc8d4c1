"""Recorded steps: local steps of stacks on a CPU as the plain operators that they consist of.

Mapping a local step over a stack and differentiating it finds the same operators every time, which
takes as long as the operators of a small network. A step that comes often is recorded: from then on
its operators are called one after the other, with the same results bit for bit.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import partial
from threading import Lock
from typing import Any, NamedTuple, NoReturn, cast

import torch
from torch import Tensor, fx
from torch.func import vmap
from torch.fx.experimental.proxy_tensor import make_fx

from anyfleet.core.local_training import Lift
from anyfleet.core.slots import Train, TrainingContext

# Recording takes as long as about so many steps gain by it, as measured with small networks.
_AFTER = 100
# What is kept at most: runs may meet new sub-models or sizes of stacks in every round.
_SITES, _STEPS, _MOST = 1_000, 10_000, 500  # trainings, steps that are counted, and recorded

Structure = tuple[Any, ...] | None  # how a value is made of its tensors; None: it is one


class RecordedSteps:
    """Local steps of stacks, each recorded when it comes for the `after`th time.

    Steps are the same if trainer, model and task are, and if their tensors have the same shapes and
    strides. What cannot be traced, or looks at `Minibatch.step_index`, is mapped every time.
    """

    def __init__(self, after: int = _AFTER) -> None:
        self._after = after
        self._sites: dict[Hashable, int] = {}
        self._counts: dict[Hashable, int] = {}
        self._recorded: dict[Hashable, _Recorded | None] = {}  # None: it cannot be recorded
        self._recording = Lock()  # stacks may be trained in several threads

    @property
    def recorded(self) -> int:
        """The number of steps that are recorded."""
        return sum(each is not None for each in self._recorded.values())

    def of(self, trainer: Train, context: TrainingContext) -> Lift:
        """Return what maps the steps of a training over all devices of a stack."""
        # Field by field: a context is made anew in every round.
        site = context.blueprint, context.trained, context.norm, context.task, context.width
        try:
            with self._recording:  # a number is that of one site
                number = self._sites.get((trainer, site), len(self._sites))
                if number < _SITES:
                    self._sites[trainer, site] = number
        except TypeError:  # parts that cannot be told from others
            return vmap
        return partial(self._mapped, number) if number < _SITES else vmap

    def _mapped(self, site: int, step: Callable[..., Any]) -> Callable[..., Any]:
        """Return a step of one device as that of all devices of a stack."""
        one = cast("partial[Any]", step)  # of trainer, context, index and substep

        def run(*given: Any) -> Any:
            tensors: list[Tensor] = []
            try:
                structure = _taken_apart(given, tensors)
                found = self._found(site, one, structure, tensors)
            except TypeError:  # a state or a substep that cannot be told from others
                found = None
            return vmap(step)(*given) if found is None else found.replay(one, tensors)

        return run

    def _found(
        self, site: int, step: "partial[Any]", structure: Structure, tensors: list[Tensor]
    ) -> "_Recorded | None":
        """Return the recording of a step, made now if it is time; None if there is none."""
        func, (*_, substep) = step.func, step.args
        layout = tuple((each.dtype, each.shape, each.stride()) for each in tensors)
        key = site, func, substep, structure, layout
        if key in self._recorded:
            return self._recorded[key]
        count = self._counts.get(key, 0) + 1
        if count > 1 or len(self._counts) < _STEPS:
            self._counts[key] = count
        if count < self._after or len(self._recorded) >= _MOST:
            return None
        with self._recording:
            if key not in self._recorded:
                self._recorded[key] = _recorded(step, structure, tensors)
        return self._recorded[key]


class _Recorded(NamedTuple):
    """A step as plain operators on its index and its tensors."""

    operators: fx.GraphModule
    result: Structure
    reads_index: bool

    def replay(self, step: "partial[Any]", tensors: Sequence[Tensor]) -> Any:
        """Return the result of the step for these tensors."""
        index = torch.tensor(step.args[2]) if self.reads_index else None
        with torch.no_grad():
            found = self.operators.forward(index, *tensors)
        return _put_together(self.result, iter(found))


def _recorded(
    step: "partial[Any]", structure: Structure, tensors: Sequence[Tensor]
) -> _Recorded | None:
    """Return the recording of a step, or None if it cannot be traced."""
    func, (trainer, context, _, substep) = step.func, step.args
    results: list[Structure] = []

    def flat(index: Tensor, *values: Tensor) -> list[Tensor]:
        one = partial(func, trainer, context, _StepIndex(index), substep)
        found: list[Tensor] = []
        results.append(_taken_apart(vmap(one)(*_put_together(structure, iter(values))), found))
        return found

    try:
        with torch.no_grad():
            operators = simplified(plain_operators(flat, (torch.tensor(0), *tensors)))
    except Exception:  # noqa: BLE001 - whatever it is: the step is mapped, and raises it there
        return None
    first = next(iter(operators.graph.nodes))
    return _Recorded(operators, results[-1], bool(first.users))


class _StepIndex:
    """The index of a step that is being recorded: it is less than a tensor or not, no more.

    So whoever looks at it otherwise cannot be recorded with the index of one step for all.
    """

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, value: Tensor) -> None:
        self._value = value

    def __lt__(self, other: Tensor) -> Tensor:
        return self._value < other

    def _refused(self, *_: object) -> NoReturn:
        raise TypeError("The index of a step that is being recorded has no value.")

    __eq__ = __ne__ = __bool__ = __str__ = __repr__ = __format__ = _refused


def plain_operators(
    function: Callable[..., Sequence[Tensor]], tensors: Sequence[Tensor]
) -> fx.GraphModule:
    """Return a function of tensors as the operators it calls, without mapping and differentiating.

    It is traced with tensors that are like these and have no values.
    """
    # One tensor given twice would be traced as if it always were.
    apart = [
        each.clone() if any(each is other for other in tensors[:place]) else each
        for place, each in enumerate(tensors)
    ]
    return make_fx(function, tracing_mode="fake", _allow_non_fake_inputs=True)(*apart)


# --- simpler graphs -----------------------------------------------------------------------------

_VIEWS = (
    torch.ops.aten.expand.default,
    torch.ops.aten.view.default,
    torch.ops.aten._unsafe_view.default,  # noqa: SLF001 - that is its name
)
_CHOICE = torch.ops.aten.where.self


def simplified(operators: fx.GraphModule) -> fx.GraphModule:
    """Return operators without those that change nothing.

    Numbers that are only chosen from become tensors once: nobody writes over them.
    """
    graph = operators.graph
    numbers: dict[Hashable, fx.Node] = {}
    for node in list(graph.nodes):
        if node.target in _VIEWS and _alike(node, node.args[0]):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
        elif node.target is torch.ops.aten.scalar_tensor.default and {_CHOICE} == {
            user.target for user in node.users
        }:
            key = node.args, tuple(node.kwargs.items())
            if key not in numbers:
                name = f"number_{len(numbers)}"
                operators.register_buffer(name, node.target(*node.args, **node.kwargs))
                with graph.inserting_before(node):
                    numbers[key] = graph.get_attr(name)
            node.replace_all_uses_with(numbers[key])
            graph.erase_node(node)
    graph.eliminate_dead_code()
    for node in graph.nodes:
        node.meta.clear()  # tensors without values, which nobody needs any more
    operators.recompile()
    return operators


def _alike(node: fx.Node, other: Any) -> bool:
    """Return whether two tensors have the same shape and strides."""
    one, two = node.meta.get("val"), other.meta.get("val")
    if one is None or two is None:  # a constant of the model has no such tensor
        return False
    return bool(one.shape == two.shape and one.stride() == two.stride())


# --- values and their tensors -------------------------------------------------------------------


def _taken_apart(value: Any, tensors: list[Tensor]) -> Structure:
    """Return the structure of a value and append its tensors; raise TypeError if there is more.

    As torch's own function for trees, but in a fraction of its time.
    """
    if isinstance(value, Tensor):
        tensors.append(value)
        return None
    if isinstance(value, Mapping):
        return dict, tuple(value), *[_taken_apart(each, tensors) for each in value.values()]
    if isinstance(value, tuple | list):
        return type(value), *[_taken_apart(each, tensors) for each in value]
    raise TypeError(f"{type(value).__name__} is no tensor")


def _put_together(structure: Structure, tensors: Iterator[Tensor]) -> Any:
    """Return the value of such a structure that is made of these tensors."""
    if structure is None:
        return next(tensors)
    kind, *parts = structure
    if kind is dict:
        names, *values = parts
        return {n: _put_together(each, tensors) for n, each in zip(names, values, strict=True)}
    made = [_put_together(each, tensors) for each in parts]
    return kind(*made) if hasattr(kind, "_fields") else kind(made)
