"""Kernels on a grid: what is kept, how it is rounded, and that it fits (specification §1.12.2)."""

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from anyfleet import config, rng
from anyfleet.core.calibration import SAMPLES, calibrated, sample_update
from anyfleet.core.layout import MessageLayout, Symbols, TensorLayout
from anyfleet.core.loop import run
from anyfleet.core.messages import Params
from anyfleet.core.method import Method
from anyfleet.core.plans import Plans
from anyfleet.core.server import Server
from anyfleet.core.view import View
from anyfleet.errors import BadMessage
from anyfleet.formulas import anycost_channel_order
from anyfleet.formulas.reference import (
    AnycostMagnitudes,
    anycost_analytic_compression,
    anycost_grid,
    anycost_grid_levels,
    anycost_grid_values,
    anycost_magnitudes,
)
from anyfleet.methods import fedavg
from anyfleet.parts import codec
from anyfleet.parts.codec import Fgc
from anyfleet.parts.codec.bitstream import Column, pack
from anyfleet.parts.codec.fgc import MOST_LEVELS
from anyfleet.parts.codec.kernels import Kernels
from anyfleet.parts.codec.lookup import LEVELS, SENT_FRACTIONS, count_of, estimated, looked_up
from anyfleet.parts.codec.ranking import largest
from anyfleet.parts.plan import WholeModel
from anyfleet.runtime import Sequential, Simulated, Stacked, Threads
from anyfleet.tasks import Split, Task
from tests.helpers import small

SHARES = np.geomspace(1e-4, 1.0, 90)  # of which the look-up thinks
SHAPES = {"conv": (16, 8, 3, 3), "matrix": (40, 30), "bias": (7,), "nothing": (0, 4)}


def message_layout(shapes: Mapping[str, tuple[int, ...]] = SHAPES, rows: int = 1) -> MessageLayout:
    layouts = {name: TensorLayout(shape, (math.prod(shape),)) for name, shape in shapes.items()}
    return MessageLayout(layouts, torch.float32, rng.fold(rng.root(1, "fgc"), torch.arange(rows)))


def update(around: MessageLayout, rows: int = 1, seed: int = 0) -> dict[str, Tensor]:
    """Kernels of unequal strength, stacked."""
    found = {}
    for name, tensor_layout in around.tensors.items():
        key = rng.fold(rng.fold(rng.root(seed, "update"), name), torch.arange(rows))
        strength = rng.normal(
            rng.fold(key, "strength"), tensor_layout.entries // tensor_layout.unit
        ).exp()
        entries = rng.normal(key, tensor_layout.entries) * strength.repeat_interleave(
            tensor_layout.unit, dim=1
        )
        found[name] = entries.float().view(rows, *tensor_layout.shape)
    return found


def alone(values: list[float], rows: int = 1, unit: int = 1) -> Kernels:
    """One tensor of kernels of equal size, the same in every row."""
    shape = (len(values) // unit, 1, unit) if unit > 1 else (len(values),)
    around = message_layout({"only": shape}, rows)
    return Kernels({"only": torch.tensor(values).expand(rows, -1)}, around)


def at(kernels: Kernels, count: int, levels: int) -> tuple[Symbols, Tensor]:
    """Symbols of the only tensor with so many kernels, and what they mean."""
    rows = kernels.devices
    symbols = kernels.quantised(torch.full((rows,), count), torch.full((rows,), levels))
    return symbols, Fgc().dequantise(symbols, kernels.layout)["only"]


# --- the examples of the section --------------------------------------------------------------


def test_1_12_2_a_value_between_two_places_is_drawn_so_that_the_mean_is_exact() -> None:
    rows = 2_000
    symbols, values = at(alone([0.1, -0.5, 0.25], rows), 3, 2)
    assert set(map(tuple, symbols.quantisation_levels["only"][:, :2].tolist())) == {(1, -3)}
    assert torch.equal(values[:, :2], torch.tensor([0.1, -0.5]).expand(rows, -1))
    assert sorted(set(values[:, 2].tolist())) == pytest.approx([0.1, 0.3])
    lower = float((values[:, 2] < 0.2).float().mean())
    # Five standard deviations of a share of so many draws.
    assert lower == pytest.approx(0.25, abs=5 * math.sqrt(0.25 * 0.75 / rows))
    assert anycost_grid(AnycostMagnitudes(0.1, 0.5), 2) == pytest.approx([0.1, 0.3, 0.5])


def test_1_12_2_half_of_the_kernels_are_those_from_norm_2_on() -> None:
    norms = torch.tensor([[3.0, 1.0, 2.0, 0.5]])
    count = count_of(torch.tensor([0.5]), 4)
    assert largest(norms, count).tolist() == [[True, False, True, False]]
    values = [each * part for each in norms[0].tolist() for part in (0.6, 0.0, -0.8)]
    symbols, _ = at(alone(values, unit=3), 2, 8)
    assert symbols.kept["only"].tolist() == [[True, False, True, False]]


# --- against the plain formulas ---------------------------------------------------------------


def test_kernels_levels_and_values_are_those_of_the_formulas() -> None:
    around, rows = message_layout(rows=3), 3
    laid = around.flattened(update(around, rows))
    kernels = Kernels(laid, around)
    counts, levels = torch.tensor([40, 700, 1335]), torch.tensor([1, 6, 64])
    symbols = kernels.quantised(counts, levels)
    values = Fgc().dequantise(symbols, around)
    draws = rng.uniform(around.key, around.entries, torch.float32).numpy()
    for row in range(rows):
        every = torch.cat([units[row].flatten() for units in laid.values()]).double().numpy()
        norms = np.concatenate(
            [units[row].double().norm(dim=1).numpy() for units in kernels.units.values()]
        )
        wide = np.concatenate([[u.shape[2]] * u.shape[1] for u in kernels.units.values()])
        flags = np.zeros(len(norms), dtype=bool)
        flags[anycost_channel_order(norms)[: int(counts[row])]] = True
        assert torch.cat(list(symbols.kept.values()), dim=1)[row].tolist() == flags.tolist()
        kept = every * np.repeat(flags, wide.astype(int))
        ends, steps = anycost_magnitudes(kept), int(levels[row])
        assert symbols.scales["conv"][row].tolist() == pytest.approx([*ends, steps])
        place = anycost_grid_levels(kept, ends, steps, draws[row])
        found = torch.cat([symbols.quantisation_levels[name] for name in laid], dim=1)[row].numpy()
        assert np.array_equal(found, np.sign(kept) * (place + 1))
        meant = anycost_grid_values(place, kept, ends, steps)
        sent = torch.cat([values[name] for name in laid], dim=1)[row].numpy()
        assert sent == pytest.approx(meant, rel=1e-5, abs=1e-7)


@settings(max_examples=60)
@given(
    st.lists(st.sampled_from([0.0, 1e-40, 0.5, 1.0, 2.5, 7.0, 1e30]), min_size=1, max_size=40),
    st.integers(0, 42),
)
def test_the_strongest_are_so_many_and_ties_go_to_the_lower_index(
    norms: list[float], count: int
) -> None:
    flags = largest(torch.tensor([norms, norms[::-1]]), torch.tensor([count, len(norms)]))
    first = anycost_channel_order(np.array(norms))[:count]
    assert flags[0].nonzero()[:, 0].tolist() == sorted(first.tolist())
    assert flags[1].all()
    nothing = largest(torch.tensor([norms, norms]), torch.tensor([0, count]))
    assert not nothing[0].any()
    assert torch.equal(nothing[1], flags[0])


# --- properties -------------------------------------------------------------------------------


def test_the_mean_over_draws_is_the_update_on_kernels_that_are_kept() -> None:
    rows = 2_000
    around = message_layout({"only": (6, 2, 2, 2)}, rows)
    one = update(message_layout({"only": (6, 2, 2, 2)}))["only"].flatten(1)
    symbols, values = at(Kernels({"only": one.expand(rows, -1)}, around), 7, 3)
    kept = symbols.kept["only"][0].repeat_interleave(4)
    low, high, _ = symbols.scales["only"][0].tolist()
    # A draw between two places has at most half a step of standard deviation.
    tolerance = 5 * (high - low) / 3 / 2 / math.sqrt(rows)
    assert float((values.mean(dim=0) - one[0])[kept].abs().max()) < tolerance
    assert not values[:, ~kept].any()
    assert int(kept.sum()) == 28


def test_a_row_does_not_depend_on_the_stack_it_is_in() -> None:
    around, rates = message_layout(rows=4), torch.tensor([0.02, 0.1, 0.5, 1.0])
    tree = update(around, 4)
    tree["conv"][2] *= 100
    together = Fgc().compress(around.flattened(tree), rates, around, {})
    for row in range(4):
        own = replace(around, key=around.key[row : row + 1])
        mine = {name: rows[row : row + 1] for name, rows in tree.items()}
        single = Fgc().compress(around.flattened(mine), rates[row : row + 1], own, {})
        assert torch.equal(single.bits, together.bits[row : row + 1])
        assert small.identical(
            single.received, {n: v[row : row + 1] for n, v in together.received.items()}
        )
        assert small.identical(single.kept, {n: v[row : row + 1] for n, v in together.kept.items()})


def test_bytes_are_what_was_squeezed() -> None:
    around = message_layout()
    squeezed = Fgc().compress(around.flattened(update(around)), torch.tensor([0.2]), around, {})
    columns = Fgc().pack(squeezed.symbols, around)
    tree, kept = Fgc().restore(Fgc().unpack(columns, around), around)
    assert small.identical(tree, squeezed.received)
    assert small.identical(kept, squeezed.kept)
    assert 0 < float(squeezed.distortion[0]) < 1


def packed_bits(squeezed: Symbols, around: MessageLayout) -> int:
    return 8 * sum(map(len, Fgc().pack(squeezed, around)))


@settings(max_examples=40)
@given(
    st.lists(st.tuples(st.integers(0, 12), st.integers(1, 12), st.integers(1, 3)), max_size=4),
    st.floats(1e-3, 1.5),
    st.integers(0, 9),
)
def test_a_message_is_never_longer_than_its_rate_allows(
    sizes: list[tuple[int, int, int]], rate: float, seed: int
) -> None:
    shapes = {str(i): (a, b, k, k) if k > 1 else (a, b) for i, (a, b, k) in enumerate(sizes)}
    around = message_layout(shapes)
    squeezed = Fgc().compress(
        around.flattened(update(around, seed=seed)), torch.tensor([rate]), around, {}
    )
    entries = sum(tensor_layout.entries for tensor_layout in around.tensors.values())
    something = any(flags.any() for flags in squeezed.symbols.kept.values())
    assert packed_bits(squeezed.symbols, around) <= min(rate, 1) * 32 * entries or not something


def test_a_message_that_must_shrink_keeps_as_many_kernels_as_fit_nearly() -> None:
    around = message_layout({"conv": (64, 32, 3, 3)})
    greedy = Fgc(table=((1e-3, 1.0, 64),))
    for rate in (0.005, 0.02, 0.05, 0.1):
        squeezed = greedy.compress(
            around.flattened(update(around)), torch.tensor([rate]), around, {}
        )
        budget = rate * 32 * 64 * 32 * 9
        assert 0.9 * budget < packed_bits(squeezed.symbols, around) <= budget


# --- edge cases -------------------------------------------------------------------------------


def squeezed(
    values: Params, rate: float = math.nan, table: tuple[float, int] = (1.0, 8)
) -> Symbols:
    shapes = {name: tuple(rows.shape[1:]) for name, rows in values.items()}
    around = message_layout(shapes, len(next(iter(values.values()))))
    rates = torch.full((len(around.key),), rate)
    return Fgc(((1.0, *table),)).compress(around.flattened(values), rates, around, {}).symbols


def test_an_update_of_zeros_is_a_header_without_kernels() -> None:
    symbols = squeezed({"matrix": torch.zeros(1, 30, 40), "bias": torch.zeros(1, 9)})
    assert not any(flags.any() for flags in symbols.kept.values())
    assert symbols.scales["matrix"].tolist() == [[0.0, 0.0, 8.0]]
    around = message_layout({"matrix": (30, 40), "bias": (9,)})
    assert packed_bits(symbols, around) < 1000
    tree, _ = Fgc().restore(Fgc().unpack(Fgc().pack(symbols, around), around), around)
    assert not any(rows.any() for rows in tree.values())


@pytest.mark.parametrize("values", [[0.0, 0.0, -3.0, 0.0], [3.0, -3.0, 3.0, 3.0]])
def test_a_grid_without_extent_has_one_place(values: list[float]) -> None:
    symbols, meant = at(alone(values, rows=5), 4, 8)
    assert torch.equal(meant, torch.tensor(values).expand(5, -1))
    assert torch.equal(
        symbols.quantisation_levels["only"], torch.tensor(values).sign().int().expand(5, -1)
    )


def test_zeros_inside_a_kept_kernel_stay_zero() -> None:
    symbols, meant = at(alone([1.0, 0.0, -2.0, 0.0, 0.0, 0.1], unit=3), 1, 4)
    assert symbols.kept["only"].tolist() == [[True, False]]
    assert meant[0, [0, 2]].tolist() == [1.0, -2.0]
    assert not meant[0, [1, 3, 4, 5]].any()


def test_a_share_below_one_kernel_is_one_kernel() -> None:
    many = update(message_layout({"matrix": (60, 60)}))
    symbols = squeezed(many, table=(1e-9, 4))
    assert int(symbols.kept["matrix"].sum()) == 1
    biggest = many["matrix"].abs().max()
    assert symbols.scales["matrix"][0, :2].tolist() == [float(biggest)] * 2


def test_a_budget_that_not_even_one_kernel_fits_sends_none() -> None:
    symbols = squeezed(update(message_layout({"matrix": (60, 60)})), rate=1e-6)
    assert not symbols.kept["matrix"].any()
    assert not symbols.quantisation_levels["matrix"].any()


def test_all_that_can_be_sent_is_not_what_the_codec_likes() -> None:
    """1 asks for as much as possible, NaN for nothing: then the codec decides."""
    tree, codec = update(message_layout({"matrix": (60, 60)})), Fgc(sent_fraction=0.05)
    around = message_layout({"matrix": (60, 60)}, rows=2)
    rows = {"matrix": tree["matrix"].flatten(1).expand(2, -1)}
    found = codec.compress(rows, torch.tensor([1.0, math.nan]), around, {})
    assert float(found.bits[0].sum()) > 0.1 * 32 * 3600
    assert 0 < float(found.bits[1].sum()) <= 0.05 * 32 * 3600


@pytest.mark.parametrize("rate", [0.0, -1.0])
def test_no_rate_at_all_sends_nothing(rate: float) -> None:
    symbols = squeezed(update(message_layout({"matrix": (60, 60)})), rate)
    assert not symbols.kept["matrix"].any()


def test_rates_above_one_are_as_one() -> None:
    tree = update(message_layout({"matrix": (60, 60)}))
    more, one = squeezed(tree, 7.0), squeezed(tree, 1.0)
    assert torch.equal(more.quantisation_levels["matrix"], one.quantisation_levels["matrix"])
    assert one.kept["matrix"].all()


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_what_is_no_number_arrives_as_such_and_leaves_other_rows_alone(wrong: float) -> None:
    around = message_layout(rows=2)
    tree = update(around, 2)
    well = Fgc().compress(around.flattened(tree), torch.full((2,), 0.2), around, {})
    tree["matrix"][0, 3, 4] = wrong
    ill = Fgc().compress(around.flattened(tree), torch.full((2,), 0.2), around, {})
    assert not all(rows[0].isfinite().all() for rows in ill.received.values())
    assert small.identical(
        {n: v[1] for n, v in ill.received.items()}, {n: v[1] for n, v in well.received.items()}
    )


def test_a_stream_that_is_cut_decodes_to_its_columns() -> None:
    layouts = {
        "conv": TensorLayout((4, 2, 3, 3), (18, 45, 72)),
        "bias": TensorLayout((6,), (2, 4, 6)),
    }
    around = MessageLayout(layouts, torch.float32, torch.tensor([7]))
    tree = {"conv": torch.arange(1.0, 73).view(1, 4, 2, 3, 3), "bias": torch.ones(1, 6)}
    wide = Fgc(((1.0, 1.0, 64),))
    symbols = Kernels(around.flattened(tree), around).quantised(
        torch.tensor([14]), torch.tensor([64])
    )
    columns = wide.pack(symbols, around)
    assert len(columns) == 3
    got, kept = wide.restore(wide.unpack(columns[:2], around), around)
    want, flags = wide.restore(symbols.leading(2), around)
    assert small.identical(got, want)
    assert small.identical(kept, flags)
    assert got["conv"].flatten()[44] > 0
    assert not got["conv"].flatten()[45:].any()


# --- from hostile hands -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("steps", "why"),
    [(0.0, "steps"), (2.5, "steps"), (math.nan, "steps"), (1e30, "steps"), (2.0, "place")],
)
def test_levels_that_mean_nothing_are_refused(steps: float, why: str) -> None:
    around = message_layout({"only": (40,)})
    symbols, _ = at(alone([float(n) for n in range(1, 41)]), 40, 8)
    scales = {"only": symbols.scales["only"].clone()}
    scales["only"][0, 2] = steps
    columns = Fgc().pack(replace(symbols, scales=scales), around)
    with pytest.raises(BadMessage, match=why):
        Fgc().unpack(columns, around)


def test_a_grid_without_its_ends_is_refused() -> None:
    around = message_layout({"only": (40,)})
    symbols, _ = at(alone([float(n) for n in range(1, 41)]), 40, 8)
    with pytest.raises(BadMessage, match="ends"):
        Fgc().unpack(pack(replace(symbols, scales={}), around, Fgc().symbol_format), around)
    column = msgspec.msgpack.decode(Fgc().pack(symbols, around)[0], type=Column)
    assert column.counts == [3]


# --- the look-up ------------------------------------------------------------------------------


def test_between_rates_the_share_is_a_power_and_levels_are_those_below() -> None:
    table = ((0.01, 0.02, 4), (0.04, 0.08, 16), (1.0, 0.5, 64))
    share, levels = looked_up(
        table, torch.tensor([0.005, 0.01, 0.02, 0.04, 0.2, 1.0, 9.0], dtype=torch.float64)
    )
    between = 0.08 * (0.5 / 0.08) ** (math.log(5) / math.log(25))
    assert share == pytest.approx([0.01, 0.02, 0.04, 0.08, between, 0.5, 0.5])
    assert levels.tolist() == [4, 4, 4, 16, 16, 64, 64]


def test_estimates_of_messages_are_near_what_is_measured() -> None:
    around = message_layout()
    kernels = Kernels(around.flattened(update(around)), around)
    guess = estimated(kernels)
    shares = np.geomspace(1e-4, 1.0, guess.bits.shape[0])
    for row, column in ((60, 3), (75, 5), (82, 9), (89, 10)):
        count = count_of(torch.from_numpy(shares[[row]]), kernels.norms.shape[1])
        errors, bits = [], []
        for key in range(10):
            drawn = Kernels(kernels.rows, replace(around, key=torch.tensor([key])))
            symbols = drawn.quantised(count, torch.tensor([LEVELS[column]]))
            meant = Fgc().dequantise(symbols, around)
            errors.append(
                sum(float((meant[n] - v).square().sum()) for n, v in kernels.rows.items())
            )
            bits.append(float(Fgc().bits(symbols, around).sum()))
        assert float(np.mean(errors)) == pytest.approx(guess.error[row, column], rel=0.05)
        # Headers and tables are not in the estimate.
        assert 0.97 < np.mean(bits) / guess.bits[row, column] < 1.25 + 1500 / np.mean(bits)


@pytest.mark.filterwarnings("error")
def test_an_estimate_of_entries_that_are_all_equal_divides_by_nothing() -> None:
    guess = estimated(alone([30.0, -30.0, 10.0, 2.0] * 10))
    # The strongest twenty have one magnitude: whatever the grid, none of them is rounded.
    strongest = 10 * (2 * 30.0**2 + 10.0**2 + 2.0**2) - np.arange(21) * 30.0**2
    few = [
        row
        for row, count in enumerate(count_of(torch.from_numpy(SHARES), 40).numpy())
        if count <= 20
    ]
    counts = count_of(torch.from_numpy(SHARES), 40).numpy()[few]
    assert guess.error[few] == pytest.approx(np.outer(strongest[counts], np.ones(len(LEVELS))))


def test_the_look_up_of_an_update_fits_at_every_rate_and_errs_less_at_higher_ones() -> None:
    around = message_layout({"conv": (32, 32, 3, 3), "matrix": (64, 100)})
    tree = update(around)
    fitted = Fgc().calibrated(around.flattened(tree), around)
    assert [row[0] for row in fitted.table] == pytest.approx(SENT_FRACTIONS.tolist())
    kernels = Kernels(around.flattened(tree), around)
    errors = []
    for rate, share, levels in fitted.table:
        count = count_of(torch.tensor([share]), kernels.norms.shape[1])
        symbols = kernels.quantised(count, torch.tensor([levels]))
        assert packed_bits(symbols, around) <= rate * 32 * around.entries
        got = fitted.compress(
            around.flattened(tree), torch.tensor([rate], dtype=torch.float64), around, {}
        )
        assert torch.equal(
            got.symbols.quantisation_levels["conv"], symbols.quantisation_levels["conv"]
        )
        errors.append(float(got.distortion[0]))
    # Of the drawn messages, up to the draws.
    assert all(after < before * 1.05 for before, after in pairwise(errors))
    assert errors[-1] < 0.3 * errors[0]
    # The pair of the theory is not in the race: its message is too long.
    analytic = anycost_analytic_compression(SENT_FRACTIONS[4])
    count = count_of(torch.tensor([analytic.keep]), kernels.norms.shape[1])
    too_long = kernels.quantised(count, torch.tensor([int(analytic.levels)]))
    assert packed_bits(too_long, around) > SENT_FRACTIONS[4] * 32 * around.entries


def test_a_table_that_is_given_stays() -> None:
    around = message_layout()
    given_ = Fgc(((0.5, 0.25, 4),))
    assert not given_.calibrates
    assert given_.calibrated(around.flattened(update(around)), around) == given_
    nothing = {name: torch.zeros_like(rows) for name, rows in update(around).items()}
    assert Fgc().calibrates
    assert Fgc().calibrated(around.flattened(nothing), around) == Fgc()


@pytest.mark.parametrize(
    ("table", "why"),
    [
        (((0.5, 0.1, 4), (0.1, 0.1, 4)), "sent fractions"),
        (((0.0, 0.1, 4),), "sent fractions"),
        (((0.5, 0.0, 4),), "shares"),
        (((0.5, 1.5, 4),), "shares"),
        (((0.5, 0.5, 0),), "levels"),
        (((0.5, 0.5, MOST_LEVELS + 1),), "levels"),
    ],
)
def test_a_table_without_sense_is_refused(
    table: tuple[tuple[float, float, int], ...], why: str
) -> None:
    with pytest.raises(ValueError, match=rf"Fgc\.table.*{why}"):
        Fgc(table)


# --- in a run ---------------------------------------------------------------------------------


class Sparse(WholeModel):
    """Every device at a rate of its own."""

    def __call__(self, plans: Plans, view: View, state: object, key: Tensor) -> Plans:
        rate = 0.1 + 0.02 * (plans.device % 3).astype(np.float64)
        return replace(plans, hyperparameters=replace(plans.hyperparameters, sent_fraction=rate))


def sparse(uplink: codec.Fgc | codec.ErrorFeedback) -> Method:
    return replace(fedavg(count=4, lr=0.05), uplink=uplink, plan=Sparse())


def server(method: Method, seed: int = 0) -> Server:
    task = small.task(norm=False)
    return Server(method, task, Simulated(task, small.world(task)), seed)


@pytest.mark.parametrize("uplink", [Fgc(), codec.ErrorFeedback(Fgc())], ids=["alone", "inside"])
def test_the_server_measures_the_look_up_once_and_sends_it_with_the_job(
    uplink: codec.Fgc | codec.ErrorFeedback,
) -> None:
    one, again, other = (server(sparse(uplink), seed) for seed in (0, 0, 1))
    assert one.method.uplink == again.method.uplink != uplink
    assert other.method.uplink != one.method.uplink
    assert one.method.job().uplink == one.method.uplink
    told = json.loads(json.dumps(config.dump(one.method.uplink)))
    assert config.load(told) == one.method.uplink
    assert not one.method.uplink.calibrates


def test_without_a_server_split_nothing_is_measured() -> None:
    data = small.patterns(80, 1)
    bare = Task.of(small.net(), data, data, split=Split(devices=2, test_share=0.0))
    assert calibrated(sparse(Fgc()), bare, 0).uplink == Fgc()
    plain = fedavg()
    assert calibrated(plain, small.task(), 0) is plain


def test_the_sample_update_is_what_training_on_some_samples_moves() -> None:
    task = small.task()
    found = sample_update(fedavg(lr=0.05).job(), task, rng.root(0, "calibration"))
    assert SAMPLES == 16
    assert {name: rows.shape[1:] for name, rows in found.items()} == {
        name: value.shape for name, value in task.params.items()
    }
    assert all(rows.isfinite().all() for rows in found.values())
    assert sum(float(rows.abs().sum()) for rows in found.values()) > 0


def test_engines_agree_and_messages_fit_their_rates() -> None:
    task = small.task(equal=False, dtype=torch.float64)
    ends = [
        small.steps(sparse(Fgc()), task, 2, engine=engine)
        for engine in (Sequential(), Threads(), Stacked())
    ]
    assert small.identical(ends[0][-1].params, ends[1][-1].params)
    assert small.distance(ends[0][-1].params, ends[2][-1].params) < 1e-10
    entries = sum(value.numel() for value in task.params.values())
    for row in small.rows(ends[0][0]):
        rate = 0.1 + 0.02 * (row.device % 3)
        assert 0.5 * rate * 32 * entries < row.bits_up < rate * 32 * entries + 500


def test_a_resumed_run_has_the_look_up_it_began_with() -> None:
    task, method = small.task(norm=False), sparse(Fgc())
    whole = small.steps(method, task, 3)
    first = Simulated(task, small.world(task))
    half = next(run(method, task, first, 0))
    second = Simulated(task, small.world(task))
    second.restore(first.save())
    going = run(method, task, second, 0, resume=half.snapshot)
    next(going)
    assert small.identical(next(going).params, whole[-1].params)


def test_an_order_without_a_target_is_met_at_the_codecs_own_rate() -> None:
    around = message_layout({"conv": (32, 16, 3, 3), "fc": (10, 256)})
    own = Fgc(sent_fraction=0.05).compress(
        around.flattened(update(around)), torch.tensor([math.nan]), around, {}
    )
    told = Fgc().compress(around.flattened(update(around)), torch.tensor([0.05]), around, {})
    assert torch.equal(own.bits, told.bits)
    assert float(own.bits.sum()) <= 0.05 * 32 * (32 * 16 * 9 + 2560)
    stricter = Fgc(sent_fraction=0.5).compress(
        around.flattened(update(around)), torch.tensor([0.05]), around, {}
    )
    assert torch.equal(stricter.bits, told.bits)
    with pytest.raises(ValueError, match=r"Fgc\.sent_fraction must lie in \(0, 1\], got 0\."):
        Fgc(sent_fraction=0.0)


@pytest.mark.parametrize("size", [1e-41, 1e-39, 1e-20, 1e20])
def test_values_of_any_size_have_their_places(size: float) -> None:
    around = message_layout({"fc": (1, 400)})
    tree = {"fc": torch.linspace(0.1, 1, 400).reshape(1, 1, 400) * size}
    sent = Fgc(table=((1.0, 1.0, 8),)).compress(
        around.flattened(tree), torch.tensor([math.nan]), around, {}
    )
    assert float(sent.distortion) < 0.01
    assert float(sent.received["fc"].sum() / tree["fc"].sum()) == pytest.approx(1, abs=0.03)
