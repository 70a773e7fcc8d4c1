import importlib
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anyfleet.errors import BadName
from anyfleet.names import HOMES, Factory, FrozenMapping, find, name_of, near
from anyfleet.parts.select import Uniform


def test_find_gives_what_name_of_named() -> None:
    assert name_of(Factory) == "anyfleet.names:Factory"
    assert find(name_of(Uniform), homes=["anyfleet.parts.select"]) is Uniform
    assert find("anyfleet.parts.select.uniform:Uniform", homes=["anyfleet.parts.select"]) is Uniform


def test_name_of_prefers_the_package_that_shows_the_thing() -> None:
    from anyfleet.config import Source

    assert Source.__module__ == "anyfleet.config.run_files"
    assert name_of(Source) == "anyfleet.config:Source"


@pytest.mark.parametrize(
    "name",
    [
        "os:system",
        "builtins:eval",
        "subprocess:run",
        "anyfleetter.thing:Name",
        "anyfleet.config:os.system",
        "anyfleet.names:importlib",
        "anyfleet.names:dataclass",
        "anyfleet.names:Mapping",
        "anyfleet.names:_look_up",
        "anyfleet.names:__builtins__",
        "anyfleet.names:__import__",
        "__main__:x",
        "anyfleet.names",
        "anyfleet..naming:find",
        ".naming:find",
        "anyfleet.names:",
        "",
        "anyfleet.names:find\n",
        "anyfleet.experiment:load",
        "anyfleet.experiment:Experiment",
        "anyfleet:load",
        "anyfleet.cli.demo:demonstrate",
        "anyfleet.cli.app:main",
        "anyfleet.store:Recording",
        "anyfleet.store.disk:write",
        "anyfleet.config:read",
        "anyfleet.analysis.plots:draw",
        "anyfleet.parts.select.uniform:Everybody",  # not there
        "anyfleet.parts.select.largest:Uniform",  # there, but defined elsewhere
        "anyfleet.tasks.zoo:nn",
        "anyfleet.tasks.zoo.simple:nn",
        "anyfleet.parts.codec.raw:distortion",  # defined there, but not exported by the home
    ],
)
def test_find_refuses_what_no_home_exports(name: str) -> None:
    for allow in ([], ["anyfleet"], ["anyfleet.experiment", "anyfleet.cli", "anyfleet.store"]):
        with pytest.raises(BadName):
            find(name, allow, HOMES.values())


def test_a_home_opens_its_own_exports_only() -> None:
    with pytest.raises(BadName, match="is no part that may stand here"):
        find("anyfleet.parts.select:Uniform")
    with pytest.raises(BadName, match="is no part that may stand here"):
        find("anyfleet.parts.select:Uniform", homes=["anyfleet.world"])


def test_what_an_allowed_module_imported_from_anyfleet_needs_a_home_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "from anyfleet.parts.select import Uniform\nfrom anyfleet.experiment import load\n"
    (tmp_path / "reexporting.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    homes = ["anyfleet.parts.select"]
    assert find("reexporting:Uniform", ["reexporting"], homes) is Uniform
    with pytest.raises(BadName, match="is no part that may stand here"):
        find("reexporting:load", ["reexporting"], homes)


def test_the_standard_library_cannot_be_allowed() -> None:
    with pytest.raises(BadName, match="subprocess belongs to Python itself"):
        find("subprocess:getoutput", ["subprocess"])


def test_find_refuses_before_it_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    imported: list[str] = []
    monkeypatch.setattr(importlib, "import_module", imported.append)
    with pytest.raises(BadName, match="outside the allowed packages"):
        find("antigravity_of_ones_own:fly")
    assert imported == []


def test_an_allowed_package_opens_itself_and_its_modules_only() -> None:
    assert find("tests.helpers.sample_parts:Few", allow=["tests"]).__name__ == "Few"
    with pytest.raises(BadName, match="outside"):
        find("tests.helpers.sample_parts:Few", allow=["tests.helpers.sample"])


def test_a_part_may_be_named_as_it_is_imported() -> None:
    home = ["anyfleet.parts.select"]
    assert find("anyfleet.parts:Uniform", homes=home) is Uniform
    assert name_of(Uniform) == "anyfleet.parts.select:Uniform"
    for name in ("anyfleet.parts:Mean", "anyfleet.parts:View", "anyfleet.parts:try_aggregate"):
        with pytest.raises(BadName, match="no part that may stand here"):
            find(name, homes=home)
    with pytest.raises(BadName, match="no part that may stand here"):
        find("anyfleet.parts:Fleet", homes=["anyfleet.world"])


def test_find_says_what_is_near() -> None:
    with pytest.raises(BadName, match=re.escape('did you mean "Uniform"?')):
        find("anyfleet.parts.select:Uniforn", homes=["anyfleet.parts.select"])


def test_a_module_that_is_not_there_is_named() -> None:
    with pytest.raises(BadName, match=r"tests\.nothing cannot be imported"):
        find("tests.nothing:Name", allow=["tests"])


def test_name_of_refuses_what_cannot_be_found_again() -> None:
    def local() -> None: ...

    with pytest.raises(BadName, match="top of a module"):
        name_of(local)
    with pytest.raises(BadName, match="top of a module"):
        name_of(lambda: None)


def test_factory_makes_a_new_object_every_time() -> None:
    factory = Factory("collections:Counter", {"a": 2})
    assert factory.make() == {"a": 2}
    assert factory.make() is not factory.make()


def test_factory_of_a_function() -> None:
    factory = Factory.of(FrozenMapping, items={"a": 1})
    assert factory.use == "anyfleet.names:FrozenMapping"
    assert factory.make() == {"a": 1}


def test_factories_are_values() -> None:
    one = Factory("m:f", {"a": [1, 2], "b": {"c": 3}})
    two = Factory("m:f", {"b": {"c": 3}, "a": (1, 2)})
    assert one == two
    assert hash(one) == hash(two)
    assert one != Factory("m:f", {"a": [1]})
    assert "'a': (1, 2)" in repr(one)


def test_factory_does_not_follow_later_changes() -> None:
    options = {"a": 1}
    factory = Factory("m:f", options)
    options["a"] = 2
    assert factory.options["a"] == 1


@pytest.mark.parametrize(("use", "options"), [("nothing", {}), ("m:f", {"use": "g"})])
def test_factory_refuses(use: str, options: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=r"use|name"):
        Factory(use, options)


@given(st.dictionaries(st.text(), st.lists(st.integers()) | st.dictionaries(st.text(), st.text())))
def test_frozen_mappings_equal_their_source(items: dict[str, list[int] | dict[str, str]]) -> None:
    frozen = FrozenMapping(items)
    assert hash(frozen) == hash(FrozenMapping(dict(reversed(items.items()))))
    assert set(frozen) == set(items)
    assert all(frozen[k] == (tuple(v) if isinstance(v, list) else v) for k, v in items.items())


def test_near_is_silent_without_neighbours() -> None:
    assert near("select", ["selects", "train"]) == ', did you mean "selects"?'
    assert near("zzz", ["train"]) == ""


def test_classes_are_meant_rather_than_their_modules() -> None:
    assert near("Stcc", ["stc", "Stc", "raw"]) == ', did you mean "Stc"?'
