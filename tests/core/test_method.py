"""Parts of different papers in one method: what fits runs, what does not says why before."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import Tensor

from anyfleet.core.messages import Aggregated, Params
from anyfleet.core.method import Method
from anyfleet.core.slots import Choose, Plan, Schedule, State, Train
from anyfleet.core.updates import Updates
from anyfleet.core.view import View
from anyfleet.errors import CompositionError, ConfigError
from anyfleet.experiment import Experiment, play
from anyfleet.formulas.contribution import fedadp_angles, update_alignment
from anyfleet.measure.fisher import Fisher, Observed
from anyfleet.methods import bn2, fedavg, fedpmt, fedpns, fedrescue, heterofl, whale
from anyfleet.parts.aggregate import (
    AngleWeighted,
    Diagnosed,
    Mean,
    ServerAdam,
    ServerOptimised,
    Subset,
)
from anyfleet.parts.choose import First, FisherUtility, LargestInTime, MostGain
from anyfleet.parts.codec import Fgc
from anyfleet.parts.extract import FisherBlocks, Random, Rolling
from anyfleet.parts.norm import PerWidth, Static, Tracked
from anyfleet.parts.plan import (
    Assigned,
    JustInTime,
    LargestFitting,
    SentFractionByLevel,
    SentFractionByLink,
    TargetSeconds,
    TrainedLayersMenu,
    WidthByLevel,
    WidthMenu,
)
from anyfleet.parts.schedule import (
    Buffered,
    Deadline,
    HoldAndFetch,
    Overselected,
    Surveyed,
    Synchronous,
    Tiers,
)
from anyfleet.parts.select import Everyone, Largest, Learned, Quota
from anyfleet.parts.train import Decaying, Fjord, Gradient, Progressive, Rush, Sgd, Slim
from anyfleet.tasks import Split, Task, squared_error
from anyfleet.world import levels
from tests.helpers import small
from tests.methods.test_combinations import TRAINERS

TWO_LEVELS = levels(speeds=(1e9, 1e8))
BASE = Gradient(Decaying(0.05), Sgd(0.9), batch_size=16)


# --- what cannot work together says why, and what to use --------------------------------------


def test_a_selection_by_labels_that_nobody_gives_names_who_would() -> None:
    with pytest.raises(
        CompositionError, match=r"select=.*diagnostic 'labelled'.*use .*Subset.*docs/mixing\.md"
    ):
        replace(fedavg(), select=Learned(3))
    with pytest.raises(CompositionError, match=r"'labelled'"):
        replace(fedpns(), aggregate=AngleWeighted())
    for around in (Diagnosed, ServerOptimised):  # whoever labels may be inside of another
        assert replace(fedpns(), aggregate=around(Subset())).select == Learned(10)


@pytest.mark.parametrize(
    "schedule", [Synchronous(), Deadline(3.0), Buffered(4, 2), Overselected(2), Tiers()], ids=str
)
def test_a_selection_in_two_phases_is_refused_where_results_do_not_wait(schedule: Schedule) -> None:
    with pytest.raises(
        CompositionError, match=r"needs results that wait.*use schedule=HoldAndFetch"
    ):
        replace(bn2(), schedule=schedule)
    assert replace(bn2(), schedule=HoldAndFetch(patience=3.0)).select == Largest()


def test_a_measure_that_no_device_takes_is_refused_with_those_there_are() -> None:
    with pytest.raises(CompositionError, match=r"select wants \['colour'\].*'distortion', 'loss'"):
        replace(bn2(), select=Largest(4, 2, "colour"))


@dataclass(frozen=True)
class Thinker(First):
    """Learns from something that is not there."""

    learns_from = frozenset({"mood"})


def test_a_chooser_that_learns_from_what_nobody_measures_is_refused() -> None:
    with pytest.raises(CompositionError, match=r"choose wants \['mood'\]"):
        replace(fedavg(), plan=WidthMenu(), choose=Thinker())


def test_a_chooser_without_a_target_says_who_gives_one() -> None:
    utility = FisherUtility()
    with pytest.raises(CompositionError, match=r"choose=.*a target time.*use plan=TargetSeconds"):
        replace(fedavg(), plan=WidthMenu(), choose=utility)
    with pytest.raises(CompositionError, match=r"needs a target time"):
        replace(fedavg(), plan=WidthMenu(), choose=replace(utility, effectiveness="constant"))
    for choose in (replace(utility, target=3.0), replace(utility, penalty=0.0)):
        assert replace(fedavg(), plan=WidthMenu(), choose=choose).choose == choose
    assert replace(fedavg(), plan=TargetSeconds(WidthMenu()), choose=utility).choose == utility


@pytest.mark.parametrize(
    ("plan", "choose", "words"),
    [
        (
            SentFractionByLink(inner=WidthMenu()),
            MostGain(),
            r"plan=SentFractionByLink.* and choose=MostGain.*both set the compression",
        ),
        (
            JustInTime(1.0, WidthMenu()),
            MostGain(),
            r"JustInTime.* and choose=MostGain.*both set the processor frequency",
        ),
        (
            SentFractionByLevel((0.5,), SentFractionByLink()),
            First(),
            r"SentFractionByLevel.* and plan=SentFractionByLink.*both set the compression",
        ),
        (
            SentFractionByLink(inner=Assigned(WidthMenu(), MostGain())),
            First(),
            r"and plan=Assigned.*both set the compression",
        ),
        (
            JustInTime(1.0, Assigned(WidthMenu(), MostGain())),
            First(),
            r"both set the processor frequency",
        ),
    ],
    ids=["rate", "frequency", "two plans", "assigned rate", "assigned frequency"],
)
def test_what_two_parts_decide_is_refused(plan: Plan, choose: Choose, words: str) -> None:
    with pytest.raises(CompositionError, match=rf"{words}; keep one \(docs/mixing\.md\)"):
        replace(fedavg(), plan=plan, choose=choose, uplink=Fgc())
    with pytest.raises(CompositionError) as caught:  # one complaint for one mistake
        replace(fedavg(), plan=plan, choose=choose, uplink=Fgc())
    assert len(caught.value.problems) == 1


def test_a_chooser_whose_menu_the_server_keeps_is_refused() -> None:
    plan = Assigned(WidthMenu(), LargestInTime(3.0))
    for choose in (LargestInTime(3.0), MostGain(), FisherUtility(target=3.0)):
        with pytest.raises(CompositionError, match=r"choose=.*needs a menu.*docs/mixing\.md"):
            replace(fedavg(), plan=plan, choose=choose)
    assert replace(fedavg(), plan=plan, choose=First()).plan == plan


def test_all_misfits_of_a_method_are_told_at_once() -> None:
    with pytest.raises(CompositionError) as caught:
        replace(
            fedavg(),
            select=Learned(3),
            plan=WidthMenu(),
            choose=FisherUtility(),
            send="all",  # type: ignore[arg-type]
        )
    text = str(caught.value)
    assert all(words in text for words in ("'labelled'", "a target time", "send must be"))


# --- what depends on the task is told before the run ------------------------------------------


def measured(*, server: int = 20) -> Task:
    """A task whose targets are no classes."""
    data = small.patterns(80, 1)
    smooth = replace(data, y=data.x.flatten(1)[:, :10])
    split = Split(devices=4, server=server)
    return Task.of(small.net(norm=False), smooth, split=split, loss=squared_error)


@pytest.mark.parametrize(
    ("method", "words"),
    [
        (fedrescue(count=2), "Progressive lets the whole model teach"),
        (replace(fedavg(), train=Rush(BASE)), "Rush"),
        (replace(fedavg(), train=Slim(BASE)), "Slim"),
        (replace(fedavg(), train=Fjord(BASE)), "Fjord"),
        (whale(widths=(1.0, 0.5)), "Fisher information"),
        (replace(fedavg(), extract=FisherBlocks(4)), "Fisher information"),
    ],
    ids=["fedrescue", "rush", "slim", "fjord", "whale", "fisher blocks"],
)
def test_what_takes_classes_is_refused_without_them(method: Method, words: str) -> None:
    with pytest.raises(ConfigError, match=rf"method\.train.*{words}.*classified=True"):
        next(play(Experiment(measured(), method, rounds=1)))


def test_what_takes_no_classes_runs_without_them() -> None:
    for train in (Progressive(BASE, samples=2, distil=False), Fjord(BASE, samples=0), BASE):
        (moment,) = play(Experiment(measured(), replace(fedavg(count=2), train=train), rounds=1))
        assert np.isfinite(moment.record.loss)


@pytest.mark.parametrize(
    "wrap", [lambda s: s, Diagnosed, ServerOptimised], ids=["", "in", "around"]
)
def test_a_comparison_on_the_server_needs_samples_there(wrap: type[Diagnosed]) -> None:
    method = replace(fedavg(count=2), aggregate=wrap(Subset()))
    with pytest.raises(ConfigError, match=r"server.*no samples.*keep some back"):
        next(play(Experiment(measured(server=0), method, rounds=1)))
    (moment,) = play(Experiment(measured(), method, rounds=1))
    assert moment.record.replies == 2


# --- Fisher information, whatever else a method is made of ------------------------------------


@pytest.mark.parametrize("name", TRAINERS)
def test_a_fisher_chooser_gets_fisher_from_every_trainer(name: str) -> None:
    train: Train = TRAINERS[name]
    method = replace(
        whale(widths=(1.0, 0.5), fisher=Fisher(every=2, samples=2), static_norm=False), train=train
    )
    assert isinstance(method.trainer, Observed)
    plain = replace(heterofl(widths=(1.0,), static_norm=False), select=Everyone(), train=train)
    task, one_level = small.task(devices=4), levels(speeds=(1e9,))
    first, second = small.steps(method, task, 2, fleet=one_level)
    alone = small.steps(plain, task, 1, fleet=one_level)[0]
    # Everybody starts with the whole model: what is measured beside it changes no bit of it.
    assert small.identical(first.params, alone.params)
    assert all(0 < row.utility <= 1 for row in small.rows(second))
    costs = zip(small.rows(first), small.rows(alone), strict=True)
    assert all(one.flops > other.flops for one, other in costs)


# --- mixtures ---------------------------------------------------------------------------------

MIXTURES = {
    "five papers": replace(
        whale(widths=(1.0, 0.5), lr=0.05),
        train=Progressive(BASE, samples=2),
        aggregate=Subset(AngleWeighted(base=Mean("equal")), share=0.5),
        select=Learned(3),
    ),
    "the same, blocks, labels under a server optimiser": replace(
        whale(widths=(1.0, 0.5), regions=4),
        train=Rush(BASE, samples=2),
        select=Learned(3),
        aggregate=Diagnosed(ServerOptimised(Subset(AngleWeighted()), ServerAdam())),
        norm=PerWidth(),
    ),
    "bn2 of fedrolex with fjord": replace(
        heterofl(widths=(1.0, 0.5)),
        extract=Rolling(),
        select=Largest(4, 2),
        schedule=HoldAndFetch(),
        train=Fjord(BASE),
        aggregate=AngleWeighted(),
    ),
    "bn2 by fisher, of random channels": replace(
        heterofl(widths=(0.5, 0.25)),
        extract=Random(),
        select=Largest(4, 2, "fisher", (Fisher(),)),
        schedule=HoldAndFetch(),
        train=Slim(BASE),
    ),
    "fedpmt with progressive steps, tracked": replace(
        fedpmt(depths=3, count=4), train=Progressive(BASE, samples=2), norm=Tracked()
    ),
    "depths assigned by the server, asynchronously": replace(
        fedavg(lr=0.05),
        plan=Assigned(TrainedLayersMenu(), LargestInTime(0.01)),
        schedule=Buffered(4, 2),
        aggregate=Subset(Mean(discount=0.5), share=0.5),
        select=Learned(4),
    ),
    "quota, late answers, proximal": replace(
        heterofl(widths=(1.0, 0.5)),
        select=Quota(4),
        schedule=Deadline(0.05, late="counted", staleness=2),
        train=replace(BASE, proximal=0.1, masked=True, label_rows=True),
        norm=Static(),
        aggregate=Diagnosed(AngleWeighted()),
    ),
}


@pytest.mark.parametrize("name", MIXTURES)
def test_any_mixture_runs(name: str) -> None:
    task = small.task(devices=4)
    last = small.steps(MIXTURES[name], task, 2, fleet=TWO_LEVELS)[-1]
    assert all(bool(value.isfinite().all()) for value in last.params.values())
    common = {n: v for n, v in last.params.items() if n in task.params}
    assert small.distance(common, task.params) > 0
    assert len(last.ledger.counted) > 0


# --- comparisons of unequal slices ------------------------------------------------------------


@dataclass(frozen=True)
class Spied(Mean):
    """A mean that keeps what it saw."""

    def __call__(
        self, model: Params, updates: Updates, view: View, state: State, key: Tensor
    ) -> Aggregated:
        stepped = super().__call__(model, updates, view, state, key)
        return replace(stepped, diagnostics={"arrivals": updates})


def rows_of(arrivals: Updates) -> tuple[np.ndarray, np.ndarray]:
    """Every update as one vector of the whole model, and where its device trained."""
    vectors, masks = [], []
    for row in range(len(arrivals)):
        alone = arrivals.take([row])
        change, covered = alone.mean(np.ones(1)), alone.covered()
        vectors.append(torch.cat([change[n].flatten() for n in sorted(change)]))
        masks.append(torch.cat([covered[n].flatten() for n in sorted(covered)]))
    return torch.stack(vectors).double().numpy(), torch.stack(masks).numpy()


def test_angles_and_subsets_of_sub_models_are_taken_on_common_coordinates() -> None:
    task = small.task(devices=4, dtype=torch.float64)
    plain = replace(
        heterofl(widths=(1.0, 0.5), static_norm=False, masked=False, label_rows=False, lr=0.1),
        select=Everyone(),
    )

    def first(aggregate: Mean | AngleWeighted | Subset) -> Aggregated:
        step = small.steps(replace(plain, aggregate=aggregate), task, 1, fleet=TWO_LEVELS)[0]
        return Aggregated(step.params, None, dict(step.diagnostics))

    arrivals = first(Spied("samples")).diagnostics["arrivals"]
    rows, masks = rows_of(arrivals)
    assert 0 < masks.all(axis=0).sum() < masks.any(axis=0).sum()  # slices really differ
    weights = arrivals.samples / arrivals.samples.sum()
    mass = weights @ masks
    mean = np.divide(weights @ (rows * masks), mass, out=np.zeros(len(mass)), where=mass > 0)
    own = masks * mean
    expected = fedadp_angles(
        (rows * own).sum(axis=1), np.linalg.norm(rows, axis=1), np.linalg.norm(own, axis=1)
    )
    found = first(AngleWeighted()).diagnostics["angles"]
    assert [found[d] for d in range(4)] == pytest.approx(expected.tolist())
    shared = rows[:, masks.all(axis=0)]
    found = first(Subset()).diagnostics["alignment"]
    assert found == pytest.approx(update_alignment(shared @ shared.T, arrivals.samples))
    assert found != pytest.approx(update_alignment(rows @ rows.T, arrivals.samples), rel=1e-3)


# --- menus ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "parts", "words"),
    [
        (fedpmt(), {"choose": LargestInTime(5.0)}, r"needs a menu.*TrainedLayersMenu"),
        (heterofl(), {"choose": FisherUtility(target=1.0)}, r"needs a menu of 5.*with 5 sizes"),
        (whale(widths=(1.0, 0.5)), {"choose": FisherUtility()}, r"needs a menu of 5 sizes"),
        (whale(), {"plan": TargetSeconds(WidthMenu((1.0, 0.5)))}, r"needs a menu of 5 sizes"),
    ],
    ids=["depths", "no menu", "too many levels", "too few sizes"],
)
def test_a_chooser_needs_a_menu_of_its_size(
    method: Method, parts: dict[str, object], words: str
) -> None:
    with pytest.raises(CompositionError, match=words):
        replace(method, **parts)  # type: ignore[arg-type]


def test_who_declines_to_train_can_still_be_asked() -> None:
    for parts in (
        {"plan": WidthMenu(), "choose": MostGain(1e-9)},
        {"plan": Assigned(WidthMenu(), MostGain(1e-9))},
    ):
        method = replace(fedavg(count=3), schedule=Surveyed(Synchronous()), **parts)
        (step,) = small.steps(method, small.task(devices=4), 1, fleet=TWO_LEVELS)
        told = {(row.kind, row.failure.partition(":")[0]) for row in small.rows(step)}
        assert told == {("train", "over budget"), ("evaluate", "")}
        assert len(step.replies) == 4


def test_menus_go_downwards() -> None:
    with pytest.raises(ValueError, match=r"WidthMenu\.widths must go downwards"):
        WidthMenu((0.25, 1.0, 0.5))


def test_shares_by_level_go_downwards_because_the_first_level_is_the_strongest() -> None:
    for make in (WidthByLevel, lambda shares: heterofl(widths=shares)):
        with pytest.raises(ValueError, match=r"WidthByLevel\.widths must .* Write \(1\.0, 0\.25\)"):
            make((0.25, 1.0))
    assert WidthByLevel((0.5, 0.5, 0.25)).widths == (0.5, 0.5, 0.25)
    assert LargestFitting((0.25, 1.0)).widths == (0.25, 1.0)  # the order has no meaning there


def test_who_trains_only_the_output_layer_has_no_channels_to_report() -> None:
    base = replace(fedpmt(depths=None, count=8, lr=0.1, batch_size=8), select=Everyone())
    fleet = levels(speeds=(1e9, 5e8, 2e8, 1e8))
    for method in (
        replace(base, extract=FisherBlocks(4)),
        replace(base, aggregate=Diagnosed(reported=("channels",), measures=(Fisher(),))),
    ):
        step = small.steps(method, small.task(), 2, fleet=fleet)[-1]
        assert set(step.ledger.first_trained_layer.tolist()) == {0, 1, 2, 3}
        assert not any(row.failure for row in small.rows(step))


def test_only_a_single_number_can_be_the_largest() -> None:
    with pytest.raises(ValueError, match=r"Largest\.number"):
        Largest(4, 2, "channels", (Fisher(),))
