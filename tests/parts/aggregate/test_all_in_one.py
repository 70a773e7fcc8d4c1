"""All-in-one aggregation: every entry by those who sent it, as the specification computes it."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from anyfleet.arrays import join
from anyfleet.core.client import work
from anyfleet.core.device_state import DeviceState
from anyfleet.core.message_size import uncompressed_bits
from anyfleet.core.messages import no_charges
from anyfleet.core.method import Method
from anyfleet.core.orders import Cohort, IssuedOrders
from anyfleet.core.planning import load_models
from anyfleet.core.replies import IncomingReplies, RepliedOrders
from anyfleet.core.stacks import Replies
from anyfleet.core.updates import Updates
from anyfleet.elastic import Slice, channel_share, narrowed, place, trained_share
from anyfleet.formulas.anycost import (
    anycost_alpha,
    anycost_divergence,
    anycost_gain,
    anycost_weights,
)
from anyfleet.formulas.reference.averaging import anycost_mean
from anyfleet.methods import fedavg, heterofl
from anyfleet.parts.aggregate import (
    Aio,
    AngleWeighted,
    Diagnosed,
    Mean,
    ServerOptimised,
    ServerSgd,
    Subset,
)
from anyfleet.parts.codec import Fgc, Hq, Uveq
from anyfleet.parts.norm import PerWidth
from anyfleet.parts.plan import SentFractionByLevel, WidthByLevel
from anyfleet.parts.select import Everyone
from anyfleet.runtime import Sequential, Stacked, Threads
from anyfleet.tasks import Data, Dirichlet, Split, Task
from anyfleet.world import levels, lossy
from tests.core.test_local_training import orders
from tests.core.test_updates import BLUEPRINT, MATRIX, rows_and_columns, updates_of
from tests.helpers import small
from tests.helpers.changed import with_slices
from tests.helpers.engines import cut_reply
from tests.helpers.vectors import ADP, PLACE, Seen, numbers, step, vectors

WEIGHTS = "0.weight"  # three rows of four numbers


def with_kept(
    found: Updates, kept: Sequence[Mapping[str, Tensor]], rates: Sequence[float]
) -> Updates:
    """The same updates, of which codecs sent this."""
    return Updates.of(
        [each.local_delta for each in found],
        found.blueprint,
        slices=found.slices,
        samples=found.samples,
        sent_fraction=rates,
        masks=[each.local_mask for each in found],
        sent=kept,
    )


def rows(*values: Sequence[float]) -> list[dict[str, Tensor]]:
    """Tensors whose first rows are these, and all else zero."""
    made = []
    for value in values:
        tensor = torch.zeros(3, 4, dtype=torch.float64)
        tensor[0] = torch.tensor(value)
        made.append({WEIGHTS: tensor})
    return made


def moved(part: Aio | Mean, found: Updates) -> dict[str, Tensor]:
    """The changes that an aggregator makes."""
    zeros = {n: torch.zeros(BLUEPRINT.shape(n), dtype=torch.float64) for n in BLUEPRINT.params}
    return dict(step(part, found, model=zeros).model)


# --- worked examples --------------------------------------------------------------------------


def test_1_12_3_all_in_one_example() -> None:
    # What a codec left out is a zero in the update that comes in.
    updates = rows((1, 2, 0, 0), (3, 0, 4, 0), (5, 6, 0, 0))
    sent = rows((1, 1, 0, 0), (1, 0, 1, 0), (1, 1, 0, 0))
    found = with_kept(updates_of(updates, samples=[5, 3, 2]), sent, [1 / 15] * 3)
    part = Aio()
    assert part.weigh(found) == pytest.approx([0.5, 0.3, 0.2])
    change = moved(part, found)[WEIGHTS]
    assert change[0].tolist() == pytest.approx([2.4, 3.142857142857143, 4.0, 0.0])
    assert not change[1:].any()
    # The plain mean takes those zeros for updates.
    plain = moved(Mean(), found)[WEIGHTS][0]
    assert plain.tolist() == pytest.approx([2.4, 2.2, 1.2, 0.0])


@cache
def two_layers() -> Task:
    """Half of the parameters in either layer, so that sizes of 1, 1/2 and 1/4 are real."""
    net = nn.Sequential(nn.Linear(10, 8, bias=False), nn.ReLU(), nn.Linear(8, 10, bias=False))
    noise = torch.Generator().manual_seed(1)
    data = Data(torch.randn(60, 10, generator=noise), torch.arange(60) % 10)
    return Task.of(net, data, data, split=Split(devices=3, server=6, test_share=0.0))


def sliced(asked: Cohort, slices: Sequence[Slice], method: Method, task: Task) -> Cohort:
    """Orders for other parts of the model."""
    kept = with_slices(asked, *slices)
    return load_models(kept, method=method, task=task, params=task.params, buffers=task.buffers)


def came_in(asked: Cohort, updates: Replies, method: Method, task: Task, step: int = 0) -> Updates:
    """Answers as the server gathers them."""
    job, nothing, sizes = method.job(), no_charges(asked.id, 0.0), np.ones(len(asked))
    replied = RepliedOrders.of(
        IssuedOrders.of(asked), updates, nothing, sizes, job=job, blueprint=task.blueprint
    )
    return IncomingReplies(job, task, step).trained(replied, task.params)


def test_1_12_3_weights_of_a_cohort_are_those_of_the_example() -> None:
    """From sizes that are real, and rates that are measured."""
    task, method = two_layers(), replace(fedavg(lr=0.1, batch_size=8), aggregate=Aio(Mean("equal")))
    slices = (Slice(), Slice(first_trained_layer=1), task.blueprint.prefix(0.5))
    asked = sliced(orders(method, task, [0, 1, 2]), slices, method, task)
    done = [work(order, (DeviceState(),), task).replies for order in asked.rows()]
    bits = [uncompressed_bits(each, method.norm, task.blueprint)[1] / 15 for each in slices]
    found = came_in(asked, replace(join(done), bits=np.array(bits)), method, task)
    part = Aio(Mean("equal"))
    assert part.weigh(found) == pytest.approx([0.392827, 0.332452, 0.274721], abs=1e-6)
    stepped = part(task.params, found, Seen(), None, torch.tensor(0))  # type: ignore[arg-type]
    assert numbers(stepped.diagnostics["weights"]) == pytest.approx(part.weigh(found).tolist())
    facts = np.array([1.0, 0.5, 0.25]), np.full(3, 1 / 15)
    assert stepped.diagnostics["mean_gain"] == pytest.approx(anycost_gain(*facts).mean())
    assert stepped.diagnostics["mean_divergence"] == pytest.approx(
        anycost_divergence(*facts).mean()
    )


# --- against the formula ----------------------------------------------------------------------


def full(found: Updates, row: int, name: str, tree: Mapping[str, Tensor]) -> Tensor:
    """A tensor of one device on the whole model; 1 in its slice where there is none."""
    spread = torch.zeros(BLUEPRINT.shape(name), dtype=torch.float64)
    where = place(name, found.slices[row], BLUEPRINT)
    spread[where] = tree[name].double() if name in tree else 1.0
    return spread


@given(st.integers(0, 10_000), st.integers(1, 5))
def test_1_12_3_every_element_is_the_mean_of_those_who_sent_it(seed: int, count: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    parts = [Slice(), rows_and_columns((0, 2)), rows_and_columns((1,))]
    slices = [parts[int(torch.randint(3, (), generator=draw))] for _ in range(count)]
    locals_ = [BLUEPRINT.local(slice_) for slice_ in slices]

    def some(shape: tuple[int, ...], share: float) -> Tensor:
        return (torch.rand(shape, generator=draw) < share).double()

    kept = [{n: some(one.shape(n), 0.6) for n in one.params if "weight" in n} for one in locals_]
    masks = [{MATRIX: some(one.shape(MATRIX), 0.7)} if seed % 2 else {} for one in locals_]
    changes = [
        {
            n: torch.randn(one.shape(n), generator=draw, dtype=torch.float64) * kept[i].get(n, 1.0)
            for n in one.params
        }
        for i, one in enumerate(locals_)
    ]
    samples = torch.randint(1, 9, (count,), generator=draw).tolist()
    rates = torch.rand(count, generator=draw).double().tolist()
    base = updates_of(changes, slices=slices, samples=samples, masks=masks)
    found = with_kept(base, kept, rates)
    alphas = np.array(
        [anycost_alpha(channel_share(s, BLUEPRINT), trained_share(s, BLUEPRINT)) for s in slices]
    )
    weights = anycost_weights(alphas, np.array(rates), np.array(samples))
    change = moved(Aio(), found)
    for name in BLUEPRINT.params:
        updates, sent = (
            np.stack([full(found, row, name, tree[row]).numpy() for row in range(count)])
            for tree in (changes, kept)
        )
        trained = np.stack([full(found, row, name, masks[row]).numpy() for row in range(count)])
        expected = anycost_mean(updates, (sent * trained) > 0, weights)
        np.testing.assert_allclose(change[name].numpy(), expected, atol=1e-12)


def test_e_equal_weights_are_the_overlap_mean() -> None:
    changes = [{MATRIX: torch.full((3, 3), 1.5)}, {MATRIX: torch.full((2, 2), -1.0)}]
    # At a rate of nothing, all are equally far from complete.
    small_one = rows_and_columns((0, 2))
    found = updates_of(changes, slices=[Slice(), small_one], samples=[1, 1])
    found = with_kept(found, [{}, {}], [0.0, 0.0])
    one, two = (moved(part, found)[MATRIX] for part in (Aio(Mean("equal")), Mean("equal")))
    torch.testing.assert_close(one, two)


def test_e_complete_updates_are_the_data_weighted_mean() -> None:
    draw = torch.Generator().manual_seed(2)
    changes = [{WEIGHTS: torch.randn(3, 4, generator=draw, dtype=torch.float64)} for _ in range(4)]
    found = updates_of(changes, samples=[3, 1, 7, 2])
    one, two = (moved(part, found)[WEIGHTS] for part in (Aio(), Mean()))
    torch.testing.assert_close(one, two, rtol=1e-13, atol=0.0)


def test_what_nobody_sent_stays_and_what_one_sent_is_its_own() -> None:
    updates = rows((0, 0, 7, 0), (0, 0, 0, 0))
    found = with_kept(updates_of(updates), [*rows((0, 0, 1, 0)), *rows((0, 0, 0, 0))], [0.5, 0.01])
    assert moved(Aio(), found)[WEIGHTS][0].tolist() == [0, 0, 7, 0]
    nothing = with_kept(updates_of(updates[1:]), rows((0, 0, 0, 0)), [0.01])
    before = {n: torch.randn(BLUEPRINT.shape(n)).double() for n in BLUEPRINT.params}
    after = step(Aio(), nothing, model=before).model
    assert small.identical(after, before)


# --- weights ----------------------------------------------------------------------------------


def test_weights_of_the_base_are_multiplied() -> None:
    found = with_kept(vectors(ADP, samples=[10, 0, 30]), [{}] * 3, [0.25, 0.25, 1 / 9])
    found = replace(found, staleness=np.array([0, 0, 3]))
    plain = 1 / (1 - np.sqrt([0.25, 0.25, 1 / 9])) ** 2

    def shares(base: Mean, raw: Sequence[float]) -> None:
        weights = np.array(raw) * plain
        assert Aio(base).weigh(found) == pytest.approx(weights / weights.sum())

    shares(Mean(), [10, 0, 30])
    shares(Mean("equal"), [1, 0, 1])  # without data there is no vote
    shares(Mean("samples", discount=1.0), [10, 0, 30 / 4])


def test_the_floor_keeps_complete_updates_from_counting_for_all() -> None:
    found = with_kept(vectors(ADP), [{}] * 3, [1.0, 1.0, 0.25])
    assert Aio().weigh(found) == pytest.approx([0.5, 0.5, 0.0], abs=1e-5)
    assert Aio(floor=0.5).weigh(found) == pytest.approx([1 / 3] * 3)
    assert Aio(floor=0.25).weigh(found) == pytest.approx([4 / 9, 4 / 9, 1 / 9])
    for floor in (0.0, -1.0, 1.5, float("nan")):
        with pytest.raises(ValueError, match=r"Aio\.floor must lie in \(0, 1\]"):
            Aio(floor=floor)


# --- with other aggregators -------------------------------------------------------------------


def unequal() -> Updates:
    """Three updates of which codecs sent different parts."""
    sent = [{PLACE: torch.tensor(flags)} for flags in ((1.0, 0.0), (1.0, 1.0), (1.0, 1.0))]
    return with_kept(vectors(ADP, samples=[4, 3, 5]), sent, [0.02, 0.05, 0.07])


def test_diagnosed_tells_more_and_changes_nothing() -> None:
    plain, told = (step(part, unequal()) for part in (Aio(), Diagnosed(Aio())))
    assert torch.equal(plain.model[PLACE], told.model[PLACE])
    assert told.diagnostics["weights"] == plain.diagnostics["weights"]
    assert {"mean_gain", "mean_divergence", "coverage"} <= told.diagnostics.keys()


def test_a_server_step_goes_on_from_its_change() -> None:
    plain = step(Aio(), unequal()).model[PLACE]
    half = step(ServerOptimised(Aio(), ServerSgd(0.5)), unequal()).model[PLACE]
    torch.testing.assert_close(half, plain / 2)


def test_a_subset_is_aggregated_by_what_its_members_sent() -> None:
    sent = unequal()
    everybody = step(Subset(Aio(), share=1.0), sent, seen=Seen(lambda _: 0.0))
    assert torch.equal(everybody.model[PLACE], step(Aio(), sent).model[PLACE])
    fewer = step(Subset(Aio(), share=0.5, statistic="mean"), sent, seen=Seen(lambda _: 0.0))
    (out,) = fewer.diagnostics["excluded"]
    kept = [row for row in range(3) if row != out]
    expected = step(Aio(), sent.take(kept))
    assert torch.equal(fewer.model[PLACE], expected.model[PLACE])
    assert fewer.diagnostics["weights"] == expected.diagnostics["weights"]


def test_angles_are_measured_on_what_was_sent_and_start_from_its_weights() -> None:
    sent = unequal()
    found = step(AngleWeighted(base=Aio()), sent)
    # The same by hand: its weights in the place of samples, and what was left out masked.
    masked = sent.only_sent()
    masked = replace(masked, samples=Aio().weigh(sent))
    expected = step(AngleWeighted(base=Mean()), masked)
    torch.testing.assert_close(found.model[PLACE], expected.model[PLACE])
    assert numbers(found.diagnostics["angles"]) == pytest.approx(
        numbers(expected.diagnostics["angles"])
    )
    assert found.diagnostics["angles"][0] != step(AngleWeighted(), sent).diagnostics["angles"][0]


# --- in runs ----------------------------------------------------------------------------------

BASE = replace(heterofl(widths=(1.0, 0.5), lr=0.1, batch_size=16), select=Everyone())
FGC = replace(BASE, plan=SentFractionByLevel((0.3, 0.1), BASE.plan), uplink=Fgc(), aggregate=Aio())
FLEET = levels(speeds=(1e9, 1e8))
TASK = small.task(partition=Dirichlet(0.5), dtype=torch.float64)  # devices lack labels


@pytest.mark.parametrize(
    "method",
    [
        replace(FGC, norm=PerWidth()),
        replace(FGC, uplink=Hq(), aggregate=AngleWeighted(base=Aio(Mean("equal", 0.5)))),
    ],
    ids=["label masks, normalisation by width", "angles"],
)
def test_engines_agree(method: Method) -> None:
    plain, bytes_, stacked = (
        small.steps(method, TASK, 2, fleet=FLEET, engine=engine)[-1].params
        for engine in (Sequential(), Threads(), Stacked())
    )
    assert small.identical(plain, bytes_)
    assert small.distance(plain, stacked) < 1e-9
    assert small.distance({n: plain[n] for n in TASK.params}, TASK.params) > 1e-4


def spread(flags: Tensor, name: str, slice_: Slice) -> Tensor:
    """Where a part of the model has something, on the whole model."""
    found = torch.zeros(TASK.blueprint.shape(name), dtype=torch.bool)
    found[place(name, slice_, TASK.blueprint)] = flags > 0
    return found


def test_what_is_masked_and_what_is_left_out_both_do_not_count() -> None:
    method = replace(FGC, plan=SentFractionByLevel((0.3,), WidthByLevel((0.5,))), norm=PerWidth())
    asked = orders(method, TASK, [0])
    done = work(asked, (DeviceState(),), TASK).replies
    mask, kept, half = done.masks_of(0), done.kept_of(0), asked.slice_of(0)
    assert not mask["10.weight"].all()  # a label that the device never saw
    assert not kept["10.weight"].all()
    covered = came_in(asked, done, method, TASK).only_sent().covered()
    both = mask["10.weight"] * kept["10.weight"]
    assert torch.equal(covered["10.weight"], spread(both, "10.weight", half))
    assert torch.equal(covered["8.weight"], spread(kept["8.weight"], "8.weight", half))
    (own,) = (name for name in covered if name.startswith("1.weight@"))
    assert torch.equal(covered[own], spread(kept["1.weight"], "1.weight", half))


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_of_a_message_that_a_link_cut_the_columns_that_came_count(share: float) -> None:
    method = replace(FGC, plan=SentFractionByLevel((0.3,), WidthByLevel((share,))))
    asked = replace(orders(method, TASK, [2], column=0.25), column_width=np.array([0.25]))
    done = work(asked, (DeviceState(),), TASK).replies
    short = cut_reply(done, asked, 0.25, TASK.blueprint)
    tree, kept = short.trees_of(0), short.kept_of(0)
    for name, flags in kept.items():
        assert flags.shape == tree["delta"][name].shape
    found = came_in(asked, short, method, TASK)
    part = narrowed(asked.slice_of(0), 0.25, TASK.blueprint)
    assert found.slices == (part,)
    shares = channel_share(part, TASK.blueprint), trained_share(part, TASK.blueprint)
    assert anycost_alpha(*shares) <= 0.25
    covered = found.only_sent().covered()
    for name, flags in kept.items():
        mask = short.masks_of(0).get(name, torch.ones(()))
        assert torch.equal(covered[name], spread(flags * mask, name, part)), name
    stepped = Aio()(TASK.params, found, Seen(), None, torch.tensor(0))  # type: ignore[arg-type]
    assert all(bool(value.isfinite().all()) for value in stepped.model.values())
    change = found[0].local_delta["4.weight"]
    where = place("4.weight", part, TASK.blueprint)
    moved_by = (stepped.model["4.weight"] - TASK.params["4.weight"])[where]
    torch.testing.assert_close(moved_by, change * kept["4.weight"])


def test_links_that_lose_columns_are_no_obstacle() -> None:
    method = replace(small.padded(fedavg(count=6, lr=0.1)), uplink=Uveq(6.0), aggregate=Aio())
    fleet = lossy(errors=(0.2,), column_width=0.25)
    plain, bytes_ = (
        small.steps(method, TASK, 2, fleet=fleet, engine=engine)[-1]
        for engine in (Sequential(), Threads())
    )
    assert small.identical(plain.params, bytes_.params)
    assert plain.ledger.delivered_up.min() < 1
    assert all(bool(value.isfinite().all()) for value in plain.params.values())


def test_a_cohort_that_can_send_nothing_changes_nothing() -> None:
    """Rates so small that no kernel fits: every device answers, and nobody says anything."""
    method = replace(FGC, plan=SentFractionByLevel((1e-4,), BASE.plan))
    (step_,) = small.steps(method, TASK, 1, fleet=FLEET)
    assert not any(step_.ledger.failure)
    assert small.identical(step_.params, TASK.params)
