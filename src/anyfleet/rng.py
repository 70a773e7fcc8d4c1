"""Random numbers with addresses: each has a name, never a position in a sequence.

A key is an int64 tensor (0-d, or batched under `vmap`). The numbers come from a counter-based hash,
so they depend only on the key and the index: not on the order of events, the batch or the runtime.
"""

import hashlib
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch._C import _functorch, _len_torch_dispatch_stack

# Multipliers of the splitmix64 finaliser, written as signed 64-bit integers.
_GOLDEN = -0x61C8864680B583EB
_MIX_A = -0x40A7B892E31B1A47
_MIX_B = -0x6B2FB644ECCEEE15
# Arithmetic shifts copy the sign bit; these masks keep what a logical shift would have kept.
_LOW_34, _LOW_37, _LOW_33 = (1 << 34) - 1, (1 << 37) - 1, (1 << 33) - 1
_LAST = 1 << 62
_WRAP = 1 << 64  # makes a negative multiplier the unsigned one with the same bits
# As numbers of NumPy: to make them takes as long as to hash a few keys.
_ONE, _GOLDEN_BITS = np.uint64(1), np.uint64(_GOLDEN + _WRAP)
_ROUNDS = (
    (np.uint64(30), np.uint64(_MIX_A + _WRAP)),
    (np.uint64(27), np.uint64(_MIX_B + _WRAP)),
    (np.uint64(31), None),
)
_BLOCK = 8192
_SMALL = 4096  # up to here shuffling everything costs no more than drawing some
_CHUNK = 512


def _mix(z: Tensor) -> Tensor:
    z = (z ^ ((z >> 30) & _LOW_34)) * _MIX_A
    z = (z ^ ((z >> 27) & _LOW_37)) * _MIX_B
    return z ^ ((z >> 31) & _LOW_33)


@lru_cache(maxsize=4096)
def number_of(text: str) -> int:
    """Return the number that stands for a text in `fold`."""
    digest = hashlib.sha256(text.encode()).digest()
    return int.from_bytes(digest[:8], "little", signed=True)


def root(seed: int, purpose: str, *below: int) -> Tensor:
    """Return the key of one purpose ("select", "train" …) in one run, or of an address below it."""
    key = number_of(f"{seed}/{purpose}")
    for number in below:
        key = _folded(key, number)
    return torch.tensor(key)


def fold(key: Tensor, value: int | str | Tensor) -> Tensor:
    """Return a new key, addressed by `value` below `key`; either of them may be batched."""
    number = number_of(value) if isinstance(value, str) else value
    if _on_host(key) and (isinstance(number, int) or (type(number) is Tensor and number.is_cpu)):
        return _folded_on_host(key, number)
    # A scalar is an argument of the kernel; a tensor made of it would be copied to the device.
    step = _signed((number + 1) * _GOLDEN) if isinstance(number, int) else (number + 1) * _GOLDEN
    return _mix((key ^ _mix(key + _GOLDEN)) + step)


def _on_host(key: Tensor) -> bool:
    """Return whether a key is a plain tensor on the CPU: neither mapped, traced nor faked."""
    return (
        type(key) is Tensor
        and key.is_cpu
        and _functorch.peek_interpreter_stack() is None
        and not _len_torch_dispatch_stack()
    )


def _folded_on_host(key: Tensor, value: int | Tensor) -> Tensor:
    """Return the new key in a fraction of the time: a call of torch takes longer than the hash."""
    if key.ndim == 0:
        own = int(key.item())
        if isinstance(value, int):
            return torch.tensor(_folded(own, value))
        mixed = own ^ _mixed(own + _GOLDEN)
        state = (np.atleast_1d(_unsigned(value)) + _ONE) * _GOLDEN_BITS + np.uint64(mixed % _WRAP)
    else:
        keys = _unsigned(key)
        state = _hashed(keys + _GOLDEN_BITS) ^ keys
        if isinstance(value, int):
            state += np.uint64((value + 1) * _GOLDEN % _WRAP)
        else:
            state = state + (np.atleast_1d(_unsigned(value)) + _ONE) * _GOLDEN_BITS
    found = torch.from_numpy(_hashed(state).view(np.int64))
    return found[0] if key.ndim == 0 and isinstance(value, Tensor) and value.ndim == 0 else found


def _folded(key: int, value: int) -> int:
    """Return the number of the new key, where both are Python integers."""
    return _signed(_mixed((key ^ _mixed(key + _GOLDEN)) + (value + 1) * _GOLDEN))


def _signed(number: int) -> int:
    """Return the signed 64-bit integer with the same last bits."""
    return (number + _WRAP // 2) % _WRAP - _WRAP // 2


def _mixed(number: int) -> int:
    """Return `_mix` of the last 64 bits of a Python integer, unsigned."""
    z = number % _WRAP
    z = (z ^ (z >> 30)) * _MIX_A % _WRAP
    z = (z ^ (z >> 27)) * _MIX_B % _WRAP
    return z ^ (z >> 31)


def bits(key: Tensor, count: int) -> Tensor:
    """Return `count` hashed 64-bit integers."""
    if _on_host(key):
        steps = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(_GOLDEN + _WRAP)
        return torch.from_numpy(_hashed(_unsigned(key)[..., None] + steps).view(np.int64))
    index = torch.arange(count, dtype=torch.int64, device=key.device)
    # ~i is -(i + 1). A compiler that knew the product for a multiple of the index would write it
    # with 32 bits.
    return _mix(key.unsqueeze(-1) + ~index * -_GOLDEN)


def uniform(key: Tensor, count: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return `count` numbers in [0, 1)."""
    if _on_host(key):
        return uniforms(key.reshape(-1), count, dtype).view(*key.shape, count)
    return _fraction(bits(key, count), dtype)


def uniforms(key: Tensor, count: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return the numbers of `uniform` for many keys, [keys, count]; faster, but not for `vmap`."""
    if key.device.type != "cpu":
        return _fraction(bits(key, count), dtype)
    keys, block = _unsigned(key)[:, None], max(1, _BLOCK // max(1, len(key)))
    found = np.empty((len(key), count), np.float32 if dtype == torch.float32 else np.float64)
    for begin in range(0, count, block):
        index = np.arange(begin + 1, min(count, begin + block) + 1, dtype=np.uint64)
        _finish(keys + index * np.uint64(_GOLDEN + _WRAP), found[:, begin : begin + block])
    return torch.from_numpy(found).to(dtype)


def uniforms_at(key: Tensor, index: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return for every key the number of `uniform` at the index beside it; not for `vmap`."""
    if key.device.type != "cpu":
        return _fraction(_mix(key + (index + 1) * _GOLDEN), dtype)
    keys, places = _unsigned(key), _unsigned(index)
    found = np.empty(len(keys), np.float32 if dtype == torch.float32 else np.float64)
    for begin in range(0, len(keys), _BLOCK):
        part = slice(begin, begin + _BLOCK)
        state = (places[part] + np.uint64(1)) * np.uint64(_GOLDEN + _WRAP)
        _finish(state + keys[part], found[part])
    return torch.from_numpy(found).to(dtype)


def _unsigned(numbers: Tensor) -> NDArray[np.uint64]:
    """Return the same bits as unsigned integers, which need no mask when they are shifted."""
    plain: NDArray[np.uint64] = numbers.contiguous().numpy().view(np.uint64)
    return plain


def _finish(state: NDArray[np.uint64], found: NDArray[Any]) -> None:
    """Hash a block that fits the processor's cache and write it as fractions, both in place."""
    _hashed(state)
    digits = 24 if found.dtype == np.float32 else 53
    np.right_shift(state, np.uint64(64 - digits), out=state)
    np.multiply(state, 2.0**-digits, out=found, casting="unsafe")


def _hashed(state: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return `_mix` of unsigned integers, written over them."""
    turned = np.empty_like(state)
    for shift, factor in _ROUNDS:
        np.right_shift(state, shift, out=turned)
        np.bitwise_xor(state, turned, out=state)
        if factor is not None:
            np.multiply(state, factor, out=state)
    return state


def _fraction(raw: Tensor, dtype: torch.dtype) -> Tensor:
    # 24 bits for float32 so that rounding can never produce 1.0.
    digits = 24 if dtype == torch.float32 else 53
    return ((raw >> (64 - digits)) & ((1 << digits) - 1)).to(dtype) * 2.0**-digits


def normal(key: Tensor, count: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return `count` standard normal numbers."""
    # Shifted by half a step: the inverse error function is infinite at the ends. The last step has
    # no half in float64 and would round to 1.
    halfway = (uniform(key, count) + 2.0**-54).clamp(max=1 - 2.0**-53)
    return (torch.erfinv(2 * halfway - 1) * 2**0.5).to(dtype)


def permutation(key: Tensor, valid: Tensor) -> Tensor:
    """Return the positions where `valid` in random order; the others follow.

    The order of the valid positions does not depend on how many others there are.
    """
    draw = (bits(key, valid.shape[-1]) >> 2) & (_LAST - 1)
    return torch.argsort(torch.where(valid, draw, _LAST), dim=-1, stable=True)


def draws(key: Tensor, size: int) -> Iterator[Tensor]:
    """Yield all numbers below `size`, each once, in random order, in chunks that double.

    The first few cost the same whatever the size. `key` is a single one.
    """
    if size <= _SMALL:
        yield _ranked(bits(key, size))
        return
    # Even draws without their repetitions come in a uniformly random order. Which draws repeat
    # says nothing about the numbers, so it may decide when to shuffle the rest instead.
    seen = torch.empty(0, dtype=torch.int64, device=key.device)
    chunk = _CHUNK
    while 2 * len(seen) < size:
        drawn = _first(_below(fold(key, chunk), size, chunk))
        drawn = drawn[~torch.isin(drawn, seen)]
        seen = torch.cat([seen, drawn])
        chunk *= 2
        yield drawn
    left = torch.ones(size, dtype=torch.bool, device=key.device)
    left[seen] = False
    rest = left.nonzero()[:, 0]
    yield rest[_ranked(bits(fold(key, "rest"), len(rest)))]


def _ranked(values: Tensor) -> Tensor:
    """Return the places of values in ascending order; of equal ones the first comes first."""
    if not values.is_cpu:
        return torch.argsort(values, stable=True)
    return torch.from_numpy(values.numpy().argsort(kind="stable"))


def sample(key: Tensor, population: int, count: int) -> Tensor:
    """Return `count` distinct numbers below `population`, ascending."""
    taken: list[Tensor] = []
    for chunk in draws(key, population):
        taken.append(chunk[: count - sum(map(len, taken))])
        if len(taken[-1]) < len(chunk):
            break
    return torch.cat(taken).sort().values


def _below(key: Tensor, size: int, count: int) -> Tensor:
    """Return `count` whole numbers below `size`, rarely fewer."""
    raw = (bits(key, count) >> 2) & (_LAST - 1)
    # The last, incomplete multiple of `size` would favour small numbers.
    return raw[raw < _LAST - _LAST % size] % size


def _first(values: Tensor) -> Tensor:
    """Return the values without repetitions, in the order in which they came first."""
    ordered, where = values.sort(stable=True)
    new = torch.ones_like(values, dtype=torch.bool)
    new[where[1:]] = ordered[1:] != ordered[:-1]
    return values[new]
