"""Plans: few different sizes and menus, and the number of each device's own."""

import numpy as np
import pytest

from anyfleet.core.messages import Hyperparameters, SubModelSize
from anyfleet.core.plans import Plans
from anyfleet.parts.train import Gradient

DEVICES = np.array([7, 3, 5, 1])


def given() -> Hyperparameters:
    return Gradient(batch_size=8).hyperparameters(0, np.full(len(DEVICES), 20))


def plans() -> Plans:
    return Plans.whole_model(DEVICES, given())


def sizes_of(found: Plans) -> list[SubModelSize]:
    return [found.size_of(row) for row in range(len(found))]


def test_at_first_every_device_trains_the_whole_model() -> None:
    assert sizes_of(plans()) == [SubModelSize()] * 4
    assert plans().menu_of(2) == ()
    assert plans().options_of(2) == (SubModelSize(),)
    assert plans().declined == ("",) * 4


def test_widths_that_are_equal_are_one_size() -> None:
    found = plans().with_widths([0.5, 1.0, 0.5, 0.25])
    assert found.sub_model_sizes == tuple(SubModelSize(width) for width in (0.5, 1.0, 0.25))
    assert found.size_index.tolist() == [0, 1, 0, 2]
    assert plans().with_widths(0.5).sub_model_sizes == (SubModelSize(0.5),)


def test_what_else_a_size_has_stays() -> None:
    layered = plans().with_first_trained_layers([0, 1, 0, 1])
    found = layered.with_widths([0.5, 0.5, 1.0, 0.5], rounding="round")
    assert [(size.width, size.first_trained_layer) for size in sizes_of(found)] == [
        (0.5, 0),
        (0.5, 1),
        (1.0, 0),
        (0.5, 1),
    ]
    assert {size.rounding for size in found.sub_model_sizes} == {"round"}
    assert len(found.sub_model_sizes) == 3


def test_sizes_device_by_device_or_by_number() -> None:
    small, large = SubModelSize(0.25), SubModelSize(1.0)
    one_by_one = plans().with_sizes([small, large, large, small])
    by_number = plans().with_sizes([small, large], np.array([0, 1, 1, 0]))
    assert sizes_of(one_by_one) == sizes_of(by_number) == [small, large, large, small]
    assert len(one_by_one.sub_model_sizes) == 2


def test_menus_for_all_for_some_and_for_none() -> None:
    entries = [SubModelSize(1.0), SubModelSize(0.5)]
    assert plans().with_menu(entries).menu_of(3) == tuple(entries)
    found = plans().with_menus([entries, entries[1:]], np.array([0, 1, -1, 0]))
    assert [len(found.menu_of(row)) for row in range(4)] == [2, 1, 0, 2]
    assert found.options_of(1) == (SubModelSize(0.5),)
    assert found.options_of(2) == (SubModelSize(),)
    assert found.with_widths(0.5).menu_of(0) == tuple(entries)  # a device with a menu keeps it
    assert not any(map(found.without_menus().menu_of, range(4)))


def test_hyperparameters_as_arrays_or_as_one_number() -> None:
    found = plans().with_hyperparameters(lr=[0.1, 0.2, 0.3, 0.4], epochs=2, frequency=10**9)
    own = found.hyperparameters
    assert own.lr.tolist() == [0.1, 0.2, 0.3, 0.4]
    assert own.epochs.tolist() == [2] * 4
    assert own.frequency.dtype == np.float64
    assert own.batch_size.tolist() == [8] * 4
    assert given().epochs.tolist() != [2] * 4


def test_a_hyperparameter_that_is_none_names_the_one_that_is_meant() -> None:
    with pytest.raises(TypeError, match=r"no hyperparameter 'learning_rate', did you mean \"lr\""):
        plans().with_hyperparameters(learning_rate=0.1)
    with pytest.raises(TypeError, match="same_kind"):
        plans().with_hyperparameters(epochs=1.5)


def test_who_is_declined_twice_keeps_the_first_reason() -> None:
    found = plans().declining([True, False, False, True], "no battery")
    assert found.declined == ("no battery", "", "", "no battery")
    assert found.declining(np.array([True, True, False, False]), "late").declined == (
        "no battery",
        "late",
        "",
        "no battery",
    )


def test_rows_keep_what_belongs_to_them() -> None:
    whole = (
        plans()
        .with_widths([1.0, 0.5, 0.25, 0.5])
        .with_menus([[SubModelSize(0.1)]], np.array([-1, 0, -1, 0]))
        .with_hyperparameters(lr=[0.1, 0.2, 0.3, 0.4])
        .declining([False, True, False, False], "late")
    )
    found = whole.take([3, 1])
    assert found.device.tolist() == [1, 3]
    assert [size.width for size in sizes_of(found)] == [0.5, 0.5]
    assert [found.menu_of(row) for row in range(2)] == [(SubModelSize(0.1),)] * 2
    assert found.hyperparameters.lr.tolist() == [0.4, 0.2]
    assert found.declined == ("", "late")
