"""What codecs make of real updates: how long, how wrong, how fast; beside raw and zstd.

    python benchmarks/codec.py                       # about a minute
    python benchmarks/codec.py --nets C.8 --repeats 9

Updates of C.3 and C.8 (specification §C) are those of a third training round: one device, one epoch
over some images of CIFAR-10 where that is on this machine, else over random ones.

"over bound" is the whole message with its headers over what no code of its kind goes below: the
zero-order entropy of the quantisation levels, a bit for every sign that travels apart, and
log2 C(K, k) for which k of K units are kept. "with scales" counts the scales (32 bits each) into
the bound, too. "sent" is the sent fraction. Seconds are those of the processor on one thread, the
quickest of some repetitions: from tensors to bytes (`compress` and `pack`), and back (`unpack` and
`restore`), over the megabytes of the update as 32-bit floats.
"""

import argparse
import math
import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
import zstandard
from torch import nn

from anyfleet import rng
from anyfleet.core.calibration import sample_update
from anyfleet.core.layout import MessageLayout, Symbols, tensor_layouts
from anyfleet.core.loop import run
from anyfleet.core.messages import Params
from anyfleet.core.slots import Codec
from anyfleet.elastic import WHOLE
from anyfleet.errors import MissingData
from anyfleet.formulas.reference.compression import entropy_bits
from anyfleet.methods import fedavg
from anyfleet.names import Factory
from anyfleet.parts.codec import ErrorFeedback, Fgc, Hq, Qsgd, Quantiser, Raw, Stc, TopK, Uveq
from anyfleet.parts.codec.bitstream import SymbolFormat
from anyfleet.runtime import Simulated
from anyfleet.tasks import Cifar10, Data, Split, Task, zoo
from anyfleet.tasks.data_loading import fresh_model
from anyfleet.world import Fleet

NETS: Mapping[str, Callable[..., nn.Module]] = {"C.3": zoo.cnn_cifar, "C.8": zoo.vgg9}


@dataclass(frozen=True)
class Case:
    """A codec at a sent fraction; NaN where it decides by itself how much it sends."""

    codec: Codec
    asked: float = math.nan
    form: SymbolFormat | None = None  # of its symbols, if it has some

    def __str__(self) -> str:
        shown = repr(self.codec).replace("table=()", "").replace(", then=Plain()", "")
        return shown if math.isnan(self.asked) else f"{shown} at 1/{1 / self.asked:.0f}"


def quantiser(codec: Quantiser, asked: float = math.nan) -> Case:
    """Return the case of a codec that quantises, with the format of its symbols."""
    return Case(codec, asked, codec.symbol_format)


CASES = (
    Case(Raw()),
    Case(Raw("fp16")),
    Case(Raw("bf16")),
    quantiser(Fgc(), 1 / 15),
    quantiser(Fgc(), 1 / 40),
    quantiser(Stc()),
    Case(ErrorFeedback(Stc()), form=Stc().symbol_format),
    quantiser(TopK()),
    quantiser(Qsgd()),
    quantiser(TopK(0.15, Qsgd())),
    quantiser(Uveq()),
    quantiser(Uveq(dimension=1)),
    quantiser(TopK(0.15, Uveq()), 1 / 40),
    quantiser(Hq(), 1 / 33),
)
GOAL_BOUND, GOAL_SPEED, MANY = 1.02, 100.0, 100_000
SAMPLES, ROUNDS = 500, 3  # of the device; the update is that of the last round


@dataclass(frozen=True)
class Row:
    """One codec on one update."""

    codec: str
    sent_fraction: float  # bytes over those of 32-bit floats
    error: float  # squared, over the squared norm
    symbols: int  # quantisation levels that were coded
    bound: float  # bytes over the bound; NaN without one
    scaled: float  # bytes over the bound with scales
    encode: float  # MB/s
    decode: float


def trained(task: Task, rounds: int = 1, seed: int = 0) -> dict[str, torch.Tensor]:
    """Return the update of the last of some rounds with one device, as a stack of one."""
    world = Fleet().build(np.array([task.size(0)]), seed)
    method = fedavg(count=1, lr=0.05, batch_size=20)
    made = islice(run(method, task, Simulated(task, world), seed), rounds)
    before, after = [task.params, *(each.params for each in made)][-2:]
    return {name: (after[name] - value)[None] for name, value in before.items()}


def task_of(net: str, samples: int) -> tuple[Task, str]:
    """Return a task of one device with real images, or with random ones; and which."""
    make, split = Factory.of(NETS[net]), Split(devices=1, test_share=0.0, server=100)
    try:
        spec = Cifar10(model=make, devices=1, test_share=0.0, server=100, limit=samples + 100)
        return spec.build(0), "CIFAR-10"
    except MissingData:
        count = samples + 100
        images = rng.normal(rng.root(0, "images"), count * 3 * 32 * 32).float()
        data = Data(images.view(count, 3, 32, 32), torch.arange(count) % 10)
        return Task.of(fresh_model(make, 0), data, data, split=split), "random images"


def around(task: Task) -> MessageLayout:
    """Return the layout of a message with an update of the whole model."""
    whole = tensor_layouts(tuple(task.params), WHOLE, (1, 1.0), task.blueprint)
    return MessageLayout(whole, torch.float32, rng.root(0, "uplink")[None])


def measured(case: Case, update: Params, layout: MessageLayout, repeats: int) -> Row:
    """Measure one codec on one update."""
    codec, sent_fraction = case.codec, torch.tensor([case.asked])
    raw = 4 * sum(value.numel() for value in update.values())

    def encode() -> tuple[bytes, ...]:
        return codec.pack(codec.compress(update, sent_fraction, layout, {}).symbols, layout)

    compressed, message = codec.compress(update, sent_fraction, layout, {}), encode()
    size, least = sum(map(len, message)), bound(case.form, compressed.symbols, layout)
    return Row(
        codec=str(case),
        sent_fraction=size / raw,
        error=float(compressed.distortion[0]),
        symbols=least.symbols,
        bound=8 * size / least.bits if least.bits else math.nan,
        scaled=8 * size / (least.bits + least.scales) if least.bits else math.nan,
        encode=raw / 1e6 / quickest(encode, repeats),
        decode=raw / 1e6 / quickest(lambda: restored(codec, message, layout), repeats),
    )


def restored(codec: Codec, message: Sequence[bytes], layout: MessageLayout) -> Any:
    """Return the update that a receiver makes of a message."""
    return codec.restore(codec.unpack(message, layout), layout)


def zstd(update: Params, repeats: int) -> Row:
    """Measure a general compressor on the bytes of the floats."""
    raw = b"".join(value.numpy().tobytes() for value in update.values())
    coder, decoder = zstandard.ZstdCompressor(), zstandard.ZstdDecompressor()
    small, size = coder.compress(raw), len(raw) / 1e6
    encode = size / quickest(lambda: coder.compress(raw), repeats)
    decode = size / quickest(lambda: decoder.decompress(small), repeats)
    sent, none = len(small) / len(raw), math.nan
    return Row("zstd, level 3", sent, 0.0, 0, bound=none, scaled=none, encode=encode, decode=decode)


class Bound(NamedTuple):
    """Bits that a message of these symbols needs at least."""

    bits: float = 0.0
    scales: float = 0.0
    symbols: int = 0


def bound(form: SymbolFormat | None, symbols: Symbols, layout: MessageLayout) -> Bound:
    """Return the bits that no code of this format goes below; 0 without a format."""
    if form is None:
        return Bound()
    trees = symbols.numbers if form.numbers else symbols.quantisation_levels
    kept = {
        name: flags[0].repeat_interleave(form.unit(layout.tensors[name]))
        for name, flags in symbols.kept.items()
    }
    coded = [rows[0][kept[name]] if name in kept else rows[0] for name, rows in trees.items()]
    every = torch.cat(coded).numpy()
    bits = chosen_bits([flags[0] for flags in symbols.kept.values()])
    if form.numbers:
        bits += 32.0 * len(every)
    elif form.signs == "within":
        bits += entropy_bits(every)
    else:
        bits += entropy_bits(abs(every)) + np.count_nonzero(every)
    scales = 32.0 * sum(rows.numel() for rows in symbols.scales.values())
    return Bound(bits, scales, len(every))


def chosen_bits(flags: Sequence[torch.Tensor]) -> float:
    """Return log2 C(K, k): the bits that say which units of a message are kept."""
    units, kept = sum(map(len, flags)), sum(int(each.sum()) for each in flags)
    nats = math.lgamma(units + 1) - math.lgamma(kept + 1) - math.lgamma(units - kept + 1)
    return nats / math.log(2)


def quickest(work: Callable[[], Any], repeats: int) -> float:
    """Return the processor seconds of the quickest of so many repetitions."""
    found = []
    for _ in range(repeats):
        begin = time.process_time()
        work()
        found.append(time.process_time() - begin)
    return max(min(found), 1e-9)


def rows(task: Task, repeats: int, rounds: int = 1) -> Iterator[Row]:
    """Yield a row for each codec on one update; codecs that calibrate see one of the server."""
    layout = around(task)
    update = layout.flattened(trained(task, rounds))
    seen = layout.flattened(
        sample_update(fedavg(lr=0.05, batch_size=20).job(), task, rng.root(0, "calibration"))
    )
    yield zstd(update, repeats)
    for case in CASES:
        ready = case.codec.calibrated(seen, layout) if case.codec.calibrates else case.codec
        row = measured(replace(case, codec=ready), update, layout, repeats)
        yield replace(row, codec=str(case))


def shown(found: Sequence[Row]) -> Iterator[str]:
    """Yield the lines of the table."""
    wide = max(len(row.codec) for row in found)
    yield (
        f"  {'codec':{wide}} {'sent':>8} {'error':>8} {'symbols':>9} {'over bound':>11} "
        f"{'with scales':>11} {'encode MB/s':>12} {'decode MB/s':>12}"
    )
    for row in found:
        bare, scaled = (over(ratio, row.symbols) for ratio in (row.bound, row.scaled))
        encode, decode = (
            f"{speed:>11.0f}{' ' if speed >= GOAL_SPEED else '!'}"
            for speed in (row.encode, row.decode)
        )
        yield (
            f"  {row.codec:{wide}} {row.sent_fraction:>8.4f} {row.error:>8.4f} "
            f"{row.symbols:>9} {bare} {scaled} {encode} {decode}"
        )


def over(ratio: float, symbols: int) -> str:
    """Return by how much a message is over its bound, marked where that misses the goal."""
    if math.isnan(ratio):
        return f"{'':>11}"
    return f"{ratio - 1:>+10.2%}{'!' if ratio > GOAL_BOUND and symbols >= MANY else ' '}"


def summary(found: Sequence[Row]) -> str:
    """Return how many rows reach the goals."""
    long = [row for row in found if row.symbols >= MANY]
    bare, scaled = (
        sum(getattr(row, name) <= GOAL_BOUND for row in long) for name in ("bound", "scaled")
    )
    there, back = (
        sum(getattr(row, name) >= GOAL_SPEED for row in found) for name in ("encode", "decode")
    )
    return (
        f"goals: of {len(long)} messages with {MANY:,} symbols or more, {bare} are at most "
        f"{GOAL_BOUND - 1:.0%} over the bound, {scaled} over the bound with scales; of "
        f"{len(found)} rows {there} encode and {back} decode at least {GOAL_SPEED:.0f} MB/s "
        "(! misses it)"
    )


def machine() -> str:
    """Return what the numbers were measured on."""
    libraries = ", ".join(f"{name} {version(name)}" for name in ("torch", "numpy", "constriction"))
    return (
        f"{platform.machine()}, {os.cpu_count()} cores of which one is used, Python "
        f"{platform.python_version()}, {libraries}, zstandard {zstandard.__version__}"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure every codec on updates of the named nets, and print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--nets", nargs="+", choices=NETS, default=list(NETS))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--samples", type=int, default=SAMPLES)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    print(machine())
    everything: list[Row] = []
    for net in given.nets:
        task, data = task_of(net, given.samples)
        entries = sum(value.numel() for value in task.params.values())
        what = f"round {given.rounds} on {given.samples} samples of {data}"
        print(f"\n{net}, {entries:,} entries, {what}", flush=True)
        found = list(rows(task, given.repeats, given.rounds))
        print("\n".join(shown(found)), flush=True)
        everything += found
    print(f"\n{summary(everything)}")


if __name__ == "__main__":
    main()
