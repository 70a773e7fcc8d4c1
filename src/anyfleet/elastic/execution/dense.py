"""The small model of a slice as a module of its own."""

import torch
from torch import Tensor, nn

from anyfleet.elastic.blueprint import Blueprint, Slice
from anyfleet.elastic.execution.interpret import apply
from anyfleet.elastic.execution.modes import EVALUATE, TRAIN
from anyfleet.elastic.slicing import Params, cut


def dense(blueprint: Blueprint, slice: Slice, params: Params, buffers: Params) -> "DenseModel":
    """Return a small module for a slice of the given tensors; it shares no memory with them."""
    small, held = cut(params, slice, blueprint), cut(buffers, slice, blueprint)
    return DenseModel(blueprint.local(slice), small, held, first=slice.first_trained_layer)


class DenseModel(nn.Module):
    """A module that runs a blueprint's program; its state_dict has the original names.

    Only the layers from `first` on require gradients, and of those nothing that is frozen.
    """

    def __init__(
        self, blueprint: Blueprint, params: Params, buffers: Params, *, first: int = 0
    ) -> None:
        super().__init__()
        self.blueprint = blueprint
        trained = set(blueprint.trained(first))
        for name, tensor in params.items():
            holder, leaf = _holder(self, name)
            copy = tensor.detach().clone()
            holder.register_parameter(leaf, nn.Parameter(copy, requires_grad=name in trained))
        for name, tensor in buffers.items():
            holder, leaf = _holder(self, name)
            holder.register_buffer(leaf, tensor.detach().clone())
        held = {**dict(self.named_parameters()), **dict(self.named_buffers())}
        for other, name in blueprint.aliases.items():
            holder, leaf = _holder(self, other)
            tensor = held[name]
            if isinstance(tensor, nn.Parameter):
                holder.register_parameter(leaf, tensor)
            else:
                holder.register_buffer(leaf, tensor)

    def forward(self, *inputs: Tensor) -> Tensor:
        """Run the program.

        In training mode, draw the dropout key from torch's generator and move the buffers.
        """
        held = self.state_dict(keep_vars=True)
        params = {name: held[name] for name in self.blueprint.params}
        buffers = {name: held[name] for name in self.blueprint.buffers}
        if not self.training:
            return apply(self.blueprint, params, buffers, inputs, EVALUATE)[0]
        key = torch.randint(1 << 62, (), device=inputs[0].device)
        out, updated = apply(self.blueprint, params, buffers, inputs, TRAIN, key=key)
        with torch.no_grad():
            for name, tensor in updated.items():
                buffers[name].copy_(tensor)
        return out


def _holder(root: nn.Module, name: str) -> tuple[nn.Module, str]:
    """Return the submodule on the path of a dotted name, made if need be, and the last name."""
    *path, leaf = name.split(".")
    holder = root
    for part in path:
        children = dict(holder.named_children())
        if part not in children:
            holder.add_module(part, nn.Module())
        holder = holder.get_submodule(part)
    return holder, leaf
