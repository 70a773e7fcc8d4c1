"""The other names of a tensor that a module has under several: one counts, the others follow."""

from collections.abc import Mapping

from torch import Tensor, nn


def aliases(module: nn.Module) -> dict[str, str]:
    """Return every other name of a shared parameter or buffer, and the one that counts.

    That is the first, for buffers the first that the module's state_dict has.
    """
    kept = module.state_dict().keys()
    params = list(module.named_parameters(remove_duplicate=False))
    buffers = list(module.named_buffers(remove_duplicate=False))
    buffers.sort(key=lambda named: named[0] not in kept)
    first: dict[int, str] = {}
    out: dict[str, str] = {}
    for name, tensor in (*params, *buffers):
        if first.setdefault(id(tensor), name) != name:
            out[name] = first[id(tensor)]
    return out


def complete(tree: Mapping[str, Tensor], aliases: Mapping[str, str]) -> dict[str, Tensor]:
    """Return the tree with the other names of its tensors, as the module's state_dict has them."""
    return {**tree, **{other: tree[name] for other, name in aliases.items() if name in tree}}
