"""The data of one device: points, and in which ring they lie."""

import platform
import zlib

import torch


def samples():
    """Return the samples of this device; those of a machine with another name are others."""
    generator = torch.Generator().manual_seed(zlib.crc32(platform.node().encode()))
    x = torch.randn(2000, 2, generator=generator)
    y = (x.norm(dim=1) * 1.5).long().clamp(max=3)
    return x, y
