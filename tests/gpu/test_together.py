"""Runs played together on a CUDA device: each is its single run, on streams and with graphs."""

from dataclasses import replace
from itertools import islice

import pytest
import torch

from anyfleet.parts.train import Decaying, Gradient
from anyfleet.runtime.simulated.captured_training import CapturedTraining
from anyfleet.together import play_together
from tests.test_together import BASE, METHODS, assert_same, played, prepared, seeds, task

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")


@pytest.mark.parametrize("meetings", [1, 2])
@pytest.mark.parametrize("name", METHODS)
def test_every_seed_is_its_own_single_run(name: str, meetings: int) -> None:
    runs = seeds(METHODS[name], 4, device="cuda", rounds=4)
    for alone, together in zip(runs, played(runs, meetings=meetings), strict=True):
        assert_same(list(alone.play()), together)


@pytest.mark.parametrize("meetings", [1, 2])
def test_seeds_may_have_data_of_their_own(meetings: int) -> None:
    runs = [
        prepared(BASE, task(seed, data), seed, device="cuda")
        for seed, data in enumerate((1, 4, 1, 5))
    ]
    for alone, together in zip(runs, played(runs, meetings=meetings), strict=True):
        assert_same(list(alone.play()), together)


def test_scores_are_those_of_the_single_run_with_one_thread_of_torch() -> None:
    many, few = torch.get_num_threads(), 1
    torch.set_num_threads(few)  # then a processor evaluates in several threads
    try:
        runs = seeds(BASE, 4, device="cuda", rounds=6)
        alone = [[result.record.scores for result in run.play()] for run in runs]
        for expected, found in zip(alone, played(runs, meetings=2), strict=True):
            for scores, result in zip(expected, found, strict=True):
                assert result.record.scores == pytest.approx(scores)
    finally:
        torch.set_num_threads(many)


def test_results_can_be_read_while_others_are_trained() -> None:
    runs = seeds(METHODS["widths"], 6, device="cuda", rounds=6)
    whole = [list(run.play()) for run in runs]
    counts = [0] * len(runs)
    for number, result in play_together(runs, [None] * len(runs)):
        expected = whole[number][counts[number]].round.params
        for name, value in result.round.params.items():
            # At once, on the caller's own stream.
            assert torch.allclose(value.cpu(), expected[name].cpu(), rtol=1e-9, atol=1e-11)
        counts[number] += 1
    assert counts == [6] * len(runs)


def test_a_meeting_captures_one_graph_for_all_its_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[CapturedTraining] = []
    begin = CapturedTraining.__init__

    def counted(self: CapturedTraining, *given: object, **named: object) -> None:
        made.append(self)
        begin(self, *given, **named)  # type: ignore[arg-type]

    train = Gradient(Decaying(0.1), local_steps=3, batch_size=2)
    runs = seeds(replace(BASE, train=train), 4, device="cuda", rounds=10**6)
    monkeypatch.setattr(CapturedTraining, "__init__", counted)
    results = play_together(runs, [None] * 4)
    list(islice(results, 24))
    meetings = [each for each in made if each.captured]
    assert len(meetings) == 2
    # Rounds differ in how many samples the largest device has, and each number is a graph.
    assert all(each.captured <= 7 for each in meetings)
    results.close()  # type: ignore[attr-defined]
