"""Joined training: stacks of several runs trained as one larger stack.

Runs differ in their seeds or hyperparameters, and have devices, models and data of their own. What
is equal is the network, how it is trained, and the loss. The devices of a joined stack are those of
all its runs, one run after the other, over one table of samples; each run gets its own rows of the
result. As in every stack, nobody's result depends on who else is in it.
"""

import warnings
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, NoReturn, cast

import numpy as np
import torch
from torch import Tensor
from torch.func import vmap

from anyfleet.arrays import Ints
from anyfleet.core.client import Runner
from anyfleet.core.local_training import Extent, Inputs, Lift, Resident
from anyfleet.core.messages import Params
from anyfleet.core.objectives import Task
from anyfleet.core.padding import unpaddable
from anyfleet.core.slots import Norm, Train, TrainingContext, TrainingResult
from anyfleet.elastic import Blueprint
from anyfleet.errors import AnyfleetWarning
from anyfleet.runtime.simulated.engines import Streams
from anyfleet.runtime.simulated.stacking import at_once, buckets

Answer = Callable[[], TrainingResult]  # returns the result of a training, or raises what it raised
Samples = tuple[Tensor, Tensor]  # x and y


class Call(NamedTuple):
    """A call of `local_training.train` by some run, and how many devices a stack may have."""

    trainer: Train
    context: TrainingContext
    inputs: Inputs
    bounds: Extent
    lift: Lift
    cohort_key: int
    most: int = 1

    @property
    def devices(self) -> int:
        """The number of devices to train."""
        return len(self.inputs.key) if self.inputs.key.ndim else 1

    def alone(self, runner: Runner) -> TrainingResult:
        """Return the result of training these devices alone."""
        given = self.trainer, self.context, self.inputs, self.bounds
        return runner(*given, lift=self.lift, cohort_key=self.cohort_key)


@dataclass(frozen=True, eq=False)
class CommonTask:
    """What tasks have in common whose devices are trained together: all that training may read.

    What else a task has (data, initial parameters) is another in every run. A trainer that reads it
    is told so, and its runs are trained one by one.
    """

    blueprint: Blueprint
    classes: int
    classified: bool
    loss: Callable[[Tensor, Tensor], Tensor]
    augment: Callable[[Tensor, Tensor], Tensor] | None

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        # No AttributeError: whoever asks whether there is one shall not take it for a no.
        raise LookupError(f"the trainer reads `{name}` of its task, which is another in every run")


class _Kind(NamedTuple):
    """What has to be equal for stacks to be trained as one."""

    trainer: Train  # without hyperparameters
    task: CommonTask
    blueprint: Blueprint
    trained: tuple[str, ...]
    norm: Norm
    width: float
    layout: Hashable


class JoinedTraining:
    """What trains the stacks of several runs together where it can, and else one by one.

    `tasks` are those of all runs, whose samples become one table. What fails together is trained
    one by one from then on, so that a run that fails does not fail the others.
    """

    def __init__(self, runner: Runner, tasks: Sequence[Task], device: torch.device) -> None:
        self._runner, self._table = runner, _Table(tasks)
        self._streams = Streams(device) if device.type == "cuda" else None
        self._common: dict[Hashable, CommonTask] = {}
        self._apart: set[_Kind] = set()
        self.joined = 0  # stacks that were trained as part of a larger one

    def __call__(self, calls: Sequence[Call]) -> list[Answer]:
        """Return an answer to every call. Nothing here waits for an accelerator."""
        kinds = [self._kind(call) for call in calls]
        packs = packed(calls, [None if kind in self._apart else kind for kind in kinds])
        answers: list[Answer | None] = [None] * len(calls)

        def begun(number: int) -> list[Answer]:
            return self._answers([calls[i] for i in packs[number]], kinds[packs[number][0]])

        for pack, found in zip(packs, self._run(begun, calls, packs), strict=True):
            for i, answer in zip(pack, found, strict=True):
                answers[i] = answer
        return [answer for answer in answers if answer is not None]

    def _run(
        self,
        begun: Callable[[int], list[Answer]],
        calls: Sequence[Call],
        packs: Sequence[Sequence[int]],
    ) -> Iterable[list[Answer]]:
        """Return what comes of the packs, which are begun on several streams if there are some."""
        if self._streams is None or not packs:
            return map(begun, range(len(packs)))
        sizes = [sum(calls[i].devices for i in pack) for pack in packs]
        most = [min(calls[i].most for i in pack) for pack in packs]
        return self._streams.map(at_once(sizes, most), begun, range(len(packs)))

    def _kind(self, call: Call) -> _Kind | None:
        """Return what other stacks must have in common with one; None if it stays alone."""
        trainer, context, inputs = call.trainer, call.context, call.inputs
        if inputs.rows is None or unpaddable(context.task):
            return None
        if trainer.shared_draws(1, torch.tensor(call.cohort_key)) != (None,):
            return None
        try:
            kind = _Kind(
                trainer.without_hyperparameters(),
                self._common_task(context.task),
                context.blueprint,
                context.trained,
                context.norm,
                context.width,
                _layout(inputs),
            )
            hash(kind)
        except TypeError:  # parts that cannot be told from others
            return None
        return kind

    def _common_task(self, task: Task) -> CommonTask:
        """Return what a task has in common with others, one value for all of them."""
        shared = task.blueprint, task.classes, task.classified, task.loss, task.augment
        if shared not in self._common:
            self._common[shared] = CommonTask(*shared)
            unpaddable.keep(cast(Task, self._common[shared]), "")
        return self._common[shared]

    def _answers(self, calls: Sequence[Call], kind: _Kind | None) -> list[Answer]:
        """Return the answers to calls that are trained together if they are more than one."""
        if len(calls) > 1 and kind is not None:
            try:
                results = self._trained(calls, kind)
            except Exception as error:  # noqa: BLE001 - each run gets its own, if it fails alone
                self._apart.add(kind)
                reason = f"{type(error).__name__}: {error}".partition("\n")[0].rstrip(".")
                text = f"Runs are not trained together, but one by one: {reason}."
                warnings.warn(text, AnyfleetWarning, stacklevel=2)
            else:
                self.joined += len(calls)
                return [partial(_identity, result) for result in results]
        return [self._answer(call) for call in calls]

    def _answer(self, call: Call) -> Answer:
        try:
            return partial(_identity, call.alone(self._runner))
        except Exception as error:  # noqa: BLE001 - it is raised in the run
            return partial(_raised, error)

    def _trained(self, calls: Sequence[Call], kind: _Kind) -> list[TrainingResult]:
        """Return the result of every run, trained as one stack."""
        context = replace(calls[0].context, task=cast(Task, kind.task))
        result = self._runner(
            kind.trainer,
            context,
            self._inputs([_stacked(call.inputs) for call in calls]),
            _bounds([call.bounds for call in calls]),
            lift=vmap,
            cohort_key=calls[0].cohort_key,
        )
        return _split(result, calls)

    def _inputs(self, given: Sequence[Inputs]) -> Inputs:
        """Return the inputs of several stacks as those of one."""
        x, y, offsets = self._table.joined([(each.x, each.y) for each in given])
        width = max(each.valid.shape[1] for each in given)
        rows = [
            _widened(_rows(each) + offset if offset else _rows(each), width, repeat=True)
            for each, offset in zip(given, offsets, strict=True)
        ]
        return Inputs(
            _joined([each.params for each in given]),
            _joined([each.buffers for each in given]),
            x,
            y,
            torch.cat([_widened(each.valid, width, repeat=False) for each in given]),
            torch.cat([each.seen for each in given]),
            torch.cat([each.key for each in given]),
            _joined([each.hyperparameters for each in given]),
            torch.cat(rows),
        )


def packed(calls: Sequence[Call], kinds: Sequence[Hashable]) -> list[list[int]]:
    """Return which calls are trained as one stack, as numbers; those of kind None stay alone.

    A stack is padded to its largest device: calls whose minibatches, or whose numbers of local
    steps, are so unlike that padding costs more time than a stack more does are kept apart. A stack
    has no more devices than each of its calls says.
    """
    alike: dict[Hashable, list[int]] = {}
    for number, kind in enumerate(kinds):
        alike.setdefault(number if kind is None else kind, []).append(number)
    found = []
    for numbers in alike.values():
        counts = np.array([calls[i].devices for i in numbers])
        batch = np.array([calls[i].bounds.batch_size for i in numbers])
        steps = np.array([calls[i].bounds.local_steps for i in numbers])
        for some in _similar(batch, counts):
            for few in _similar(steps[some], counts[some]):
                found += _fitting(calls, [numbers[i] for i in some[few].tolist()])
    return found


def _similar(amounts: Ints, counts: Ints) -> list[Ints]:
    """Return the places of calls of similar amounts, given the number of devices of each."""
    owner = np.repeat(np.arange(len(counts)), counts)
    return [np.unique(owner[rows]) for rows in buckets(np.repeat(amounts, counts))]


def _fitting(calls: Sequence[Call], numbers: Sequence[int]) -> list[list[int]]:
    """Return calls in the order given, those together that fit into memory as one stack."""
    found: list[list[int]] = []
    for number in numbers:
        with_it = [*found[-1], number] if found else []
        size = sum(calls[i].devices for i in with_it)
        if with_it and size <= min(calls[i].most for i in with_it):
            found[-1] = with_it
        else:
            found.append([number])
    return found


# --- samples ------------------------------------------------------------------------------------


class _Table:
    """The samples of all runs, one table for those of equal shape, made when first needed.

    Equal samples, as seeds have that divide one data set, are in it once.
    """

    def __init__(self, tasks: Sequence[Task]) -> None:
        trains = [task.train for task in tasks if isinstance(task, Resident)]
        self._own = [(each.x, each.y) for each in trains]
        self._places: dict[Hashable, tuple[int, int]] | None = None  # number of table, offset
        self._tables: list[Samples] = []

    def joined(self, given: Sequence[Samples]) -> tuple[Tensor, Tensor, list[int]]:
        """Return one table, and where in it the samples of each stack begin."""
        names = [_name(each) for each in given]
        if len(set(names)) == 1:
            return *given[0], [0] * len(given)
        if self._places is None:
            self._places = self._placed()
        places = [self._places.get(name) for name in names]
        known = [place for place in places if place is not None]
        if len(known) == len(given) and len({number for number, _ in known}) == 1:
            return *self._tables[known[0][0]], [offset for _, offset in known]
        # Samples that were only joined for these stacks.
        return *_concatenated(given), _offsets(given)

    def _placed(self) -> dict[Hashable, tuple[int, int]]:
        """Make the tables, and return where the samples of every run are."""
        distinct: dict[Hashable, list[Samples]] = {}
        found: list[tuple[Hashable, Hashable, int]] = []
        for each in self._own:
            shape = _shape(each)
            listed = distinct.setdefault(shape, [])
            equal = (i for i, other in enumerate(listed) if _equal(each, other))
            place = next(equal, len(listed))
            if place == len(listed):
                listed.append(each)
            found.append((_name(each), shape, place))
        self._tables = [_concatenated(listed) for listed in distinct.values()]
        if any(x.is_cuda for x, _ in self._tables):
            torch.cuda.current_stream().synchronize()  # stacks on other streams read them, too
        number = {shape: i for i, shape in enumerate(distinct)}
        offsets = {shape: _offsets(listed) for shape, listed in distinct.items()}
        return {name: (number[shape], offsets[shape][place]) for name, shape, place in found}


def _name(samples: Samples) -> Hashable:
    return tuple((t.data_ptr(), tuple(t.shape), t.stride()) for t in samples)


def _shape(samples: Samples) -> Hashable:
    return tuple((t.dtype, t.device, tuple(t.shape[1:])) for t in samples)


def _equal(one: Samples, other: Samples) -> bool:
    return all(a.shape == b.shape and torch.equal(a, b) for a, b in zip(one, other, strict=True))


def _concatenated(given: Sequence[Samples]) -> Samples:
    """Return samples as one table; that of a single one is itself."""
    if len(given) == 1:
        return given[0]
    return torch.cat([x for x, _ in given]), torch.cat([y for _, y in given])


def _offsets(given: Sequence[Samples]) -> list[int]:
    sizes = [len(x) for x, _ in given]
    return [sum(sizes[:i]) for i in range(len(sizes))]


# --- inputs and results -------------------------------------------------------------------------


def _layout(inputs: Inputs) -> Hashable:
    """Return names, types and shapes of what each device trains from; samples may be any number."""
    skipped = min(1, inputs.key.ndim)
    trees = inputs.params, inputs.buffers, inputs.hyperparameters
    named = tuple(
        (name, value.dtype, tuple(value.shape[skipped:]))
        for tree in trees
        for name, value in tree.items()
    )
    seen = inputs.seen.dtype, tuple(inputs.seen.shape[skipped:])
    return inputs.key.device, named, seen, _shape((inputs.x, inputs.y))


def _stacked(inputs: Inputs) -> Inputs:
    """Return the inputs of one device as those of a stack of one."""
    if inputs.key.ndim:
        return inputs
    return inputs._replace(
        params=_added_axis(inputs.params),
        buffers=_added_axis(inputs.buffers),
        valid=inputs.valid[None],
        seen=inputs.seen[None],
        key=inputs.key[None],
        hyperparameters=_added_axis(inputs.hyperparameters),
        rows=_rows(inputs)[None],
    )


def _added_axis(tree: Params) -> dict[str, Tensor]:
    return {name: value[None] for name, value in tree.items()}


def _rows(inputs: Inputs) -> Tensor:
    assert inputs.rows is not None
    return inputs.rows


def _widened(values: Tensor, width: int, *, repeat: bool) -> Tensor:
    """Return values [devices, samples], padded with the last of each device, or with False."""
    missing = width - values.shape[1]
    if not missing:
        return values
    last = values[:, -1:] if repeat else torch.zeros_like(values[:, -1:])
    return torch.cat([values, last.expand(len(values), missing)], 1)


def _joined(trees: Sequence[Params]) -> dict[str, Tensor]:
    return {name: torch.cat([tree[name] for tree in trees]) for name in trees[0]}


def _bounds(given: Sequence[Extent]) -> Extent:
    """Return the loop bounds of several stacks as one: those of its largest device."""
    return Extent(
        local_steps=max(each.local_steps for each in given),
        shared_steps=min(each.shared_steps for each in given),
        epochs=max(each.epochs for each in given),
        batch_size=max(each.batch_size for each in given),
    )


def _split(result: TrainingResult, calls: Sequence[Call]) -> list[TrainingResult]:
    """Return the result of each call; of a single device without the leading axis."""
    counts = [call.devices for call in calls]
    trees = [
        {name: value.split_with_sizes(counts) for name, value in tree.items()} for tree in result
    ]
    return [
        TrainingResult(*({n: _own(v[i], call) for n, v in tree.items()} for tree in trees))
        for i, call in enumerate(calls)
    ]


def _own(rows: Tensor, call: Call) -> Tensor:
    return rows if call.inputs.key.ndim else rows[0]


def _identity(value: TrainingResult) -> TrainingResult:
    return value


def _raised(error: Exception) -> Any:
    raise error
