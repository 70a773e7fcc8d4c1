"""Runs of a study that are played together in one process, as on an accelerator."""

import sys
from pathlib import Path

import pytest

from anyfleet.store import Terms, read_rounds
from anyfleet.study import Sources, Study, cells_of
from anyfleet.study.events import Advanced, Begun, Ended
from anyfleet.study.playing import Player, complete, grouped
from tests.study.test_study import OTHER

WRONG = """
from dataclasses import dataclass
from anyfleet.parts.select import Uniform

@dataclass(frozen=True)
class Wrong(Uniform):
    fails: bool = False
    def __call__(self, *words):
        if self.fails:
            raise ZeroDivisionError("mine")
        return super().__call__(*words)
"""


def study(folder: Path, one: str, two: str, allow: tuple[str, ...] = ()) -> Study:
    (folder / "one.toml").write_text(one)
    (folder / "two.toml").write_text(two)
    files = folder / "one.toml", folder / "two.toml"
    overrides = 'engine={ use = "Stacked" }', "rounds=3"
    return Study(cells_of(Sources(files, overrides, seeds=2, allow=allow)))


def test_runs_of_equal_shape_are_played_together_and_all_are_finished(tmp_path: Path) -> None:
    other = OTHER.replace("lr = 0.1", "lr = 1\nepochs = 2\nbatch_size = 7").replace("= 3", "= 2")
    found = study(tmp_path, OTHER, other)
    (group,) = grouped(found, found.runs())
    assert len(group) == 4
    events = list(Player(tmp_path / "out", found, Terms()).play(group))
    assert [each.how for each in events if isinstance(each, Ended)] == ["finished"] * 4
    assert all(complete(tmp_path / "out", run) for run in group)


def test_runs_at_different_rounds_go_on_together(tmp_path: Path) -> None:
    """A kill leaves them a round apart, which must not make them go on one after the other."""
    found = study(tmp_path, OTHER, OTHER.replace("lr = 0.1", "lr = 0.2"))
    for _ in Player(tmp_path / "whole", found, Terms()).play(found.runs()):
        pass
    first, out = found.runs()[0], tmp_path / "out"
    ahead = Player(out, found, Terms()).play([first])
    next(event for event in ahead if isinstance(event, Advanced))
    ahead.close()
    assert len(read_rounds(out / first.folder)) == 1
    (group,) = grouped(found, found.runs())
    events = list(Player(out, found, Terms()).play(group))
    assert {event.run: event.rounds for event in events if isinstance(event, Begun)} == {
        run: int(run == first) for run in group
    }
    for run in group:
        one, two = (read_rounds(tmp_path / name / run.folder) for name in ("whole", "out"))
        assert [each.time for each in one] == [each.time for each in two]
        assert [each.loss for each in one] == pytest.approx([each.loss for each in two], rel=1e-4)


def test_a_run_that_cannot_be_opened_takes_none_of_those_beside_it_down(tmp_path: Path) -> None:
    found, out = study(tmp_path, OTHER, OTHER.replace("lr = 0.1", "lr = 0.2")), tmp_path / "out"
    first, *others = found.runs()
    ahead = Player(out, found, Terms()).play([first])
    next(event for event in ahead if isinstance(event, Advanced))
    ahead.close()
    file = out / first.folder / "environment.json"
    file.write_text(file.read_text().replace('"torch": "', '"torch": "9'))
    events = list(Player(out, found, Terms()).play(found.runs()))
    ended = {each.run: each for each in events if isinstance(each, Ended)}
    assert ended[first].how == "failed"
    assert "torch" in ended[first].told
    assert [ended[run].how for run in others] == ["finished"] * 3


def test_a_run_that_fails_takes_none_of_those_beside_it_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "failing_part.py").write_text(WRONG)
    own = 'select = { use = "failing_part:Wrong", count = 3, fails = %s }\n'
    one, two = (OTHER.replace("count = 3\n", own % each) for each in ("false", "true"))
    found = study(tmp_path, one, two, ("failing_part",))
    out, runs = tmp_path / "out", found.runs()
    events = list(Player(out, found, Terms(allow=("failing_part",))).play(runs))
    ended = {str(each.run): each for each in events if isinstance(each, Ended)}
    for run in runs:
        fails = run.name == "two"
        assert ended[str(run)].how == ("failed" if fails else "finished")
        assert ("ZeroDivisionError: mine" in ended[str(run)].told) == fails
        assert complete(out, run) == (not fails)
    assert len(read_rounds(out / "one/seed-1")) == 3
    monkeypatch.delitem(sys.modules, "failing_part")
