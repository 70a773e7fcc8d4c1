"""Codecs on a CUDA device: messages of large tensors are as long as on the host."""

from math import prod

import pytest
import torch

from anyfleet import rng
from anyfleet.core.layout import MessageLayout, TensorLayout
from anyfleet.core.slots import Codec, Compressed
from anyfleet.parts.codec import Fgc, Hq, Plain, Qsgd, Stc, TopK, Uveq
from tests.parts.codec.test_codecs import names

DEVICE = "cuda"
SIZES = {"weight": (1600, 1000), "bias": (1600,)}  # some hundred thousand entries are kept
CODECS = [
    *(TopK(0.15), TopK(0.15, Qsgd(16)), TopK(0.15, Uveq(2.0)), Stc(0.15), Stc(0.15, "model")),
    *(Plain(), Qsgd(), Uveq(), Hq(), Fgc()),
]


def compressed(codec: Codec, device: str) -> Compressed:
    key = torch.stack([rng.root(0, "one"), rng.root(0, "two")])
    rows = {
        name: torch.stack([rng.normal(rng.fold(each, name), prod(size)) for each in key]).float()
        for name, size in SIZES.items()
    }
    tensors = {name: TensorLayout(size, (prod(size),)) for name, size in SIZES.items()}
    layout = MessageLayout(tensors, torch.float32, key.to(device))
    asked = torch.full((2,), 0.05, dtype=torch.float64, device=device)
    there = {name: value.to(device) for name, value in rows.items()}
    return codec.compress(there, asked, layout, {})


@pytest.mark.parametrize("codec", CODECS, ids=names)
def test_messages_of_large_tensors_are_as_long_as_on_the_host(codec: Codec) -> None:
    host, there = compressed(codec, "cpu"), compressed(codec, DEVICE)
    # A sum in another order may round another way, and a level be another one then.
    assert torch.allclose(there.bits.cpu().double(), host.bits.double(), rtol=1e-4)
    assert torch.allclose(there.distortion.cpu(), host.distortion, rtol=1e-4)
