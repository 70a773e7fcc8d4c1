"""What a run tells about its method."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from anyfleet.analysis import diagnosis
from anyfleet.arrays import join
from anyfleet.core.ledger import Ledger
from anyfleet.errors import ConfigError
from anyfleet.experiment import Experiment, RoundRecord, play, populate
from anyfleet.measure import Fisher
from anyfleet.methods import fedavg, fedpns, whale
from anyfleet.parts.aggregate import Diagnosed, Subset
from anyfleet.parts.choose import FisherUtility
from anyfleet.parts.plan import WidthByLevel
from anyfleet.parts.schedule import Deadline
from anyfleet.parts.select import Everyone, Uniform
from anyfleet.runtime import Sequential
from anyfleet.store import Recording, read_rounds
from anyfleet.tasks import Data, Embedded, Split, Task, XClass
from anyfleet.world import Fleet, Group, levels
from tests.helpers import small


def ledger(**columns: object) -> Ledger:
    """Rows of a real ledger, with some columns replaced."""
    rows = small.steps(replace(fedavg(), select=Everyone()), small.task(), 1)[0].ledger
    return replace(rows, **columns)  # type: ignore[arg-type]


def test_f_1_psi_of_the_updates_in_a_ledger() -> None:
    depths = np.array([3, 3, 2, 2, 1, 1, 0, 0])
    four = (0, 1, 2, 3)
    assert (
        diagnosis.trained_layers_distribution(ledger(first_trained_layer=depths), four).tolist()
        == [0.25] * 4
    )
    assert diagnosis.trained_layers_psi(ledger(first_trained_layer=depths), four) == pytest.approx(
        8.333333333333332
    )
    assert (
        diagnosis.trained_layers_psi(ledger(first_trained_layer=np.zeros(8, dtype=int)), four)
        == 4.0
    )
    assert (
        diagnosis.trained_layers_psi(ledger(first_trained_layer=np.ones(8, dtype=int)), (0, 1))
        == math.inf
    )
    # Orders that failed trained nothing.
    failure = ("",) * 6 + ("died",) * 2
    assert (
        diagnosis.trained_layers_psi(ledger(first_trained_layer=depths, failure=failure), four)
        == math.inf
    )


def test_f_5_label_distances() -> None:
    split = Split(devices=4, partition=XClass(2, samples=30), seed=1)
    made = Task.of(small.net(), small.patterns(400, 1), small.patterns(50, 2), split=split)
    found = diagnosis.label_distances(made)
    labels = [made.data(device).y for device in range(4)]
    everything = torch.cat(labels)
    all_ = torch.bincount(everything, minlength=10) / len(everything)
    own = torch.bincount(labels[2], minlength=10) / len(labels[2])
    assert found[2] == pytest.approx(float((own - all_).abs().sum()), rel=1e-6)
    assert (found > 1).all()


def test_1_18_counts_of_devices_that_were_selected_labelled_and_excluded() -> None:
    class Step:
        def __init__(self, **diagnostics: list[int]) -> None:
            self.diagnostics = diagnostics

    rows = ledger()
    found = diagnosis.contributions(
        join([rows, rows]), [Step(labelled=[3, 5], excluded=[5]), Step(labelled=[3])]
    )
    assert len(found) == 8
    assert found[3] == diagnosis.Contribution(2, 2, 0)
    assert found[5] == diagnosis.Contribution(2, 1, 1)
    assert found[0] == diagnosis.Contribution(2, 0, 0)


def test_information_by_step() -> None:
    utility = np.array([np.nan, 0.5, 1.0, np.nan, np.nan, np.nan, np.nan, np.nan])
    (found,) = diagnosis.information(ledger(utility=utility, width=np.full(8, 0.25)))
    assert (found.round_index, found.utility, found.width) == (0, 0.75, 0.25)
    assert math.isnan(found.fisher)


def test_information_is_of_those_who_trained_and_counted() -> None:
    """Not of surveys, fetches and answers that were lost."""
    kinds = ("train", "hold", "evaluate", "fetch", "train", "hold", "train", "train")
    lost = ("",) * 4 + ("died", "late", "", "")
    values = np.array([1.0, 2.0, 50.0, 50.0, 50.0, 50.0, 3.0, 6.0])
    shares = np.array([1.0, 0.5, 0.1, 0.1, 0.25, 0.25, 0.125, 0.125])
    rows = ledger(kind=kinds, failure=lost, fisher=values, utility=values / 100, width=shares)
    (found,) = diagnosis.information(rows)
    assert found.fisher == 3.0
    assert found.utility == pytest.approx(0.03)
    assert found.width == pytest.approx(1.75 / 4)
    # A quarter was planned too, so that an eighth is level 4; the share of surveys is no level.
    assert found.level == (1 + 2 + 4 + 4) / 4
    nobody = diagnosis.information(replace(rows, failure=("died",) * 8))[0]
    assert math.isnan(nobody.level)


def test_levels_of_one_width_go_by_depth() -> None:
    (found,) = diagnosis.information(ledger(first_trained_layer=np.array([0, 0, 0, 0, 2, 2, 1, 1])))
    assert found.level == (4 * 1 + 2 * 2 + 2 * 3) / 8


def test_f_2_fewest_devices_of_a_region_over_a_run() -> None:
    base = replace(fedavg(count=3, lr=0.1, batch_size=8), plan=WidthByLevel((1.0, 0.5)))
    method = replace(base, aggregate=Diagnosed(base.aggregate))
    steps = small.steps(method, small.task(), 6, fleet=Fleet((Group(), Group())))
    # Only those with the whole model trained its second half; without them, all trained the first.
    trained = [int((step.ledger.width == 1).sum()) or 3 for step in steps]
    assert len(set(trained)) > 1
    assert diagnosis.fewest_trainers(steps) == min(trained)
    assert [diagnosis.fewest_trainers([step]) for step in steps] == trained
    assert diagnosis.fewest_trainers(small.steps(base, small.task(), 1)) is None


def test_1_18_who_was_not_asked_was_not_selected() -> None:
    """One that dies half-way was asked; one without room for the model was not."""
    fleet = Fleet((Group(), Group(mortality=1.0), Group(memory=1.0)))
    (step,) = small.steps(replace(fedavg(), select=Everyone()), small.task(), 1, fleet=fleet)
    rows = step.ledger
    assert rows.level[~rows.counted].min() == 1
    asked = rows.device[rows.level < 2].tolist()
    found = diagnosis.contributions(rows, [step])
    assert found == {device: diagnosis.Contribution(1, 0, 0) for device in sorted(asked)}


def test_fisher_information_is_a_column_where_it_is_asked_for() -> None:
    base = fedavg(count=4, lr=0.1, batch_size=8)
    method = replace(
        base, aggregate=Diagnosed(base.aggregate, reported=("fisher", "norm"), measures=(Fisher(),))
    )
    steps = small.steps(method, small.task(), 2)
    assert small.identical(steps[-1].params, small.steps(base, small.task(), 2)[-1].params)
    assert (steps[0].ledger.fisher > 0).all()
    assert steps[0].ledger.norm.tolist() == pytest.approx(
        list(steps[0].diagnostics["norms"].values())
    )
    (found,) = diagnosis.information(steps[0].ledger)
    assert found.fisher == pytest.approx(steps[0].ledger.fisher.mean())
    plain = small.steps(base, small.task(), 1)[0].ledger
    assert (steps[0].ledger.bits_up == plain.bits_up + 64).all()
    assert (steps[0].ledger.flops > plain.flops).all()


def test_1_10_a_threshold_that_leaves_no_choice_is_told() -> None:
    extreme = np.array([1.0] * 7 + [0.0])
    assert "100% of the utilities" in diagnosis.unfit_threshold(ledger(utility=extreme))
    assert not diagnosis.unfit_threshold(ledger(utility=np.linspace(0.1, 0.9, 8)))
    assert not diagnosis.unfit_threshold(ledger())


def test_1_10_choices_of_first_visits_are_told() -> None:
    """Half of the devices had no history, and took their cap."""
    choice = np.zeros(8, dtype=int)
    few = np.where(np.arange(8) < 3, math.nan, 0.5)
    half = np.where(np.arange(8) < 4, math.nan, 0.5)
    assert diagnosis.first_visits(ledger(choice=choice, utility=few), whale()) == ""
    told = diagnosis.first_visits(ledger(choice=choice, utility=half), whale())
    assert "In 4 of 8 choices" in told
    assert "its cap" in told
    assert "more rounds, fewer devices" in told
    every = ledger(choice=choice, utility=np.full(8, math.nan))
    assert "In all 8 choices" in diagnosis.first_visits(every, whale())
    low = whale(utility=FisherUtility(first_level=5))
    assert "took that of first_level" in diagnosis.first_visits(every, low)
    assert diagnosis.first_visits(every, fedavg()) == ""  # whose devices choose nothing
    assert diagnosis.first_visits(ledger(), whale()) == ""  # nobody chose


def test_1_10_a_short_run_of_whale_says_that_it_is_its_cap() -> None:
    method = replace(whale(widths=(1.0, 0.5), lr=0.1, batch_size=8), select=Uniform(3))
    fleet = Fleet((Group(level=0), Group(level=1)))
    (step,) = small.steps(method, small.task(), 1, fleet=fleet)
    assert "In all 3 choices" in diagnosis.first_visits(step.ledger, method)
    caps = np.where(step.ledger.level == 0, 1.0, 0.5)
    assert step.ledger.width.tolist() == caps.tolist()


# --- why nothing was learned ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lost", "told"),
    [
        ("died", "(8 died): the model is as it began. Died: lower the mortality"),
        ("went offline", "Went offline: let devices stay longer (availability)"),
        ("no link", "No link: give the groups of the fleet links"),
        ("battery empty", "larger batteries"),
        ("stale", "a larger staleness"),
        ("nothing came through", "lower the loss of the fleet's links"),
        (
            "out of memory: needs 5.2 MB, has 1 MB",
            "or give devices more memory (needs 5.2 MB, has 1 MB).",
        ),
        ("over budget: no size fits 0.1 s", "(8 over budget)"),
        ("refused: not finite: 0.weight", "lower method.lr (0.1 in this run)."),
        ("refused: norm: 9 is above 3", "lower method.lr (0.1 in this run), or raise limits.norm."),
        ("refused: samples: 9 of 3", "(8 refused)"),
        ("a reason of one's own: 3", "see the reasons in ledger.jsonl"),
    ],
)
def test_a_run_in_which_everything_was_lost_says_why_and_what_to_change(
    lost: str, told: str
) -> None:
    rows = ledger(failure=(lost,) * 8, lr=np.full(8, 0.1))
    found = diagnosis.nothing_counted(rows)
    assert "None of the 8 orders brought an update that counted" in found
    assert told in found


def test_the_commonest_reasons_get_advice() -> None:
    lost = ("died",) * 2 + ("too late",) * 5 + ("no link",)
    found = diagnosis.nothing_counted(ledger(failure=lost), np.array([4.0, 1.0, 2.0, 3.0, 7.5]))
    assert "(5 too late, 2 died, 1 no link)" in found
    assert "about 3 s would do for half of these orders, 7.5 s for all. Died: lower" in found
    assert "No link:" not in found


def test_updates_that_the_server_refused_or_held_get_advice() -> None:
    size = "refused: size: a change of 3 a coordinate, above 200 × the median 0.001"
    held = "held: the new model is not finite: 4.weight"
    found = diagnosis.nothing_counted(ledger(failure=(size,) * 5 + (held,) * 3))
    assert "(5 refused: size, 3 held)" in found
    assert "Refused: size: lower method.lr (0.01 in this run) or, if it is few devices, " in found
    assert "(device 0, 1, 2, 3, 4). Held: lower method.lr" in found
    assert "look at the aggregate" in found
    assert "(device 0, 1, 2, 3, 4, …)" in diagnosis.nothing_counted(ledger(failure=(size,) * 8))


def test_one_update_is_something_and_a_survey_is_none() -> None:
    lost = ("died",) * 7
    assert diagnosis.nothing_counted(ledger(failure=(*lost, ""))) == ""
    surveyed = ("train",) * 7 + ("evaluate",)
    assert "None of the 7 orders" in diagnosis.nothing_counted(
        ledger(failure=(*lost, ""), kind=surveyed)
    )
    # Results that wait on devices for ever are none either.
    held = ledger(kind=("hold",) * 8)
    assert "(none was fetched)" in diagnosis.nothing_counted(held)
    nobody = ledger().take([])
    assert "No device was ever asked to train" in diagnosis.nothing_counted(nobody)


def test_the_seconds_that_would_have_been_enough_are_enough() -> None:
    task, fleet = small.task(), levels(speeds=(1e9, 1e8))
    method = replace(fedavg(lr=0.1, batch_size=8), select=Everyone(), schedule=Deadline(1e-6))
    (step,) = small.steps(method, task, 1, fleet=fleet)
    assert set(step.ledger.failure) == {"too late"}
    needed = diagnosis.seconds_needed(step.ledger, method, task, small.world(task, fleet))
    assert len(needed) == 8

    def lost(seconds: float) -> int:
        other = replace(method, schedule=Deadline(seconds))
        return int((~small.steps(other, task, 1, fleet=fleet)[0].ledger.counted).sum())

    assert lost(1.001 * needed.max()) == 0
    assert lost(0.999 * needed.max()) > 0
    assert lost(0.999 * needed.min()) == 8


def scored(*losses: float) -> list[RoundRecord]:
    start = RoundRecord(0, 0.0, 0.0, 0.0, 0.0, 0.0, 1, 0, 1.0, math.nan)
    return [replace(start, scores={"loss": loss}) for loss in losses]


@pytest.mark.parametrize(
    ("losses", "start", "told"),
    [
        ((2.0, math.nan), 2.3, "is not a number at the end"),
        ((2.0, math.inf), 2.3, "is infinite at the end"),
        ((1e9, 1e8), 2.3, "times the initial model's (2.3)"),
        ((0.4, 0.1, 1.1), math.nan, "is 1.1 at the end, 11 times the lowest (0.1)"),
        ((2.0, 0.1, 1.1), 2.3, ""),  # worse again, but far from where it began
        ((2.0, 1.0), 2.3, ""),
        ((20.0,), 2.3, ""),
        ((24.0,), 2.3, "10.4 times the initial model's"),
        ((), 2.3, ""),
        ((0.4, 0.1, 1.1), 2.3, ""),  # the initial model was worse
        ((-1.0, -2.0, -3.0), -0.5, ""),  # a density that is learned
        ((-3.0, -1.0), -2.0, ""),
        ((0.1, 0.0, 0.2), 0.3, ""),
        ((0.0, 0.0, 0.2), 0.0, ""),
        ((0.2,), 0.0, ""),
        ((-4000.0, 2000.0), -3000.0, ""),  # of images, say: not ten times as much
        ((-1.0, 1e8), -0.5, "is 1e+08 at the end, 1e+08 above the initial model's (-0.5)"),
        ((-1.0, 1e4), math.nan, "is 1e+04 at the end, 1e+04 above the lowest (-1)"),
        ((math.nan, math.nan, 3.0), 2.0, ""),
        ((1.0, -math.inf, 2.0), math.nan, ""),
    ],
)
def test_a_loss_that_explodes_is_told_with_the_learning_rate(
    losses: tuple[float, ...], start: float, told: str
) -> None:
    found = diagnosis.exploded(scored(*losses), ledger(lr=np.full(8, 5.0)), start)
    assert told in found
    assert bool(found) == bool(told)
    assert ("lower method.lr (5 in this run)." in found) == bool(told)


def test_refused_results_are_an_explosion_too() -> None:
    lost = ("refused: not finite: 0.weight",) * 5 + ("",) * 3
    found = diagnosis.exploded(scored(2.0, 1.9), ledger(failure=lost), 2.3)
    assert "5 of 8 orders brought numbers that are not finite" in found
    half = ("refused: not finite: 0.weight",) * 4 + ("",) * 4
    assert diagnosis.exploded(scored(2.0, 1.9), ledger(failure=half), 2.3) == ""


def test_what_measuring_costs_is_told() -> None:
    task = small.task(norm=False)
    method = whale(lr=0.1, batch_size=8)
    assert diagnosis.measuring_share(method, task) == pytest.approx(1.0)
    assert "adds 100% to its work" in diagnosis.measuring(method, task)
    seldom = whale(lr=0.1, batch_size=8, fisher=Fisher(every=5, samples=4))
    # Of 30 samples in four steps, 4 of the first.
    assert diagnosis.measuring_share(seldom, task) == pytest.approx(4 / 30)
    assert diagnosis.measuring(fedavg(), task) == ""


def test_diagnostics_are_plain_data_and_come_back() -> None:
    notes = {
        "angles": {3: 0.5, 11: math.nan},
        "labelled": np.array([3, 4]),
        "entropy": np.float64(1.5),
        "model": torch.ones(2),
    }
    plain = diagnosis.plain_diagnostics(notes)
    assert plain.keys() == {"angles", "labelled", "entropy"}
    assert plain["labelled"] == [3, 4]
    read = diagnosis.read_diagnostics({"angles": {"3": 0.5, "11": None}, "labelled": [3, 4]})
    assert read["angles"][3] == 0.5
    assert math.isnan(read["angles"][11])


def test_a_run_folder_has_the_notes_of_its_steps(tmp_path: Path) -> None:
    base = fedpns(count=4, lr=0.1, batch_size=8)
    method = replace(base, aggregate=Diagnosed(base.aggregate))
    task = Embedded(devices=6, server=50, limit=400)
    experiment = Experiment(task, method, rounds=2, engine=Sequential())
    with Recording(tmp_path, experiment) as recording:
        for result in play(experiment):
            recording.append(result)
    points = read_rounds(tmp_path)
    assert len(points) == 2
    assert 0 < points[-1].diagnostics["coverage"] <= 1
    assert len(points[0].diagnostics["norms"]) == 4
    assert all(isinstance(device, int) for device in points[0].diagnostics["norms"])


def test_what_judges_needs_a_server_split() -> None:
    split = Split(devices=4, server=0, seed=1)
    made = Task.of(small.net(), small.patterns(200, 1), small.patterns(50, 2), split=split)
    experiment = Experiment(made, replace(fedavg(), aggregate=Subset()), rounds=1)
    with pytest.raises(ConfigError, match="loss on the server"):
        populate(experiment, made)


def test_fisher_information_needs_classes() -> None:
    x = torch.randn(60, 3)
    made = Task.of(
        nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 1)),
        Data(x, x[:, :1]),
        loss=lambda output, target: (output - target).square().mean(dim=1),
        split=Split(devices=4),
    )
    chosen = FisherUtility(target=1.0)
    experiment = Experiment(
        made, replace(whale(), choose=chosen), fleet=levels(speeds=(1e9,)), rounds=1
    )
    with pytest.raises(ConfigError, match="Fisher information is measured with labels"):
        populate(experiment, made)
    constant = FisherUtility(levels=5, effectiveness="constant", target=1.0)
    populate(replace(experiment, method=replace(whale(), choose=constant)), made)
