"""UVeQFed: FedAvg whose devices upload points of a lattice, with a dither that both ends know.

Shlezinger, Chen, Eldar, Poor, Cui: UVeQFed: Universal vector quantization for federated learning.
IEEE Transactions on Signal Processing 69, 2021. Specification §1.15; the largest entries first, as
AnycostFL's comparison has it.
"""

from dataclasses import replace
from typing import Literal, Unpack

from anyfleet.arguments import checked
from anyfleet.core.method import Method
from anyfleet.methods.fedavg import Training, fedavg
from anyfleet.papers import UVEQFED
from anyfleet.parts.codec import TopK, Uveq

PAPER = UVEQFED


@checked
def uveqfed(
    *,
    bits_each: float = 2.0,  # bits for an entry that is sent
    dimension: Literal[1, 2] = 2,  # entries that share a point of the lattice
    keep: float = 0.15,  # share of the entries that is sent
    count: int = 10,
    **training: Unpack[Training],
) -> Method:
    """Return UVeQFed, which sends the share `keep` of every tensor.

    Each entry takes `bits_each` bits, on hexagons (`dimension=2`) or on a line.
    """
    uplink = TopK(keep, Uveq(bits_each, dimension))
    return replace(fedavg(count=count, **training), uplink=uplink)
