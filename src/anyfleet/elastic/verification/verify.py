"""The numeric check of a blueprint against its module."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch
from torch import Tensor, nn

from anyfleet import rng
from anyfleet.elastic.blueprint import Blueprint, Slice
from anyfleet.elastic.program import BATCH, Dim, Held, Node, Program, Size, Value
from anyfleet.elastic.slicing import cut, paste
from anyfleet.elastic.tracing.aliases import aliases
from anyfleet.elastic.tracing.mixed_rows import mixed_rows
from anyfleet.elastic.tracing.tracer import trace
from anyfleet.elastic.verification import disagreement
from anyfleet.elastic.verification.witnesses import ROWS, Bench, Inputs, Seen, Traced, Twin, bench
from anyfleet.errors import VerifyError

Tree = Mapping[str, Tensor]

# The largest error that counts as rounding, relative to the largest value compared.
TOLERANCES: Mapping[torch.dtype, float] = {
    torch.float64: 1e-7,
    torch.complex128: 1e-7,
    torch.float32: 1e-3,
    torch.complex64: 1e-3,
    torch.float16: 5e-2,
    torch.bfloat16: 1e-1,
}
_COARSEST = max(TOLERANCES.values())
_STIRS = 8  # seeds for the generators of Python and numpy, where forward() draws from them
_EXPECTED = (RuntimeError, ValueError, KeyError, IndexError, TypeError, AttributeError)
_AVERAGES = frozenset({"mean", "var", "std"})
_MEDIUM, _MOST = 12, 32  # indices of an axis in a model of medium width, and in any index set

_ADVICE = {
    "tables": "Register every tensor of the module once, as a parameter or as a buffer.",
    "drawing": (
        "Draw in forward() with torch.rand, torch.randn, torch.bernoulli or dropout, in both modes "
        "alike; or outside forward(), and pass the numbers as an input."
    ),
    "evaluating": (
        "Let forward() be the same function in training and in evaluation, apart from dropout and "
        "batch norm, and for every batch size: move what is for evaluation only (a softmax, say) "
        "into the metric."
    ),
    "training": (
        "Write this place with torch operators whose sizes come from tensors (x.shape) and whose "
        "gradient is torch's own: a straight-through step is x + (f(x) - x).detach(), a reversed "
        "gradient 2 * x.detach() - x; keep torch.no_grad() and Python arithmetic on the batch size "
        "out of forward()."
    ),
    "padding": (
        "Devices pad their last minibatch, so samples must not meet in forward() except in batch "
        "norm over [batch, channels, ...]: move means, sorting and products over the batch into "
        "the loss."
    ),
    "cutting": (
        "A small model would be another function: keep features in a dimension of their own (the "
        "second for pooling, convolution and batch norm) and name the dimension in squeeze()."
    ),
}
_TOPIC = {"slice": "cutting", "index": "cutting", "permutation": "cutting", "every": "cutting"}


@dataclass(frozen=True)
class Check:
    """A question that was asked, and the answer."""

    name: str
    ok: bool
    detail: str = ""

    @property
    def advice(self) -> str:
        """The advice to a user whose module fails this check."""
        word = self.name.split()[0]
        return _ADVICE[_TOPIC.get(word, "cutting" if word == "narrowest" else word)]


@dataclass(frozen=True)
class Report:
    """The answers to every check; `ok` if none failed."""

    checks: tuple[Check, ...]

    @property
    def ok(self) -> bool:
        """Whether no check failed."""
        return all(check.ok for check in self.checks)

    @property
    def problems(self) -> tuple[str, ...]:
        """One line per failed check."""
        return tuple(f"{c.name}: {c.detail}" for c in self.checks if not c.ok)

    def require(self) -> None:
        """Raise VerifyError if anything failed: what, where, and what to do about the first."""
        if not self.ok:
            (first, *_) = (check for check in self.checks if not check.ok)
            told = "\n".join((*self.problems, first.advice))
            raise VerifyError(f"the blueprint does not describe the module:\n{told}")


def verify(
    module: nn.Module,
    example_inputs: Tensor | tuple[Tensor, ...],
    blueprint: Blueprint | None = None,
    *,
    trials: int = 2,
    seed: int = 0,
) -> Report:
    """Compare the blueprint (default: a fresh trace) with the module itself.

    On rows between the first two samples, with random weights that are not zero and without random
    draws (those in evaluation are counted):

    - The program equals the module when evaluating and when training, for two batch sizes:
      outputs, buffers, and the gradients of a random sum of the outputs.
    - For `trials` random index sets on every axis the dense model equals the masked module, and
      so do the gradients. Axes that enter the statistics of a norm or the scale of attention are
      kept whole there. `paste(cut())` is exact.
    - In a dense model of medium width padding changes nothing for the other rows, a reordered
      model is the same function, further index sets behave like the first, and so does every axis
      at its narrowest, alone and together with all others.

    Values agree if they differ by no more than a share of the largest: 1e-7 in float64, in which
    all of this is done. A module that computes in a coarser precision of its own accord (an
    explicit `.float()`, say) and disagrees in float64 is compared as it is, within 1e-3 for
    float32, 5e-2 for float16 and 1e-1 for bfloat16, and fails if two draws of weights do. So is one
    that raises an error for a batch of three; the second draw is for four.
    """
    found = trace(module, example_inputs) if blueprint is None else blueprint
    inputs = (example_inputs,) if isinstance(example_inputs, Tensor) else tuple(example_inputs)
    key = rng.root(seed, "verify")
    twin = Twin.of(module, torch.float64)
    report = _Inquiry(twin, module, inputs, found, key, trials).report()
    coarse = twin.failed or bool(twin.computed - {torch.float64, torch.complex128})
    if report.ok or not coarse:
        return report
    for rows, own in ((ROWS, key), (ROWS + 1, rng.fold(key, "again"))):
        report = _Inquiry(Twin.of(module), module, inputs, found, own, trials, rows).report()
        if report.ok:
            break
    return report


@dataclass(frozen=True)
class _Inquiry:
    """All questions about one module, in one precision and with one draw of weights."""

    twin: Twin
    module: nn.Module
    inputs: Inputs
    original: Blueprint
    key: Tensor
    trials: int
    rows: int = ROWS

    def report(self) -> Report:
        """Ask all questions and return the answers; stop if the tables are wrong."""
        first = _checked("tables", lambda: _tables(self.twin.module, self.original))
        if not first.ok:
            return Report((first,))
        return Report((first, *(_checked(name, ask) for name, ask in self._questions())))

    def _questions(self) -> Iterator[tuple[str, Callable[[], str]]]:
        yield "drawing", self._drawing
        yield "evaluating", self._evaluating
        yield "training", self._training
        keys = [rng.fold(self.key, trial) for trial in range(self.trials)]
        for trial, key in enumerate(keys):
            yield f"slice {trial}", partial(self._slice, key)
        yield "padding", self._padding
        for trial, key in enumerate(keys):
            yield f"permutation {trial}", partial(self._permutation, key)
            yield f"every axis {trial}", partial(self._every_axis, key)
        for trial in range(2):
            key = rng.fold(self.key, f"index set {trial}")
            yield f"index set {trial}", partial(self._index_set, key)
        yield "narrowest", self._narrowest

    @cached_property
    def table(self) -> Bench:
        """The tensors and inputs of the whole model."""
        blueprint = _quiet(self.original)
        own = self.twin.dtype if self.twin.converted else None
        return bench(self.twin, self.module, self.inputs, blueprint, self.key, own, self.rows)

    @cached_property
    def tolerance(self) -> float:
        """The largest relative error that counts as rounding, in the coarsest precision used."""
        if self.twin.converted:
            return TOLERANCES[self.twin.dtype]
        self._evaluated  # noqa: B018 - it tells the precisions
        return max((TOLERANCES.get(d, _COARSEST) for d in self.twin.computed), default=_COARSEST)

    @cached_property
    def _evaluated(self) -> Seen:
        table, few = self.table, tuple(x[:2] for x in self.table.inputs)
        return self.twin.run(table.params, table.buffers, few, training=False)

    @cached_property
    def _trained(self) -> Seen:
        table, loss = self.table, self.table.loss(self._shape())
        return self.twin.run(table.params, table.buffers, table.inputs, training=True, loss=loss)

    @cached_property
    def medium(self) -> Bench:
        """A dense model with at most twelve indices on every axis: small, but not degenerate."""
        table, full = self.table, self.table.blueprint
        counts = {n: min(_MEDIUM, math.ceil(0.7 * size)) for n, size in _free(full).items()}
        slice = _drawn(full, rng.fold(self.key, "medium"), counts)
        local = full.local(slice)
        return replace(
            table,
            witness=Traced(local),
            blueprint=local,
            params=cut(table.params, slice, full),
            buffers=cut(table.buffers, slice, full),
        )

    def _differs(self, got: Tensor, want: Tensor, what: str, scale: float = 0.0) -> str:
        return differs(got, want, what, scale, self.tolerance)

    def _drawing(self) -> str:
        if used := self._deciding():
            return f"forward() draws from {used}, and its output depends on that"
        known, real = sum(n.always for n in self.original.evaluated.nodes), self._evaluated.drawn
        if known == real:
            return ""
        return f"{real} calls of the module draw at random in evaluation, {known} of the blueprint"

    def _deciding(self) -> str:
        """Return the generators of Python or numpy that the output depends on."""
        table = self.table
        few = tuple(x[:2] for x in table.inputs)
        for training, first in ((False, self._evaluated), (True, self._trained)):
            outputs = []
            for seed in range(_STIRS if first.generators else 0):
                self.twin.stirred = seed
                try:
                    seen = self.twin.run(table.params, table.buffers, few, training=training)
                finally:
                    self.twin.stirred = None
                outputs.append(seen.output)
            if any(self._differs(out, outputs[0], "") for out in outputs[1:]):
                return " and ".join(first.generators)
        return ""

    def _evaluating(self) -> str:
        table, want = self.table, self._evaluated.output
        few = tuple(x[:2] for x in table.inputs)
        given = (table.params, table.buffers, few)
        got = Traced(table.blueprint).run(*given, training=False).output
        problem = self._differs(got, want, f"the output for batch {len(few[0])}")
        return problem and problem + self._where(
            disagreement.of_outputs, self.twin, table.blueprint, given, training=False
        )

    def _training(self) -> str:
        table = self.table
        given = (table.params, table.buffers, table.inputs)
        want, loss = self._trained, table.loss(self._shape())
        got = Traced(table.blueprint).run(*given, training=True, loss=loss)
        problem = self._differs(got.output, want.output, "the output") or self._moved(got, want)
        if problem:
            return problem + self._where(
                disagreement.of_outputs, self.twin, table.blueprint, given, training=True
            )
        problem = self._gradients(got.gradients, want.gradients)
        return problem and problem + self._where(
            disagreement.of_gradients, table.blueprint, got.gradients, want.gradients
        )

    def _shape(self) -> Tensor:
        """Return something of the shape of the output for the whole batch."""
        few = self._evaluated.output
        return few.new_empty((len(self.table.inputs[0]), *few.shape[1:]))

    def _moved(self, got: Seen, want: Seen, names: Tree | None = None) -> str:
        known = self.table.blueprint.buffers if names is None else names
        problems = (self._differs(got.buffers[n], want.buffers[n], n) for n in known)
        return next(filter(None, problems), "")

    def _gradients(self, got: Tree, want: Tree) -> str:
        scale = _largest(want)
        problems = (
            self._differs(got[n], want[n], f"the gradient of {n}", scale) for n in want if n in got
        )
        return next(filter(None, problems), "")

    def _where(self, find: Callable[..., str], *args: object, **options: object) -> str:
        """Return where a difference comes from, as far as that can be found."""
        try:
            place = find(*args, **options, differs=self._differs)
        except _EXPECTED:
            return ""
        return f", first {place}" if place else ""

    def _slice(self, key: Tensor) -> str:
        return self._compared(self.table, _subset(self.table.blueprint, key))

    def _index_set(self, key: Tensor) -> str:
        return self._compared(self.medium, _subset(self.medium.blueprint, key))

    def _compared(self, table: Bench, slice: Slice, *, gradients: bool = True) -> str:
        """Compare the dense small model with the witness in which everything else is zero."""
        full, zeros = table.blueprint, {k: torch.zeros_like(v) for k, v in table.params.items()}
        small = cut(table.params, slice, full)
        masked = paste(small, zeros, slice, full)
        if any(not torch.equal(v, small[k]) for k, v in cut(masked, slice, full).items()):
            return "paste(cut()) is not exact"
        buffers = cut(table.buffers, slice, full)
        local = Traced(full.local(slice))
        for training in (False, True):
            loss = table.loss(self._shape()) if training and gradients else None
            large = (masked, table.buffers, table.inputs)
            want = table.witness.run(*large, training=training, loss=loss)
            got = local.run(small, buffers, table.inputs, training=training, loss=loss)
            wanted = {n: want.buffers[n] for n in full.buffers}
            want = replace(
                want,
                gradients=cut(want.gradients, slice, full),
                buffers=cut(wanted, slice, full) if training else {},
            )
            problem = (
                self._differs(got.output, want.output, "the output of the dense model")
                or self._moved(got, want, want.buffers)
                or self._gradients(got.gradients, want.gradients)
            )
            if problem:
                mode = " in training" if training else " in evaluation"
                return (
                    problem
                    + mode
                    + self._where(
                        disagreement.of_slice,
                        full,
                        slice,
                        large,
                        (small, buffers, table.inputs),
                        training=training,
                    )
                )
        return ""

    def _padding(self) -> str:
        """Check that rows that are no samples change nothing for the samples before them.

        A program whose rows mix takes no padding: there is nothing to ask.
        """
        table = self.medium
        padded = tuple(
            torch.cat([x, more]) for x, more in zip(table.inputs, table.others, strict=True)
        )
        valid = torch.arange(len(padded[0])) < len(table.inputs[0])
        loss = table.loss(self._shape())
        modes = [t for t in (True, False) if not mixed_rows(self.original, evaluating=not t)]
        for training in modes:
            given = (table.params, table.buffers, table.inputs)
            want = table.witness.run(*given, training=training, loss=loss)
            got = table.witness.run(*given[:2], padded, training=training, loss=loss, valid=valid)
            real = got.output[: len(table.inputs[0])]
            problem = (
                self._differs(real, want.output, "the output for the other rows")
                or self._moved(got, want)
                or self._gradients(got.gradients, want.gradients)
            )
            if problem:
                mode = "in training" if training else "in evaluation"
                return f"with padded rows {problem} {mode}" + self._where(
                    disagreement.of_padding,
                    table.blueprint,
                    given,
                    padded,
                    valid,
                    training=training,
                )
        return ""

    def _permutation(self, key: Tensor) -> str:
        """Check that a model whose axes are all reordered is the same function."""
        table, full = self.medium, self.medium.blueprint
        slice = _drawn(full, key, _free(full))
        given = (table.params, table.buffers, table.inputs)
        small = (cut(table.params, slice, full), cut(table.buffers, slice, full), table.inputs)
        want = table.witness.run(*given, training=False).output
        got = Traced(full.local(slice)).run(*small, training=False).output
        problem = self._differs(got, want, "the output of the reordered model")
        return problem and problem + self._where(
            disagreement.of_slice, full, slice, given, small, training=False
        )

    def _every_axis(self, key: Tensor) -> str:
        """Check that the small model runs with everything cut, and its gradients are not NaN."""
        return self._runs(_subset(self.medium.blueprint, key, cutting_statistics=True))

    def _runs(self, slice: Slice) -> str:
        table, full = self.medium, self.medium.blueprint
        small = (cut(table.params, slice, full), cut(table.buffers, slice, full), table.inputs)
        loss = table.loss(self._shape())
        seen = Traced(full.local(slice)).run(*small, training=True, loss=loss)
        if seen.output.shape != loss.shape:
            return f"the output has shape {tuple(seen.output.shape)}"
        undefined = any(bool(t.isnan().any()) for t in (seen.output, *seen.gradients.values()))
        return "something is not a number" if undefined else ""

    def _narrowest(self) -> str:
        """Check every axis at its minimum: alone, and with all others."""
        table, full = self.medium, self.medium.blueprint
        whole, key = statistical_axes(full), rng.fold(self.key, "narrowest")
        alone = [n for n in _free(full) if n not in whole]
        for name in alone:
            slice = _drawn(full, key, {name: 1})
            if problem := self._compared(table, slice, gradients=False):
                return f"{name} at width 1: {problem}"
        if problem := self._compared(table, _drawn(full, key, dict.fromkeys(alone, 1))):
            return f"everything at width 1: {problem}"
        counts = {n: 2 if n in whole else 1 for n in _free(full)}
        problem = self._runs(_drawn(full, key, counts))
        return problem and f"everything at its narrowest: {problem}"


def _quiet(blueprint: Blueprint) -> Blueprint:
    """Return the blueprint without draws in evaluation, to compare it with a still module."""
    program, *others = (
        replace(program, nodes=tuple(replace(node, always=False) for node in program.nodes))
        for program in blueprint.programs
    )
    return replace(blueprint, program=program, evaluation=next(iter(others), None))


def _checked(name: str, question: Callable[[], str]) -> Check:
    try:
        detail = question()
    except _EXPECTED as error:
        detail = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return Check(name, not detail, detail)


def _tables(module: nn.Module, blueprint: Blueprint) -> str:
    buffers = dict(module.named_buffers(remove_duplicate=False))
    state = {**dict(module.named_parameters()), **buffers}
    constants = [name for program in blueprint.programs for name in program.constants]
    held = {*blueprint.params, *blueprint.buffers, *constants}
    missing = sorted(set(state) - held - aliases(module).keys())
    if missing:
        return f"no table for {', '.join(missing)}"
    for name in (*blueprint.params, *blueprint.buffers):
        if name not in state or tuple(state[name].shape) != blueprint.shape(name):
            return f"{name} has shape {blueprint.shape(name)} in the table"
    layered = [p for layer in blueprint.layers for p in layer.params]
    if sorted(layered) != sorted(blueprint.params):
        return "the layers do not hold every parameter once"
    return ""


def _free(blueprint: Blueprint) -> dict[str, int]:
    """Return the axes that may be cut, and their sizes."""
    return {name: axis.size for name, axis in blueprint.axes.items() if axis.free}


def _subset(blueprint: Blueprint, key: Tensor, *, cutting_statistics: bool = False) -> Slice:
    """Draw random indices on every axis that may be cut; of a statistic at least two, or all."""
    whole, counts = statistical_axes(blueprint), {}
    for name, size in _free(blueprint).items():
        drawn = 1 + int(rng.uniform(rng.fold(key, name), 1) * min(size, _MOST))
        if name not in whole:
            counts[name] = drawn
        elif cutting_statistics:
            counts[name] = max(2, drawn)
    return _drawn(blueprint, key, counts)


def _drawn(blueprint: Blueprint, key: Tensor, counts: Mapping[str, int]) -> Slice:
    """Draw so many random indices of each axis, in random order."""
    kept = {}
    for name, count in counts.items():
        everything = torch.ones(blueprint.axes[name].size, dtype=torch.bool)
        order: list[int] = rng.permutation(rng.fold(key, name), everything).tolist()
        kept[name] = order[:count]
    return Slice.of(kept, blueprint)


def _largest(tree: Tree) -> float:
    return max((_peak(t) for t in tree.values()), default=0.0)


def _peak(tensor: Tensor) -> float:
    """Return the largest finite value, without its sign."""
    if not tensor.numel():
        return 0.0
    found = float(tensor.abs().max())
    if math.isfinite(found):
        return found
    finite = tensor[tensor.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0


def differs(
    got: Tensor,
    want: Tensor,
    what: str,
    scale: float = 0.0,
    tolerance: float = TOLERANCES[torch.float64],
) -> str:
    """Return a sentence if two tensors differ by more than rounding, else "".

    A NaN differs from everything.
    """
    if got.shape != want.shape:
        return f"{what} has shape {tuple(got.shape)} instead of {tuple(want.shape)}"
    unlike = got != want
    if not bool(unlike.any()):
        return ""
    if torch.bool in (got.dtype, want.dtype):
        return f"{what} differs"
    if bool(want.isnan().any()):
        return f"{what} is not a number already where it should be right (are the inputs finite?)"
    error = float((got - want)[unlike].abs().max())
    limit = tolerance * max(_peak(want), scale, 1e-30)
    return "" if error <= limit else f"{what} differs by {error:.3g}"


# --- axes that enter statistics -------------------------------------------------------------------


def statistical_axes(blueprint: Blueprint) -> frozenset[str]:
    """Return the axes that a norm or a mean averages over, or that scale attention.

    A model that is cut along them is no masked large one.
    """
    found = [_in_program(program, blueprint) for program in blueprint.programs]
    return frozenset[str]().union(*found)


def _in_program(program: Program, blueprint: Blueprint) -> set[str]:
    dims = {given.name: given.dims for given in program.inputs}
    dims |= {node.name: node.dims for node in program.nodes if node.dims is not None}
    found: set[str] = set()
    for node in program.nodes:
        first = node.args[0] if node.args else None
        if isinstance(first, Value) and first.name in dims:
            found |= _averaged(node, dims[first.name])
        elif isinstance(first, Held):
            found |= _averaged(node, _held(program, first.name, blueprint))
    return found


def _held(program: Program, name: str, blueprint: Blueprint) -> tuple[Dim, ...]:
    constant = program.constants.get(name)
    return blueprint.dims(name) if constant is None else constant.dims


def _averaged(node: Node, source: tuple[Dim, ...]) -> set[str]:
    op = node.operator
    if op in ("layer_norm", "rms_norm"):
        shape = node.args[1]
        count = len(getattr(shape, "items", ()))
        return _axes(source[len(source) - count :])
    if op == "group_norm":
        groups = node.args[1]
        return _axes(source[1:2]) - (_axes((groups.dim,)) if isinstance(groups, Size) else set())
    if op == "scaled_dot_product_attention":
        return _axes(source[-1:])
    if op in ("batch_norm", "instance_norm"):
        # Of weights, say: their input channels are what is averaged.
        return _axes(source[:1] + source[2:]) - {BATCH}
    if op in _AVERAGES:
        return _axes(source) - _axes(node.dims or ())
    return set()


def _axes(dims: tuple[Dim, ...]) -> set[str]:
    return {axis for dim in dims for product in dim for axis in product}
