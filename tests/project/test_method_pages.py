"""The pages about the methods: complete, true to the code, and what they show works."""

import inspect
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import numpy as np
import pytest

from anyfleet import formulas, methods
from anyfleet.analysis import diagnosis
from anyfleet.cli.methods import known_methods
from anyfleet.config.signatures import ABSENT, form_of
from anyfleet.core.method import Method
from anyfleet.experiment import Experiment, load, play
from anyfleet.formulas import reference
from anyfleet.parts.aggregate import Diagnosed
from anyfleet.parts.train.nested import NESTED_WIDTHS
from anyfleet.store import Recording, claim

PAGES = Path(__file__).resolve().parents[2] / "docs/methods"
# Reference rows are nobody's invention: the index has a line for them.
PUBLISHED = sorted(name for name, known in known_methods().items() if known.paper is not None)
INDEX = PAGES / "README.md"
LARGEST_PICTURE = 40_000  # bytes
SECTIONS = (
    "The idea",
    "A round",
    "When to choose it",
    "Knobs",
    "Run it",
    "Our deviations",
    "Mix it",
    "Reads further",
)
LOCAL_SGD = "[local SGD](fedavg.md#knobs)"


def page(name: str) -> str:
    return (PAGES / f"{name}.md").read_text(encoding="utf-8")


def blocks(text: str, language: str) -> list[str]:
    found: list[str] = re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return found


def section(text: str, title: str) -> str:
    return text.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def links(text: str) -> Iterator[tuple[str, str]]:
    """Targets of links and pictures of a page: file and anchor."""
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        file, _, anchor = target.partition("#")
        yield file, anchor


def knobs(name: str) -> dict[str, str]:
    """The defaults of a page's table, as they are written."""
    rows = re.findall(r"^\| `(\w+)` \| `([^`]+)` \| \S", section(page(name), "Knobs"), re.MULTILINE)
    return dict(rows)


def values_of(program: str) -> dict[str, Any]:
    names: dict[str, Any] = {}
    exec(compile(program, "<page>", "exec"), names)
    return names


# --- what is there ------------------------------------------------------------------------------


def test_every_published_method_has_a_page_and_every_page_a_method() -> None:
    found = {file.stem for file in PAGES.glob("*.md")} - {"README", "diagnosis"}
    assert found == set(PUBLISHED)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_page_has_all_its_sections_and_its_picture(name: str) -> None:
    text = page(name)
    assert text.startswith("# ")
    assert tuple(re.findall(r"^## (.*)$", text, re.MULTILINE)) == SECTIONS
    assert f"](pictures/{name}.svg)" in section(text, "The idea")
    assert re.search(r"^1\. ", section(text, "A round"), re.MULTILINE)
    assert 60 <= len(text.splitlines()) <= 130
    paper = known_methods()[name].paper
    assert paper is not None
    family = paper.authors[0].partition(",")[0]
    assert family in section(text, "Reads further")


@pytest.mark.parametrize("file", sorted(PAGES.glob("pictures/*")), ids=lambda file: file.stem)
def test_a_picture_is_small_white_and_well_formed(file: Path) -> None:
    assert file.stat().st_size < LARGEST_PICTURE
    (background, *_) = ET.parse(file).getroot().iter("{http://www.w3.org/2000/svg}path")
    assert "#ffffff" in background.attrib["style"]


def test_the_index_leads_to_every_page_and_names_the_reference_rows() -> None:
    text = INDEX.read_text(encoding="utf-8")
    targets = {file for file, _ in links(text)}
    assert {f"{name}.md" for name in PUBLISHED} <= targets
    for name in set(known_methods()) - set(PUBLISHED):
        assert f"`{name}`" in text


@pytest.mark.parametrize("file", sorted(PAGES.glob("*.md")), ids=lambda file: file.stem)
def test_every_link_of_a_page_leads_somewhere(file: Path) -> None:
    for target, anchor in links(file.read_text(encoding="utf-8")):
        goal = PAGES / target if target else file
        assert goal.is_file(), f"{file.name} links to {target}"
        if anchor:
            titles = re.findall(r"^#+ (.*)$", goal.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in {title.lower().replace(" ", "-") for title in titles}, anchor


def test_the_readme_of_the_project_leads_here() -> None:
    text = (PAGES.parents[1] / "README.md").read_text(encoding="utf-8")
    assert "](docs/methods/README.md)" in text


# --- what is said is true -----------------------------------------------------------------------


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_knobs_of_a_page_are_those_of_the_code(name: str) -> None:
    make = getattr(methods, name)
    table, entries = knobs(name), form_of(make).entries
    assert table
    for knob, written in table.items():
        assert knob in entries, f"{name} has no knob {knob}"
        default = eval(written, {"NESTED_WIDTHS": NESTED_WIDTHS})
        if entries[knob].default is not ABSENT:
            assert entries[knob].default == default, knob
        # Those that are only passed on have their default further down.
        assert make(**{knob: default}) == make(), f"{knob} is not {written} when left out"


@pytest.mark.parametrize("name", PUBLISHED)
def test_what_a_page_leaves_to_that_of_fedavg_is_as_told_there(name: str) -> None:
    make = getattr(methods, name)
    for knob, written in knobs("fedavg").items():
        if knob not in {*knobs(name), "count"}:
            assert make(**{knob: eval(written)}) == make(), knob


@pytest.mark.parametrize("name", PUBLISHED)
def test_no_knob_is_missing_from_a_page(name: str) -> None:
    make = getattr(methods, name)
    entries, table = set(form_of(make).entries), set(knobs(name))
    own = {p.name for p in inspect.signature(make).parameters.values() if p.kind != p.VAR_KEYWORD}
    assert own <= table
    sgd = set(form_of(methods.fedavg).entries) - {"count"}
    told = sgd if LOCAL_SGD in section(page(name), "Knobs") else set()
    assert entries - sgd <= table
    assert entries <= table | told


def ends(study: str, name: str) -> dict[str, float]:
    """What `measure.py` found at the end of a study's runs."""
    found = json.loads((PAGES / "drawing/measured.json").read_text(encoding="utf-8"))[study][name]
    return {key: value[-1] if isinstance(value, list) else value for key, value in found.items()}


@pytest.mark.parametrize("name", ["stc", "qsgd", "uveqfed", "fedhq"])
def test_what_a_page_tells_of_runs_was_measured(name: str) -> None:
    text = " ".join(section(page(name), "When to choose it").split())
    for run, unit in ((name, 1e4), ("fedavg", 1e6)):
        end = ends("codecs", run)
        assert f"{100 * end['accuracy']:.1f} % (±{100 * end['deviation']:.1f}" in text
        assert f"{round(end['up'] / unit) * unit / 1e6:g} MB" in text


@pytest.mark.parametrize("name", ["stc", "qsgd", "uveqfed", "fedhq"])
def test_a_codec_costs_a_twentieth_of_the_accuracy_at_most_and_its_page_tells_how_much(
    name: str,
) -> None:
    text = " ".join(section(page(name), "When to choose it").split())
    own, plain = ends("codecs", name), ends("codecs", "fedavg")
    share, less = own["accuracy"] / plain["accuracy"], round(plain["up"] / own["up"])
    assert share >= 0.95
    ending = "st" if less % 10 == 1 else "th"
    assert f"{share:.2f} of FedAvg's accuracy for a {less}{ending} of the bytes" in text


def test_what_the_page_of_stc_tells_of_smaller_messages_was_measured() -> None:
    text = " ".join(section(page("stc"), "When to choose it").split())
    found = json.loads((PAGES / "drawing/measured.json").read_text(encoding="utf-8"))["longer"]
    plain, default, few = (found[name] for name in ("fedavg", "stc", "stc, a fortieth"))
    assert f"messages are a {plain['up'][-1] / few['up'][-1]:.0f}th" in text
    assert f"{few['up'][11] / 1e6:.2f} MB and {100 * few['accuracy'][11]:.1f} % after" in text
    assert f"with {few['up'][-1] / 1e6:.2f} MB, it was at" in text
    after = [f"{100 * run['accuracy'][-1]:.1f} %" for run in (few, default, plain)]
    assert "at {}, beside {} with the default and {} with FedAvg".format(*after) in text


def test_the_table_of_anycost_was_measured() -> None:
    rows = re.findall(
        r"^\| (\w.*) \|$", section(page("anycost"), "When to choose it"), re.MULTILINE
    )
    assert len(rows) == 8
    for row in rows:
        name, *cells = (cell.removesuffix(" of 300") for cell in row.split(" | "))
        found = [ends(f"cell at {loss} dB", name) for loss in (40, 0)]
        assert cells == [text for end in found for text in as_told(end)], name


def test_what_the_page_of_anycost_tells_for_equal_joules_was_measured() -> None:
    text = " ".join(section(page("anycost"), "When to choose it").split())
    found = json.loads((PAGES / "drawing/measured.json").read_text(encoding="utf-8"))
    numbers: list[float] = []
    for loss in (40, 0):
        stc, own = (found[f"cell at {loss} dB"][name] for name in ("STC", "AnycostFL"))
        joules, learned = stc["joules"][-1], stc["accuracy"][-1]
        then = float(np.interp(joules, own["joules"], own["accuracy"]))
        numbers += (
            [100 * learned, joules, 100 * then] if loss else [joules, 100 * learned, 100 * then]
        )
    told = (
        "at 40 dB STC was at {:.0f} % with the {:.1f} J it used, AnycostFL then at {:.0f} %; "
        "at 0 dB, with {:.1f} J, they were at {:.0f} and {:.0f} %."
    )
    assert told.format(*numbers) in text
    slow, fast = (ends(f"cell at {loss} dB", "STC just in time") for loss in (40, 0))
    assert f"takes {fast['joules']:.0f} J on fast links; at 40 dB" in text
    assert f"takes {slow['joules']:.0f}, as" in text
    assert f"and {slow['seconds']:.1f} s instead of 5. Who chooses is in time." in text
    for loss in (40, 0):  # twenty rounds of a quarter of a second
        assert all(ends(f"cell at {loss} dB", name)["seconds"] <= 5 for name in CHOOSING)


CHOOSING = ("AnycostFL", "HeteroFL", "FedHQ", "UVeQFed", "QSGD", "STC")


def as_told(end: dict[str, float]) -> list[str]:
    joules = end["joules"]
    return [
        f"{100 * end['accuracy']:.1f} ±{100 * end['deviation']:.1f}",
        f"{joules:.1f}" if joules < 1000 else f"{joules:.0f}",
        f"{end['up'] / 1e6:.2f}",
        f"{end['declined']:.0f}",
    ]


# --- what is shown works ------------------------------------------------------------------------


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_run_file_of_a_page_loads(name: str, tmp_path: Path) -> None:
    (text,) = blocks(section(page(name), "Run it"), "toml")
    file = tmp_path / "run.toml"
    file.write_text(text, encoding="utf-8")
    experiment = load(file, ["rounds=1"])
    assert f'use = "{name}"' in text
    assert isinstance(experiment.method, Method)


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_python_of_a_page_makes_the_experiment(name: str) -> None:
    (program,) = blocks(section(page(name), "Run it"), "python")
    experiment = values_of(program)["experiment"]
    assert isinstance(experiment, Experiment)
    assert f"methods.{name}(" in program


@pytest.mark.parametrize("name", [*PUBLISHED, "README"])
def test_the_mixtures_of_a_page_compose(name: str) -> None:
    text = page(name)
    (program,) = blocks(text if name == "README" else section(text, "Mix it"), "python")
    made = [value for value in values_of(program).values() if isinstance(value, Method)]
    assert len(made) >= program.count("= replace(") >= 1


def test_what_the_page_about_looking_inside_shows_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    text = page("diagnosis")
    assert len(text.splitlines()) <= 90
    (run,), (watch, read) = blocks(text, "toml"), blocks(text, "python")
    Path("run.toml").write_text(run, encoding="utf-8")
    experiment = load("run.toml", ["rounds=2", "task.limit=300", "task.server=20"])
    with Recording(claim(Path("runs/mine")), experiment) as recording:
        for result in play(experiment):
            recording.append(result)
    values = values_of(read)
    found = diagnosis.contributions(values["ledger"], values["records"])
    assert sum(count.selected for count in found.values()) == 20  # ten in each of two rounds
    assert values["found"].fisher > 0
    quick = watch.replace("rounds=3", "rounds=1").replace(
        "devices=20", "devices=20, limit=300, server=20"
    )
    # Some rows of the last layer belong to labels that nobody had.
    assert 0.9 < values_of(quick)["found"]["coverage"] < 1
    assert capsys.readouterr().out


def test_the_page_about_looking_inside_names_everything_there_is() -> None:
    text = page("diagnosis")
    tables = re.findall(r"^\| (`.*?`) \|", text, re.MULTILINE)
    named = set(re.findall(r"`(\w+)", " ".join(tables)))
    told = {name for name in named if not callable(getattr(diagnosis, name, None))}
    assert told == Diagnosed.provides
    theory = re.findall(r"`(\w+)`", text.partition("in `anyfleet.formulas.reference`")[2])
    assert len(theory) > 4
    for name in theory:
        assert name in (*formulas.__all__, *reference.__all__), name


def test_every_method_has_a_picture_that_can_be_drawn_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(str(PAGES))
    drawn = values_of("import draw")["draw"]
    assert set(PUBLISHED) <= set(drawn.PICTURES)
    shown = {file for name in PUBLISHED for file, _ in links(page(name))}
    assert {f"pictures/{name}.svg" for name in drawn.PICTURES} <= shown
    first, again = (drawn.draw("fedrolex", tmp_path).read_bytes() for _ in range(2))
    assert first == again
    assert len(first) < LARGEST_PICTURE
