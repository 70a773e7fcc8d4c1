"""Every recipe is valid, and every network with every method runs, on data of the right shapes."""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from anyfleet.evidence.items import Item
from anyfleet.evidence.library import Library
from anyfleet.evidence.reproducing import Extent, reproduction
from anyfleet.experiment import from_source, prepare
from anyfleet.runtime import Sequential
from tests.helpers.sets import write_cifar, write_har, write_idx, write_shakespeare

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = Library(ROOT)


@cache
def item(name: str) -> Item:
    return LIBRARY.item(name)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("data")
    write_idx(folder / "fashion-mnist", train=6000, test=1000)
    write_idx(folder / "mnist", train=6000, test=1000)
    write_cifar(folder / "cifar-10-batches-bin", rows=1200)
    write_har(folder / "har", windows=60)
    write_shakespeare(folder / "shakespeare", speakers=30, length=2000)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ANYFLEET_DATA", str(folder))
        yield folder


def test_a_method_that_reports_its_best_setting_is_played_with_all_of_them() -> None:
    found = item("fedrescue/table_4")
    asked = reproduction(found, Extent(1, methods=("FjORD",)))
    assert {method for _, method in asked.names} == set(found.best["FjORD"])


@pytest.mark.parametrize("name", LIBRARY.names())
def test_every_recipe_is_valid(name: str) -> None:
    found = item(name)
    experiments = found.experiments()
    assert experiments or found.calculate
    assert found.experiments(quick=True).keys() == experiments.keys()
    assert found.explains is None or found.explains in LIBRARY.names()
    head = (ROOT / "recipes" / f"{name}.toml").read_text(encoding="utf-8")
    assert head.startswith(f"# anyfleet reproduce {name}\n#\n")


def _pairs() -> dict[str, tuple[str, str, str]]:
    """Return an item, a case and a method for every pair of network and method in the recipes."""
    found: dict[str, tuple[str, str, str]] = {}
    for name in LIBRARY.names():
        own = item(name)
        for case, column in own.pairs() if not own.calculate else ():
            data = own.source(case, column, quick=True).data
            task, method = data["task"], data["method"]["use"]
            network = task.get("model", {}).get("use", task["use"])
            found.setdefault(f"{network} {method}", (name, case.name, column.name))
    return found


PAIRS = _pairs()


@pytest.mark.parametrize("pair", PAIRS)
def test_every_network_with_every_method_runs_a_round(data: Path, pair: str) -> None:
    name, case, method = PAIRS[pair]
    own = item(name)
    source = own.source(own.cases[case], own.methods[method], quick=True)
    small = replace(from_source(source), rounds=1, engine=Sequential(), device="cpu")
    (result,) = prepare(small).play(None)
    assert result.record.evaluated()
