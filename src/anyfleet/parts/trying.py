"""Parts by themselves: an aggregator, a codec or a trainer on a few small tensors, without a run.

Each function calls the part as a run does, with the same checks of what it returns, and draws
everything random from `seed`: the same call gives the same numbers.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from anyfleet import rng
from anyfleet.arrays import Flags, Ints
from anyfleet.core.codec_calls import compress
from anyfleet.core.layout import MessageLayout
from anyfleet.core.local_training import Inputs, as_tensors, extent, lifted, train, training_context
from anyfleet.core.messages import Aggregated, Conditions, Devices, Params, Report
from anyfleet.core.return_checks import Caller, aggregated, trained
from anyfleet.core.slots import Aggregate, Codec, Norm, Train, TrainingResult
from anyfleet.core.time_and_energy import Demand
from anyfleet.core.updates import Updates
from anyfleet.core.view import OrderStatuses, View
from anyfleet.elastic import WHOLE, Axis, Blueprint, Cost, Layer, Slice, trace
from anyfleet.elastic.program import Program
from anyfleet.parts.norm import BatchStatistics

__all__ = ["TriedCodec", "try_aggregate", "try_codec", "try_train"]

Loss = Callable[[Tensor, Tensor], Tensor]


# --- aggregators ------------------------------------------------------------------------------


def try_aggregate(
    part: Aggregate,
    model: Params,
    deltas: Sequence[Params],
    *,
    samples: Sequence[float] | None = None,
    covered: Sequence[Params] | None = None,
    staleness: Sequence[int] | None = None,
    reports: Sequence[Report] | None = None,
    server_loss: Callable[[Params], float] | None = None,
    state: Any = None,
    seed: int = 0,
) -> Aggregated:
    """Return what an aggregator makes of a model and the changes that devices 0, 1, 2 … sent.

    A delta may leave out tensors that its device did not train, and `covered` says for each device
    which entries of its tensors it trained (1 or True), where not all. `samples` are 1 each unless
    given. `state` is that of an earlier call (`Aggregated.state`), for a next round. An aggregator
    that asks for the loss on the server split gets `server_loss(model)`.

    >>> import torch
    >>> from anyfleet.parts import Mean, try_aggregate
    >>> deltas = [{"w": torch.tensor([1.0, 0.0])}, {"w": torch.tensor([0.0, 4.0])}]
    >>> try_aggregate(Mean(), {"w": torch.zeros(2)}, deltas, samples=[3, 1]).model["w"]
    tensor([0.7500, 1.0000])
    """
    blueprint = _blueprint({name: tuple(tensor.shape) for name, tensor in model.items()})
    updates = Updates.of(
        deltas,
        blueprint,
        samples=samples,
        staleness=staleness,
        masks=covered,
        reports=reports,
    )
    view = _view(blueprint, model, updates, server_loss)
    state = part.init(view) if state is None else state
    found = part(model, updates, view, state, rng.root(seed, "aggregate"))
    return aggregated(found, Caller("aggregate", part, view.round_index), model)


def _blueprint(shapes: Mapping[str, tuple[int, ...]]) -> Blueprint:
    """Return the blueprint of some tensors that no network has; every one is a layer."""
    sizes = {
        f"{name}.{at}": size for name, shape in shapes.items() for at, size in enumerate(shape)
    }
    why = "there is no network to cut"
    return Blueprint(
        axes={axis: Axis(size, size, "fixed", why) for axis, size in sizes.items()},
        params={n: tuple(((f"{n}.{at}",),) for at in range(len(s))) for n, s in shapes.items()},
        buffers={},
        layers=tuple(Layer(name, (name,), ()) for name in shapes),
        frozen=(),
        program=Program((), (), {}, ""),
        norms=(),
        scaled=(),
        remarks=(),
    )


def _view(
    blueprint: Blueprint,
    model: Params,
    updates: Updates,
    server_loss: Callable[[Params], float] | None,
) -> View:
    """Return what an aggregator sees in a first round in which all devices replied."""

    def absent(what: str) -> Callable[..., Any]:
        def refuse(*_: object) -> Any:
            raise ValueError(f"try_aggregate has no {what}: try this part in a run.")

        return refuse

    def loss(params: Params, _: Tensor) -> float:
        if server_loss is None:
            raise ValueError(
                "This aggregator asks for the loss on the server split; give try_aggregate a "
                "function of the model, server_loss=lambda model: ..."
            )
        return server_loss(params)

    def free(devices: Ints) -> Flags:
        return np.ones(len(devices), dtype=np.bool_)

    count, none = len(updates), OrderStatuses.of(())
    conditions: Callable[[Ints], Conditions] = absent("conditions of devices")
    cost: Callable[[Slice, int], Cost] = absent("network to cost")
    training_cost: Callable[[Slice, int, int, int], Demand] = absent("training to cost")
    return View(
        blueprint=blueprint,
        devices=Devices(
            level=np.zeros(count, dtype=np.int64),
            samples=updates.samples.astype(np.int64),
            group=np.zeros(count, dtype=np.int64),
            column_width=np.ones(count),
        ),
        round_index=0,
        now=0.0,
        started=0.0,
        free=free,
        under_way=none,
        replied=none,
        failed=none,
        declined=none,
        model=model,
        diagnostics={},
        conditions=conditions,
        free_memory=absent("conditions of devices"),
        server_loss=loss,
        cost=cost,
        training_cost=training_cost,
        message_bits=absent("messages"),
    )


# --- codecs -----------------------------------------------------------------------------------


class TriedCodec(NamedTuple):
    """What a receiver has after a codec, and what that cost."""

    restored: dict[str, Tensor]  # what the receiver unpacks out of the bytes
    bits: float  # charged for the message
    packed: tuple[bytes, ...]  # the message itself
    state: Params  # what the device keeps for its next message; {} of most codecs
    distortion: float  # squared error over squared norm


def try_codec(
    part: Codec,
    tensors: Params,
    *,
    sent_fraction: float = float("nan"),
    state: Params | None = None,
    seed: int = 0,
) -> TriedCodec:
    """Return what a receiver has of some tensors after compressing, packing and unpacking them.

    `sent_fraction` is what an order asks for (NaN: nothing). `state` is that of an earlier call
    (`TriedCodec.state`), for the next message of the same device. Raise BadReturn when the bytes do
    not hold what the codec says that the receiver has, or when there are more of them than it says.

    >>> import torch
    >>> from anyfleet.parts import TopK, try_codec
    >>> tried = try_codec(TopK(keep=0.5), {"w": torch.tensor([3.0, -0.1, 0.2, -4.0])})
    >>> tried.restored["w"]
    tensor([ 3.,  0.,  0., -4.])
    """
    if not tensors:
        raise ValueError("try_codec needs at least one tensor.")
    stacked = {name: tensor[None] for name, tensor in tensors.items()}
    kept = {name: tensor[None] for name, tensor in (state or {}).items()}
    caller, layout = Caller("uplink", part, 0), MessageLayout.of(stacked, seed)
    found = compress(stacked, kept, torch.tensor([sent_fraction]).double(), layout, caller)
    packed = part.pack(found.symbols.row(0), layout)
    rows, _ = part.restore(part.unpack(packed, layout), layout)
    restored = layout.unflattened(rows)
    wrong = [name for name, due in found.received.items() if not _same(restored.get(name), due)]
    if wrong:
        caller.refuse(
            f"other numbers for {wrong[0]!r} from `restore` than `compress` had promised",
            "what `compress` says that the receiver has, bit for bit",
        )
    bits, length = float(found.bits.sum()), 8 * sum(map(len, packed))
    if length > bits:
        caller.refuse(f"{length} packed bits where `bits` says {bits:g}", "`bits` of at least that")
    return TriedCodec(
        restored={name: value[0] for name, value in restored.items()},
        bits=bits,
        packed=packed,
        state={name: value[0] for name, value in found.state.items()},
        distortion=float(found.distortion[0]),
    )


def _same(came: Tensor | None, promised: Tensor) -> bool:
    return came is not None and came.shape == promised.shape and torch.equal(came, promised)


# --- trainers ---------------------------------------------------------------------------------


def cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    """Return the cross-entropy of every sample, of logits [samples, classes] and classes."""
    return nn.functional.cross_entropy(output, target.long(), reduction="none")


def try_train(
    part: Train,
    module: nn.Module,
    x: Tensor,
    y: Tensor,
    *,
    loss: Loss = cross_entropy,
    norm: Norm = BatchStatistics(),  # noqa: B008 - immutable
    seed: int = 0,
) -> TrainingResult:
    """Return what local training makes of a network on the samples of one device.

    The device trains the whole network with the trainer's own hyperparameters. `loss` gives one
    value for each sample. The module itself is not changed.

    >>> import torch
    >>> from anyfleet.parts import Decaying, Gradient, Sgd, try_train
    >>> module, x = torch.nn.Linear(2, 2, bias=False), torch.eye(2)
    >>> _ = torch.nn.init.zeros_(module.weight)
    >>> try_train(Gradient(Decaying(1.0), Sgd()), module, x, torch.tensor([0, 1])).params["weight"]
    tensor([[ 0.2500, -0.2500],
            [-0.2500,  0.2500]])
    """
    task, key = _TriedTask.of(module, x, y, loss), rng.root(seed, "train")
    if misfit := part.misfit(task):
        raise ValueError(misfit)
    hyperparameters = part.hyperparameters(0, np.array([len(x)]))
    like = next(iter(task.params.values()))
    inputs = Inputs(
        params=task.params,
        buffers=task.buffers,
        x=x,
        y=y,
        valid=torch.ones(len(x), dtype=torch.bool, device=x.device),
        seen=task.labels(0),
        key=key.to(like.device),
        hyperparameters={
            name: value[0] for name, value in as_tensors(hyperparameters, [len(x)], like).items()
        },
    )
    context = training_context(task, norm, WHOLE)
    bounds = extent(hyperparameters, [len(x)])
    found = train(part, context, inputs, bounds, lift=lifted(1), cohort_key=seed)
    return trained(found, Caller("train", part, 0), inputs.params, inputs.buffers)


@dataclass(frozen=True, eq=False)
class _Samples:
    x: Tensor
    y: Tensor

    def __len__(self) -> int:
        return len(self.x)


@dataclass(frozen=True, eq=False)
class _TriedTask:
    """A task of one device, which has all samples."""

    blueprint: Blueprint
    params: dict[str, Tensor]
    buffers: dict[str, Tensor]
    samples: _Samples
    loss: Loss
    classes: int
    classified: bool
    devices: int = 1
    metrics: Mapping[str, Loss] = field(default_factory=dict)
    augment: None = None
    owners: tuple[str, ...] = ("",)
    assignment: str = ""

    @staticmethod
    def of(module: nn.Module, x: Tensor, y: Tensor, loss: Loss) -> "_TriedTask":
        if len(x) < 2 or len(x) != len(y):
            raise ValueError(
                f"try_train needs two samples or more and a target for each, got {len(x)} samples "
                f"and {len(y)} targets."
            )
        blueprint = trace(module, (x[:2],))
        weights = {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}
        with torch.no_grad():
            # On copies: in training mode a network may write its buffers.
            copies = {name: tensor.clone() for name, tensor in weights.items()}
            output = torch.func.functional_call(module, copies, (x[:2],))
        return _TriedTask(
            blueprint=blueprint,
            params={name: weights[name] for name in blueprint.params},
            buffers={name: weights[name] for name in blueprint.buffers},
            samples=_Samples(x, y),
            loss=loss,
            classes=output.shape[-1],
            classified=loss is cross_entropy,
        )

    @property
    def test(self) -> _Samples:
        return self.samples

    @property
    def server(self) -> _Samples:
        return self.samples

    def data(self, device: int) -> _Samples:
        return self.samples

    def own_test(self, device: int) -> _Samples:
        return self.samples

    def size(self, device: int) -> int:
        return len(self.samples)

    def labels(self, device: int) -> Tensor:
        """Return which classes occur; where targets are no classes, all."""
        if not self.classified:
            return torch.ones(self.classes, dtype=torch.bool)
        return self.samples.y.long().bincount(minlength=self.classes)[: self.classes] > 0

    def __hash__(self) -> int:
        return object.__hash__(self)
