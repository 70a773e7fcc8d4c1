import re
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anyfleet import names
from anyfleet.config import dump, load, override, read, to_toml
from anyfleet.errors import ConfigError
from anyfleet.experiment import Experiment
from anyfleet.names import Factory, name_of
from tests.helpers.sample_parts import (
    All,
    Colour,
    Few,
    Fleet,
    Method,
    Run,
    Select,
    Sgd,
    Train,
    Wrapper,
    make_net,
    plain_method,
)

HOME = "tests.helpers.sample_parts"
HOMES = {**names.HOMES, "method": HOME, "select": HOME, "train": HOME, "model": HOME}
ALLOW = ("tests",)


def loaded(data: Any, kind: Any = None) -> Any:
    return load(data, kind, allow=ALLOW, homes=HOMES)


def problems(data: Any, kind: Any = None) -> dict[str, str]:
    with pytest.raises(ConfigError) as caught:
        loaded(data, kind)
    return {problem.path: problem.message for problem in caught.value.problems}


def run_data(**changes: Any) -> dict[str, Any]:
    data = {
        "method": {"use": "fleet_method", "shares": [1, 0.5], "lr": 0.2},
        "fleet": {"name": "f", "model": {"use": "make_net", "width": 4}},
    }
    return data | changes


# --- what loads -------------------------------------------------------------------------------


def test_a_run_of_nested_parts() -> None:
    run = loaded(run_data(seed=3), Run)
    model = Factory(f"{HOME}:make_net", {"width": 4})
    assert run == Run(Method(Few(3), Sgd(lr=0.2)), Fleet("f", model), seed=3)
    assert run.fleet.model.make() == "4x2/None"


def test_full_names_need_no_home() -> None:
    assert load({"use": f"{HOME}:Few", "count": 2}, allow=ALLOW) == Few(2)


def test_keys_of_a_method_replace_fields_of_what_its_function_returns() -> None:
    data = {
        "use": "plain_method",
        "count": 9,
        "select": {"use": "Wrapper", "inner": {"use": "All"}},
        "train": {"momentum": 0.5},
    }
    assert loaded({"method": data} | {"fleet": run_data()["fleet"]}, Run).method == Method(
        Wrapper(All()), Sgd(lr=0.5, momentum=0.5)
    )


def test_a_table_without_use_changes_what_stands_there() -> None:
    assert loaded({"name": "f", "train": {"lr": 3}} | _model(), Fleet).train == Sgd(lr=3.0)


def _model() -> dict[str, Any]:
    return {"model": {"use": "make_net", "width": 1}}


def test_a_factory_may_be_a_bare_name() -> None:
    assert loaded({"model": "Sgd", "name": "f"}, Fleet).model == Factory(f"{HOME}:Sgd")


@pytest.mark.parametrize(
    ("key", "written", "value"),
    [
        ("sizes", [1, 2], (1, 2)),
        ("pair", [2, "b"], (2, "b")),
        ("groups", [{"count": 1}, {"count": 2}], (Few(1), Few(2))),
        ("ratios", 0.5, 0.5),
        ("ratios", 1, 1.0),
        ("ratios", {"a": 0.5}, {"a": 0.5}),
        ("table", {"x": {"count": 4}}, {"x": Few(4)}),
        ("tags", ["a", "b"], frozenset("ab")),
        ("colour", "blue", Colour.BLUE),
        ("folder", "here", Path("here")),
        ("metric", f"{HOME}:make_net", make_net),
        ("nested", [["a", [0.5]]], (("a", (0.5,)),)),
        ("limit", None, None),
        ("limit", "none", None),
        ("limit", {"use": "none"}, None),
        ("anything", {"use": f"{HOME}:Few", "count": 1}, Few(1)),
        ("anything", [{"a": 1}], ({"a": 1},)),
    ],
)
def test_every_kind_of_field(key: str, written: Any, value: Any) -> None:
    assert getattr(loaded({"name": "f", key: written} | _model(), Fleet), key) == value


def test_loaded_mappings_can_be_hashed() -> None:
    fleet = loaded({"name": "f", "ratios": {"a": 1.0}, "table": {}} | _model(), Fleet)
    assert isinstance(hash(fleet), int)


def test_a_schedule_tells_all_its_faults_each_at_its_key() -> None:
    home = "anyfleet.parts.schedule"
    buffered = {
        "use": f"{home}:Buffered",
        "concurrency": 0,
        "buffer_size": 0,
        "staleness": -1,
        "patience": 0,
    }
    assert problems(buffered).keys() == {"concurrency", "buffer_size", "staleness", "patience"}
    assert problems({**buffered, "buffer_size": "x"}).keys() == {
        "concurrency",
        "buffer_size",
        "staleness",
        "patience",
    }
    late = {"use": f"{home}:Deadline", "seconds": 0, "staleness": 3}
    assert problems(late).keys() == {"seconds", "staleness"}
    assert problems({"use": f"{home}:Overselected", "keep": 0, "patience": 0}).keys() == {
        "keep",
        "patience",
    }


def test_annotated_keyword_arguments_are_arguments() -> None:
    assert loaded({"use": f"{HOME}:rated_method", "a": 0.25, "b": 1}).train == Sgd(lr=1.25)
    assert problems({"use": f"{HOME}:rated_method", "a": "x"}).keys() == {"a"}


# --- what does not ----------------------------------------------------------------------------


def test_all_problems_come_at_once_with_their_paths() -> None:
    found = problems(
        {
            "method": {
                "use": "fleet_method",
                "shares": [1, "half", 0.5, True],
                "lr": 0.1,
                "selekt": {},
                "select": {"use": "Few", "cout": 5},
                "train": {"use": "Sgd", "lr": -1, "momentum": 2},
            },
            "fleet": {
                "model": {"use": "make_net", "depth": "deep"},
                "groups": [{"count": 1}, {"count": 0}],
                "colour": "green",
                "select": {"use": "os:system", "command": "true"},
                "train": {"use": "Nobody"},
            },
            "seed": 1.5,
            "sead": 1,
        },
        Run,
    )
    assert set(found) == {
        "method.shares.1",
        "method.shares.3",
        "method.selekt",
        "method.select.cout",
        "method.select.count",
        "method.train.lr",
        "method.train.momentum",
        "fleet.name",
        "fleet.model.width",
        "fleet.model.depth",
        "fleet.groups.1.count",
        "fleet.colour",
        "fleet.select.use",
        "fleet.train.use",
        "seed",
        "sead",
    }
    assert 'did you mean "select"' in found["method.selekt"]
    assert 'did you mean "seed"' in found["sead"]
    assert "is missing" in found["fleet.name"]
    assert "os belongs to Python itself" in found["fleet.select.use"]
    assert "at least 1, got 0" in found["fleet.groups.1.count"]


def test_fields_are_checked_although_an_argument_is_wrong() -> None:
    method = {"use": "plain_method", "lr": -1, "select": {"cuont": 2}, "train": {"momentum": "x"}}
    found = problems(run_data(method=method), Run)
    assert set(found) == {"method.lr", "method.select.cuont", "method.train.momentum"}


def test_a_bad_composition_is_found_next_to_an_unknown_key() -> None:
    method = {"use": "plain_method", "select": {"use": "All", "extra": 1}, "send": "weights"}
    with pytest.raises(ConfigError) as caught:
        loaded(run_data(method=method), Run)
    assert [str(problem) for problem in caught.value.problems] == [
        "method.select.extra: unknown key of All; there are: none.",
        "method: weights do not go with All.",
        "method: choose Few instead.",
    ]


def test_a_consequence_of_a_wrong_value_is_not_told() -> None:
    assert problems({"use": f"{HOME}:Sgd", "lowest": 20, "highest": "x"}).keys() == {"highest"}


def test_a_missing_use_lists_what_there_is() -> None:
    message = problems({"method": {"select": {}, "train": {}}, "fleet": {}}, Run)["method.select"]
    assert "`use` is missing" in message
    assert "All, Few" in message


def test_a_part_of_the_wrong_kind_is_refused() -> None:
    found = problems({"select": {"use": "Sgd"}, "train": {"use": "All"}}, Method)
    assert found["select.use"] == "Sgd is no Select: it lacks __call__, reports."
    assert found["train.use"] == "All is no Train."


def test_a_function_that_gives_the_wrong_kind_is_refused() -> None:
    found = problems({"select": {"use": "plain_method"}, "train": {"use": "Sgd"}}, Method)
    assert "Method is no Select" in found["select.use"]


def test_keywords_that_say_nothing_take_nothing() -> None:
    assert problems({"use": f"{HOME}:vague_method", "lr": 1.0}).keys() == {"lr"}


@pytest.mark.parametrize(
    ("key", "written"),
    [
        ("sizes", 3),
        ("sizes", [1.5]),
        ("sizes", [True]),
        ("pair", [1]),
        ("pair", ["b", 2]),
        ("ratios", "wide"),
        ("ratios", {"a": "b"}),
        ("table", [1]),
        ("limit", "some"),
        ("flag", 1),
        ("flag", "yes"),
        ("name", 3),
        ("metric", "os:system"),
        ("metric", 3),
        ("model", {"use": "plain_method", "send": "delta"}),
        ("model", 3),
        ("select", 3),
        ("derived", 3),
        ("groups", [{"use": "builtins:eval"}]),
    ],
)
def test_wrong_values_are_refused_where_they_stand(key: str, written: Any) -> None:
    found = problems({"name": "f"} | _model() | {key: written}, Fleet)
    assert all(path.startswith(key) for path in found), found


@pytest.mark.parametrize(
    "use",
    [
        "os:system",
        "builtins:eval",
        "anyfleet.names:importlib",
        "anyfleet.config:os.system",
        "anyfleet.names:__import__",
        "__main__:main",
        "tests.helpers.sample_parts:replace",
        "",
    ],
)
def test_code_outside_the_allowed_packages_is_not_reached(use: str) -> None:
    assert problems({"use": use}).keys() == {"use"}


def test_a_short_name_needs_a_home() -> None:
    assert problems({"use": "Few", "count": 1}).keys() == {"use"}


def test_without_allow_only_our_own_package_is_open() -> None:
    with pytest.raises(ConfigError, match="--allow tests"):
        load({"use": f"{HOME}:Few", "count": 1})


# --- round trips ------------------------------------------------------------------------------

counts = st.builds(Few, st.integers(1, 9), st.floats(0.01, 1))
selects = st.recursive(counts | st.just(All()), lambda inner: st.builds(Wrapper, inner))
numbers = st.floats(allow_nan=False, allow_infinity=False)
whole = st.integers(-(2**63), 2**63 - 1)
trains = st.builds(Sgd, lr=st.floats(1e-9, 1e9), steps=st.none() | whole, epochs=st.none() | whole)
fleets = st.builds(
    Fleet,
    name=st.text(),
    model=st.builds(
        lambda width, norm: Factory.of(make_net, width=width, norm=norm),
        whole,
        st.none() | st.text(),
    ),
    sizes=st.lists(whole).map(tuple),
    groups=st.lists(counts).map(tuple),
    ratios=numbers | st.dictionaries(st.text(), numbers),
    table=st.dictionaries(st.text(), counts),
    tags=st.frozensets(st.text()),
    colour=st.sampled_from(Colour),
    metric=st.sampled_from([None, make_net]),
    nested=st.lists(st.tuples(st.text(), st.lists(numbers).map(tuple))).map(tuple),
    select=selects,
    train=trains,
    limit=st.none() | numbers,
    flag=st.booleans(),
    anything=st.none() | st.text() | whole | counts,
)


@settings(max_examples=40)
@given(fleets)
def test_load_inverts_dump(fleet: Fleet) -> None:
    assert loaded(dump(fleet)) == fleet
    assert loaded(dump(fleet), Fleet) == fleet


@settings(max_examples=40)
@given(fleets)
def test_load_inverts_dump_through_toml(fleet: Fleet) -> None:
    assert loaded(tomllib.loads(to_toml(dump(fleet)))) == fleet


def test_dump_writes_what_differs_and_every_use() -> None:
    assert dump(plain_method(lr=0.1)) == {
        "use": name_of(Method),
        "select": {"use": f"{HOME}:Few", "count": 3},
        "train": {"use": f"{HOME}:Sgd"},
    }


def test_dump_says_what_cannot_be_written() -> None:
    fleet = Fleet("f", Factory.of(make_net), metric=lambda: 0, anything=(1, object()))
    with pytest.raises(ConfigError) as caught:
        dump(fleet)
    assert [problem.path for problem in caught.value.problems] == ["metric", "anything.1"]


def test_what_is_no_part_says_so_in_one_sentence() -> None:
    @dataclass(frozen=True)
    class Built:
        unwritable: ClassVar[str] = "built things stay at home."
        inside: object = object()

    with pytest.raises(ConfigError, match=r"^anything: built things stay at home\.$"):
        dump(Fleet("f", Factory.of(make_net), anything=Built()))


toml_values = st.recursive(
    st.text() | st.booleans() | whole | st.floats(allow_nan=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)


@settings(max_examples=40)
@given(st.dictionaries(st.text(), toml_values, max_size=5))
def test_toml_reads_as_it_was_written(data: dict[str, Any]) -> None:
    assert tomllib.loads(to_toml(data)) == data


# --- files and overrides ----------------------------------------------------------------------

FILE = f"""
seed = 4
[allow]
packages = ["tests"]
[method]
use = "{HOME}:plain_method"
[fleet]
name = "f"
model = {{ use = "{HOME}:make_net", width = 2 }}
groups = [{{ count = 1 }}]
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(FILE)
    return path


def test_read_a_file_with_overrides(file: Path) -> None:
    overrides = ["seed=7", "fleet.name=bare-word", "method.train.lr=0.25", "fleet.sizes=[1, 2]"]
    overrides += ["fleet.groups.0.count=5", "fleet.model.depth=3", 'method.send="weights"']
    run = read(file, overrides, ALLOW).load(Run)
    assert (run.seed, run.fleet.name, run.fleet.sizes) == (7, "bare-word", (1, 2))
    assert run.method == Method(Few(3), Sgd(lr=0.25), send="weights")
    assert run.fleet.groups == (Few(5),)
    assert run.fleet.model.options == {"width": 2, "depth": 3}


def test_an_override_of_an_unknown_path_says_what_is_near(file: Path) -> None:
    with pytest.raises(ConfigError, match=r'method\.train\.momentun.*did you mean "momentum"'):
        read(file, ["method.train.momentun=0.5"], ALLOW).load(Run)


def test_bad_overrides_come_all_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        override({"a": 1, "b": [1]}, ["a.c=2", "nothing", "b.3=1", "x=[1", ".y=1", "z=1 2"])
    assert [p.path for p in caught.value.problems] == ["a.c", "nothing", "b.3", "x", ".y=1", "z"]


def test_bad_overrides_do_not_hide_the_problems_of_the_file(file: Path) -> None:
    file.write_text(FILE.replace("seed = 4", "sead = 4").replace('name = "f"', "name = 3"))
    with pytest.raises(ConfigError) as caught:
        read(file, ["nothing", "fleet.sizes=[1", "fleet.colour=green"], ALLOW).load(Run)
    found = [problem.path for problem in caught.value.problems]
    assert found[:2] == ["nothing", "fleet.sizes"]
    assert set(found[2:]) == {"sead", "fleet.name", "fleet.colour"}
    file.write_text(FILE)
    with pytest.raises(ConfigError, match=r"^nothing: an override has the form [^\n]*$"):
        read(file, ["nothing"], ALLOW).load(Run)


def test_a_bad_override_is_told_with_a_wrong_allow_table(file: Path) -> None:
    file.write_text(FILE.replace('["tests"]', "3"))
    with pytest.raises(ConfigError) as caught:
        read(file, ["nothing"])
    assert [problem.path for problem in caught.value.problems] == ["nothing", "allow"]


def test_override_leaves_its_input_alone() -> None:
    data = {"a": {"b": [1]}}
    assert override(data, ["a.b.0=2", "c=none"]) == {"a": {"b": [2]}, "c": "none"}
    assert data == {"a": {"b": [1]}}


def test_a_syntax_error_has_file_line_and_column(tmp_path: Path) -> None:
    path = tmp_path / "broken.toml"
    path.write_text("seed = 1\nname = = 2\n")
    with pytest.raises(ConfigError, match=r"broken\.toml: not valid TOML: .*line 2, column 8"):
        read(path)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.toml: cannot be read: No such file"):
        read(tmp_path / "none.toml")


@pytest.mark.parametrize("allow", ["allow = 3", "[allow]\npackages = 3", "[allow]\npackage = []"])
def test_a_wrong_allow_table(tmp_path: Path, allow: str) -> None:
    path = tmp_path / "run.toml"
    path.write_text(allow)
    with pytest.raises(ConfigError, match="allow"):
        read(path)


OWN = """
from dataclasses import dataclass

@dataclass(frozen=True)
class Mine:
    size: int = 1
"""


def test_a_module_next_to_the_file_is_found_when_allowed(tmp_path: Path) -> None:
    (tmp_path / "own_parts_a.py").write_text(OWN)
    path = tmp_path / "run.toml"
    path.write_text('use = "own_parts_a:Mine"\nsize = 2\n')
    before = list(sys.path)
    with pytest.raises(ConfigError, match="allowed packages"):
        read(path).load()
    assert "own_parts_a" not in sys.modules
    mine = read(path, allow=["own_parts_a"]).load()
    assert (mine.size, type(mine).__name__) == (2, "Mine")
    assert sys.path == before


def test_a_second_module_of_one_name_is_refused(tmp_path: Path) -> None:
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "own_parts_b.py").write_text(OWN)
        (tmp_path / folder / "run.toml").write_text('use = "own_parts_b:Mine"\n')
    assert read(tmp_path / "one" / "run.toml", allow=["own_parts_b"]).load().size == 1
    with pytest.raises(ConfigError, match=": rename one"):
        read(tmp_path / "two" / "run.toml", allow=["own_parts_b"]).load()


def test_a_module_that_fails_at_import_is_one_problem(tmp_path: Path) -> None:
    (tmp_path / "own_parts_c.py").write_text("1 / 0\n")
    path = tmp_path / "run.toml"
    path.write_text('use = "own_parts_c:Mine"\n')
    with pytest.raises(ConfigError, match="own_parts_c cannot be imported: ZeroDivisionError"):
        read(path, allow=["own_parts_c"]).load()


def test_base_classes_and_protocols_can_be_loaded_directly() -> None:
    assert loaded({"use": f"{HOME}:Sgd"}, Train) == Sgd()
    assert loaded({"use": f"{HOME}:All"}, Select) == All()


@pytest.mark.parametrize(
    ("path", "data", "some", "none"),
    [
        (
            "task.use",
            {"task": {"use": "Embeded"}},
            {"Embedded", "Synthetic"},
            {"Split", "accuracy"},
        ),
        ("fleet.use", {"fleet": {"use": "levles"}}, {"levels", "Fleet"}, {"Group", "Uniform"}),
        (
            "method.train.use",
            {"method": {"use": "fedavg", "train": {"use": "Gradiant"}}},
            {"Gradient", "Fjord"},
            {"Sgd", "AdamW", "Decaying"},
        ),
    ],
)
def test_an_unknown_name_lists_only_what_fits(
    path: str, data: dict[str, Any], some: set[str], none: set[str]
) -> None:
    """A package exports more than parts of one kind: what cannot stand here is not offered."""
    with pytest.raises(ConfigError) as caught:
        load(data, Experiment, homes=names.HOMES)
    (told,) = (each.message for each in caught.value.problems if each.path == path)
    hint, _, rest = told.partition(" has: ")
    assert "did you mean" in hint
    assert not none & set(re.findall(r"\w+", hint))
    listed = set(re.findall(r"\w+", rest))
    assert some <= listed
    assert not none & listed
