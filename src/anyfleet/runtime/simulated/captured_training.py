"""Local training of stacks as CUDA graphs: captured once for each shape, replayed in every round.

A graph holds all local steps of a stack, so that the host launches one thing where it launched
thousands. What a graph reads at fixed places is copied there before each replay; the samples are
read where they lie. Where a cohort draws what is calculated no two rounds are one graph: there each
substep is a graph of its own, never compiled, and a round replays those that it drew. The results
of a graph are those of `local_training.train` bit for bit.
"""

import gc
import time
import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor
from torch.func import vmap
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import (
    TreeSpec,
    keystr,
    tree_flatten,
    tree_flatten_with_path,
    tree_leaves,
    tree_map,
    tree_unflatten,
)

from anyfleet.core.local_training import Extent, Inputs, Lift, train_with
from anyfleet.core.padding import unpaddable
from anyfleet.core.slots import Train, TrainingContext, TrainingResult
from anyfleet.errors import AnyfleetWarning
from anyfleet.runtime.simulated.recorded_steps import RecordedSteps, plain_operators
from anyfleet.tracebacks import quoted

Precision = Literal["float32", "tf32", "bf16"]


@contextmanager
def arithmetic(precision: Precision, device: torch.device) -> Iterator[None]:
    """Compute in a precision in here: products in tf32 or bfloat16, parameters in float32.

    With "float32" torch's own settings count. On a CUDA device convolutions give the same bits in
    every run, so that a resumed run does.
    """
    products, convolutions = torch.backends.cuda.matmul, torch.backends.cudnn
    before = products.allow_tf32, convolutions.allow_tf32, convolutions.deterministic
    # These settings are the whole process's: threads that train on a CPU leave them alone.
    changed = device.type == "cuda"
    with ExitStack() as stack:
        if precision == "bf16":
            stack.enter_context(torch.autocast(device.type, torch.bfloat16, cache_enabled=False))
        if changed:
            convolutions.deterministic = True
        if changed and precision != "float32":
            products.allow_tf32 = convolutions.allow_tf32 = True
        try:
            yield
        finally:
            if changed:
                products.allow_tf32, convolutions.allow_tf32, convolutions.deterministic = before


def stack_size(count: int) -> int:
    """Return the size to which a stack of so many devices is padded, so that few are captured.

    Sizes are 1, 2 and 5, tens up to 1,000, hundreds up to 10,000 and so on: cohorts of a round
    number are not padded, and those that are divided among widths by chance have few sizes. It is a
    rule, not a memory of earlier sizes: a resumed run pads as the first one did.
    """
    if count <= 5:
        return next(size for size in (1, 2, 5) if size >= count)
    step: int = 10 ** max(1, len(str(count - 1)) - 2)
    return -(-count // step) * step


class CapturedTraining:
    """What is called as `local_training.train` is, and replays a graph where it can.

    It keeps the graphs of all shapes that it met, those least recently used only up to `share` of
    the device's memory. Graphs have memory of their own, so that they may run side by side on the
    streams that their callers choose. With `compile` the local steps are compiled first. What
    cannot be captured or compiled runs as it is, and a warning says why, once. On a CPU nothing is
    captured, but local steps that come often are recorded.
    """

    def __init__(
        self, precision: Precision = "float32", *, compile: bool = False, share: float = 0.5
    ) -> None:
        self.precision, self.compile, self.share = precision, compile, share
        self.seconds = 0.0  # spent on capturing and compiling
        self._graphs: dict[Hashable, _Graph | _Substeps] = {}
        self._refused: dict[Hashable, str] = {}
        self._recorded = RecordedSteps()

    @property
    def captured(self) -> int:
        """The number of graphs that are kept."""
        return sum(each.count for each in self._graphs.values())

    def __call__(
        self,
        trainer: Train,
        context: TrainingContext,
        inputs: Inputs,
        bounds: Extent,
        *,
        lift: Lift,
        cohort_key: int,
    ) -> TrainingResult:
        """Return the result of training one device, or a stack."""
        key = torch.tensor(cohort_key)
        draws = trainer.shared_draws(bounds.local_steps, key)
        with arithmetic(self.precision, inputs.key.device):
            given = _Given(draws, trainer, context, inputs, bounds, lift)
            graph = self._graph(given)
            if graph is not None:
                return graph.replay(given)
            on_cpu = inputs.key.device.type == "cpu" and self.precision == "float32"
            recorded = self._recorded.of(trainer, context) if on_cpu and lift is vmap else None
            return given.train(recorded)

    def _graph(self, given: "_Given") -> "_Graph | _Substeps | None":
        """Return the graph of a training, captured now if need be; None if there is none."""
        trainer, context, inputs = given.trainer, given.context, given.inputs
        if inputs.key.device.type != "cuda" or unpaddable(context.task):
            return None
        kind = type(trainer), context.task
        drawn = any(draw is not None for draw in given.draws)
        if drawn and type(trainer).substeps is Train.substeps:
            why = "what a cohort draws decides what is calculated, so no two rounds are one graph"
            self.refuse(kind, trainer, why)
            return None
        # Field by field: a context is made anew in every round.
        site = context.blueprint, context.trained, context.norm, context.task, context.width
        # The substeps of a long training are those of a short one.
        extent = given.bounds.batch_size if drawn else given.bounds
        key = trainer, site, extent, _layout(inputs)
        try:
            graph = self._graphs.pop(key, None)
        except TypeError as error:
            self.refuse(kind, trainer, f"it cannot be told from others: {error}")
            return None
        if graph is not None:
            self._graphs[key] = graph  # the most recent is the last
            self._make_room(inputs.key.device)
            return graph
        if kind in self._refused:
            return None
        if drawn:
            self._graphs[key] = _Substeps(self, kind, given)
            return self._graphs[key]
        began = time.perf_counter()
        own = given._replace(inputs=_static(inputs))
        steps = _CompiledSteps(self._warn) if self.compile and given.lift is vmap else None
        found = _capture(partial(own.train, steps), own.inputs, steps)
        self.seconds += time.perf_counter() - began
        if isinstance(found, str):
            self.refuse(kind, trainer, found)
            return None
        self._graphs[key] = found
        self._make_room(inputs.key.device)
        return found

    def _make_room(self, device: torch.device) -> None:
        """Let go of the graphs that were least recently used, while all hold too much memory."""
        most = self.share * torch.cuda.get_device_properties(device).total_memory
        while len(self._graphs) > 1 and sum(g.held for g in self._graphs.values()) > most:
            oldest = self._graphs.pop(next(iter(self._graphs)))
            oldest.done.synchronize()

    def refuse(self, kind: Hashable, trainer: Train, why: str) -> None:
        """Keep why trainings of a kind are not captured, and say so, once."""
        if kind in self._refused:
            return
        self._refused[kind] = why
        self._warn(f"Training with {quoted(trainer)} is not captured as a CUDA graph: {why}")

    def _warn(self, text: str) -> None:
        warnings.warn(f"{text}.", AnyfleetWarning, stacklevel=2)


class _Given(NamedTuple):
    """A training, with what the cohort has drawn for it."""

    draws: Sequence[Any]
    trainer: Train
    context: TrainingContext
    inputs: Inputs
    bounds: Extent
    lift: Lift

    def train(self, lift_step: Lift | None = None) -> TrainingResult:
        """Return its result."""
        return train_with(
            self.draws,
            self.trainer,
            self.context,
            self.inputs,
            self.bounds,
            lift=self.lift,
            lift_step=lift_step,
        )


@dataclass(frozen=True, eq=False)
class _Graph:
    """A captured training: where it reads, what it runs, and where it leaves its results."""

    graph: torch.cuda.CUDAGraph
    places: list[Tensor]  # of what each replay reads; of what devices share, of one device
    shared: list[bool]  # whether all devices of a stack read that place
    results: list[Tensor]
    shape: TreeSpec  # how a result is made of them
    held: int  # bytes
    read: tuple[object, ...]  # what holds the other memory that it reads: a graph knows addresses
    views: dict[int | None, tuple[list[Tensor], list[Tensor]]] = field(default_factory=dict)
    done: torch.cuda.Event = field(default_factory=torch.cuda.Event)  # it may be used again
    count: ClassVar[int] = 1  # of graphs

    def replay(self, given: _Given) -> TrainingResult:
        """Return the result for new inputs of the same layout, on the current stream."""
        inputs = given.inputs
        stream = torch.cuda.current_stream(inputs.key.device)
        stream.wait_event(self.done)
        count = len(inputs.key) if inputs.key.ndim else None
        values = [v[0] if _shared(v, count) else v for v in _leaves(inputs)]
        places, results = self._views(count)
        _copy(places, values)
        self.graph.replay()
        # A copy, as the next replay writes over it.
        own = [torch.empty_like(value) for value in results]
        _copy(own, results)
        self.done.record(stream)
        result: TrainingResult = tree_unflatten(own, self.shape)
        return result

    def _views(self, count: int | None) -> tuple[list[Tensor], list[Tensor]]:
        """Return where a stack of so many devices is read, and where its results are left."""
        if count not in self.views:
            places = [
                place if shared or count is None else place[:count]
                for place, shared in zip(self.places, self.shared, strict=True)
            ]
            results = [value if count is None else value[:count] for value in self.results]
            self.views[count] = places, results
        return self.views[count]


class _Substeps:
    """The substeps of a training, each captured when it is first drawn.

    The state of the training stays at fixed places, where each graph reads it and leaves it. So
    graphs can follow each other in any order, and share the memory that they compute in.
    """

    def __init__(self, owner: CapturedTraining, kind: Hashable, like: _Given) -> None:
        self._owner, self._kind = owner, kind
        self._trainer, self._lift = like.trainer, like.lift
        self._graphs: dict[Hashable, _Substep] = {}
        self._places: dict[str, Tensor] = {}  # by where a tensor is among arguments and results
        self._index = torch.zeros((), dtype=torch.int64, device=like.inputs.key.device)
        self._pool = torch.cuda.graph_pool_handle()
        self._failed = False
        self.held = 0
        self.done = torch.cuda.Event()  # type: ignore[no-untyped-call]

    @property
    def count(self) -> int:
        """The number of graphs."""
        return len(self._graphs)

    def replay(self, given: _Given) -> TrainingResult:
        """Return the result of a training with inputs of the same layout, on the current stream."""
        inputs = given.inputs
        stream = torch.cuda.current_stream(inputs.key.device)
        stream.wait_event(self.done)
        result = given._replace(inputs=_static(inputs)).train(self._mapped)
        # A copy, as the next training writes over it; without padding.
        count = len(inputs.key) if inputs.key.ndim else None
        leaves, shape = tree_flatten(result)
        results = leaves if count is None else [value[:count] for value in leaves]
        own = [torch.empty_like(value) for value in results]
        _copy(own, results)
        self.done.record(stream)
        copied: TrainingResult = tree_unflatten(own, shape)
        return copied

    def _mapped(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """Return a substep of all devices."""

        def run(*given: Any) -> Any:
            func: Callable[..., Any] = step.func  # type: ignore[attr-defined]
            trainer, context, index, substep = step.args  # type: ignore[attr-defined]
            key = func, substep, tuple(given[0])
            if key not in self._graphs and not self._failed:
                own = partial(func, trainer, context, self._index, substep)
                self._add(key, self._lift(own), given)
            if key not in self._graphs:
                return self._lift(step)(*given)
            self._index.fill_(index)
            return self._graphs[key].replay(given)

        return run

    def _add(self, key: Hashable, step: Callable[..., Any], given: tuple[Any, ...]) -> None:
        """Add the graph of a substep; remember that it failed if it does."""
        began = time.perf_counter()
        leaves, shape = tree_flatten(given)
        places = [self._place(path, leaf) for path, leaf in _paths(given)]

        def prepare() -> None:
            # Not at the places: there the state waits for the graph.
            state = step(*tree_unflatten([leaf.clone() for leaf in leaves], shape))
            # Places are no graph's own memory, which others compute in.
            for path, leaf in _paths((state,)):
                self._place(path, leaf)

        def run() -> Any:
            return self._settled(step(*tree_unflatten(places, shape)))

        found = _captured(prepare, run, leaves[0].device, self._pool)
        self._owner.seconds += time.perf_counter() - began
        if isinstance(found, str):
            self._failed = True
            self._owner.refuse(self._kind, self._trainer, found)
            return
        graph, state, held, read = found
        self.held += held
        self._graphs[key] = _Substep(graph, places, shape, state, read)

    def _settled(self, state: Any) -> Any:
        """Return the state at its places, where it is copied."""
        pairs = [(self._place(path, leaf), leaf) for path, leaf in _paths((state,))]
        taken = {_memory(place) for place in self._places.values()}
        moved = [(place, leaf) for place, leaf in pairs if not _same(place, leaf)]
        # What lies at the place of another tensor is copied before anything is written there.
        values = [leaf.clone() if _memory(leaf) in taken else leaf for _, leaf in moved]
        _copy([place for place, _ in moved], values)
        _, shape = tree_flatten(state)
        return tree_unflatten([place for place, _ in pairs], shape)

    def _place(self, path: str, like: Tensor) -> Tensor:
        """Return the place of a tensor, made if need be."""
        if path not in self._places:
            self._places[path] = torch.empty(like.shape, dtype=like.dtype, device=like.device)
            self.held += self._places[path].nbytes
        return self._places[path]


class _Substep(NamedTuple):
    """A captured substep: what it runs, where it reads, and the state that it leaves."""

    graph: torch.cuda.CUDAGraph
    places: list[Tensor]
    shape: TreeSpec  # how the arguments were flattened
    state: Any
    read: tuple[object, ...]  # what holds the other memory that it reads

    def replay(self, given: tuple[Any, ...]) -> Any:
        """Return the state after the substep."""
        leaves, shape = tree_flatten(given)
        if shape != self.shape:  # the same names in another order
            by_path = dict(_paths(given))
            ordered = tree_unflatten(self.places, self.shape)
            leaves = [by_path[path] for path, _ in _paths(ordered)]
        pairs = zip(self.places, leaves, strict=True)
        moved = [(place, leaf) for place, leaf in pairs if place is not leaf]
        _copy([place for place, _ in moved], [leaf for _, leaf in moved])
        self.graph.replay()
        return self.state


def _copy(places: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Copy values to their places: only those of one type are copied in one launch."""
    by_type: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
    for place, value in zip(places, values, strict=True):
        to, of = by_type.setdefault(value.dtype, ([], []))
        to.append(place)
        of.append(value)
    for to, of in by_type.values():
        torch._foreach_copy_(to, of)


def _paths(tree: Any) -> list[tuple[str, Tensor]]:
    """Return the tensors of a tree with where they are in it, in the order of `tree_leaves`."""
    found, _ = tree_flatten_with_path(tree)
    return [(keystr(path), leaf) for path, leaf in found]


def _same(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors are the same memory, read in the same way."""
    same = one.data_ptr() == other.data_ptr() and one.shape == other.shape
    return same and one.stride() == other.stride()


class Reads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that keeps the tensors that are read in it and were not made in it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tensors: dict[int, Tensor] = {}
        self._made: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator, and keep what it reads."""
        for each in tree_leaves((args, kwargs)):
            if isinstance(each, Tensor) and _memory(each) not in self._made:
                self.tensors.setdefault(_memory(each), each)
        found = func(*args, **(kwargs or {}))
        self._made |= {_memory(each) for each in tree_leaves(found) if isinstance(each, Tensor)}
        # An operator that returns its argument, or a view of it, has not made it.
        self._made -= self.tensors.keys()
        return found


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@contextmanager
def _without_collection() -> Iterator[None]:
    """Keep garbage in here: a graph that goes would break a capture."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _capture(
    run: Callable[[], TrainingResult], inputs: Inputs, steps: "_CompiledSteps | None"
) -> "_Graph | str":
    """Return the graph of a training, or why there is none; what it raises uncaptured is raised.

    Compiled steps hold the constants that they read.
    """
    found = _captured(run, run, inputs.key.device, reads=steps is None)
    if isinstance(found, str):
        return found
    graph, result, held, read = found
    count = len(inputs.key) if inputs.key.ndim else None
    leaves = _leaves(inputs)
    shared = [_shared(leaf, count) for leaf in leaves]
    places = [leaf[0] if alike else leaf for leaf, alike in zip(leaves, shared, strict=True)]
    results, shape = tree_flatten(result)
    return _Graph(graph, places, shared, results, shape, held, (*read, steps))


class _Captured(NamedTuple):
    """A graph, what its function returned, the bytes it holds, and what else it reads."""

    graph: torch.cuda.CUDAGraph
    result: Any
    held: int
    read: tuple[object, ...]


def _captured(
    prepare: Callable[[], object],
    run: Callable[[], object],
    device: torch.device,
    pool: Any = None,
    *,
    reads: bool = True,
) -> "_Captured | str":
    """Return the graph of a function, or why there is none.

    `prepare` is run before it, uncaptured: it fills caches, and lets libraries and compilers
    prepare; what it raises is raised.
    """
    from torch._C import _cuda_clearCublasWorkspaces as clear_workspaces

    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        prepare()
    torch.cuda.current_stream(device).wait_stream(stream)
    torch.cuda.synchronize(device)
    # The workspace of a product must be the graph's own: two graphs may run side by side.
    clear_workspaces()
    # What is free goes now, and not while it is measured what the graph takes.
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved(device)
    graph, mode = torch.cuda.CUDAGraph(), Reads()
    try:
        with (
            _without_collection(),
            torch.cuda.graph(graph, pool, stream=stream, capture_error_mode="thread_local"),
            mode if reads else nullcontext(),
        ):
            result = run()
    except RuntimeError as error:
        torch.cuda.synchronize(device)
        # The end of a capture that failed fails, too; what came before it says why.
        return str(error.__context__ or error).partition("\n")[0].rstrip(".")
    finally:
        clear_workspaces()
    held = torch.cuda.memory_reserved(device) - before
    return _Captured(graph, result, held, tuple(mode.tensors.values()))


class _CompiledSteps:
    """What maps a local step over a stack and compiles it.

    The step is traced through mapping and differentiation down to plain operators, and these are
    compiled: `torch.compile` of the step as it is gained nothing. Steps that are the same operators
    are compiled once.
    """

    def __init__(self, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self._compiled: dict[Hashable, Callable[..., Any]] = {}
        self._steps: dict[int, tuple[Callable[..., Any], Any]] = {}
        self._failed = False

    def __call__(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """Return the step of all devices."""

        def mapped(*given: Any) -> Any:
            index = step.args[2]  # type: ignore[attr-defined]
            leaves, tree = tree_flatten(given)
            if index not in self._steps and not self._failed:
                self._prepare(index, vmap(step), leaves, tree)
            if index not in self._steps:
                return vmap(step)(*given)
            run, result = self._steps[index]
            with torch.autocast(leaves[0].device.type, enabled=False):
                return tree_unflatten(run(*leaves), result)

        return mapped

    def _prepare(self, index: int, step: Callable[..., Any], leaves: list[Any], tree: Any) -> None:
        """Trace and compile a step; remember that it failed if it does."""
        from torch._inductor import compile as compiled

        try:
            with torch.no_grad():
                traced, result = traced_step(step, leaves, tree)
            # A step that reads other constants, or otherwise laid out tensors, is another step.
            held = tuple(id(tensor) for tensor in traced.buffers())
            key = traced.code, held, tuple((t.dtype, t.shape, t.stride()) for t in leaves)
            if key not in self._compiled:
                with torch.autocast(leaves[0].device.type, enabled=False):
                    self._compiled[key] = compiled(traced, leaves)
                    self._compiled[key](*leaves)
        except Exception as error:  # noqa: BLE001 - a compiler may raise anything
            self._failed = True
            reason = f"{type(error).__name__}: {error}".partition("\n")[0].rstrip(".")
            self._warn(f"Local steps are not compiled: {reason}")
            return
        self._steps[index] = self._compiled[key], result


def traced_step(
    step: Callable[..., Any], leaves: list[Any], tree: Any
) -> tuple[torch.fx.GraphModule, Any]:
    """Return a step as plain operators on flattened arguments, and how its result is made of them.

    `tree` says how the arguments were flattened.
    """
    results: list[Any] = []

    def flat(*tensors: Tensor) -> list[Tensor]:
        found, shape = tree_flatten(step(*tree_unflatten(tensors, tree)))
        results.append(shape)
        return found

    return plain_operators(flat, leaves), results[-1]


def _static(inputs: Inputs) -> Inputs:
    """Return a copy of inputs for a graph to read, padded to the size of its stack."""
    count = len(inputs.key) if inputs.key.ndim else None
    size = None if count is None else stack_size(count)

    def own(value: Tensor) -> Tensor:
        if count is None or size is None:
            return value.clone()
        if _shared(value, count):
            return value[0].clone().expand(size, *value.shape[1:])
        return torch.cat([value, value[:1].expand(size - count, *value.shape[1:])])

    copied = tree_map(own, _per_device(inputs))
    return inputs._replace(**copied)


def _per_device(inputs: Inputs) -> dict[str, Any]:
    """Return what a graph reads at places of its own: all but samples that all devices share."""
    given = inputs._asdict()
    if inputs.rows is not None:
        del given["x"], given["y"]
    else:
        del given["rows"]
    return given


def _leaves(inputs: Inputs) -> list[Tensor]:
    """Return the tensors of what a graph reads at places of its own."""
    trees = inputs.params, inputs.buffers, inputs.hyperparameters
    own = (inputs.x, inputs.y) if inputs.rows is None else (inputs.rows,)
    leaves = [value for tree in trees for value in tree.values()]
    return [*leaves, inputs.valid, inputs.seen, inputs.key, *own]


def _shared(value: Tensor, count: int | None) -> bool:
    """Return whether all devices of a stack have one tensor, of which only a view was made."""
    return count is not None and count > 1 and value.stride(0) == 0


def _layout(inputs: Inputs) -> Hashable:
    """Return what has to be equal for two stacks to be trained by the same graph."""
    count = len(inputs.key) if inputs.key.ndim else None
    skipped = 0 if count is None else 1
    shapes = tuple((v.dtype, v.shape[skipped:], _shared(v, count)) for v in _leaves(inputs))
    names = tuple(inputs.params), tuple(inputs.buffers), tuple(inputs.hyperparameters)
    samples = None if inputs.rows is None else (_place(inputs.x), _place(inputs.y))
    size = None if count is None else stack_size(count)
    return inputs.key.device, size, names, shapes, samples


def _place(samples: Tensor) -> Hashable:
    return samples.data_ptr(), samples.dtype, tuple(samples.shape), samples.stride()
