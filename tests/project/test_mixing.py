"""A sample of the mixtures that `make mixing` tries; and whether its page is up to date."""

import random
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tools import mixing, mixing_parts, mixing_trial
from tools.mixing_page import PAGE, page, read
from tools.mixing_parts import PACKAGES, SLOTS, missing
from tools.mixing_trial import (
    FAILED,
    REFUSED,
    RUNS,
    Outcome,
    Pair,
    composed,
    faults,
    pairs,
    rounds,
    trial,
)

from anyfleet.core.loop import Round
from anyfleet.core.method import Method
from anyfleet.errors import CompositionError

SAMPLE = random.Random(6).sample(pairs(), 40)
TEXT = PAGE.read_text(encoding="utf-8")
WRITTEN = read(TEXT)
PLAIN = Pair(("selection", "codec"), ("Everyone", "Raw"))


# --- the mixtures -----------------------------------------------------------------------------


@pytest.mark.parametrize("pair", SAMPLE, ids=str)
def test_a_mixture_does_what_the_page_says(pair: Pair) -> None:
    outcome = trial(pair)
    assert outcome.result == (RUNS if WRITTEN[pair] else REFUSED), outcome.said


def test_everything_that_the_page_refuses_is_refused_and_nothing_else() -> None:
    refused = []
    for pair in pairs():
        if WRITTEN[pair]:
            assert isinstance(composed(pair), Method)
        else:
            refused.append(trial(pair))
    assert {outcome.result for outcome in refused} == {REFUSED}
    complaints = [line for outcome in refused for line in outcome.said.splitlines()]
    assert all("use " in line and "(docs/" in line for line in complaints)
    kinds = {outcome.kind for outcome in refused}
    assert len(kinds) >= 2
    assert all(kind in TEXT.partition("## Refusals")[2] for kind in kinds)


def test_enough_of_them_run() -> None:
    assert sum(WRITTEN.values()) >= mixing.LEAST * len(WRITTEN)


# --- nothing is forgotten, nothing is stale ---------------------------------------------------


def test_every_public_part_is_mixed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert missing() == []
    rooms = {package.__name__.rpartition(".")[2] for package in PACKAGES}
    assert rooms == {"select", "plan", "extract", "train", "codec", "aggregate"}
    less = {name: row for name, row in SLOTS["aggregation"].items() if "Adam" not in name}
    monkeypatch.setattr(mixing_parts, "SLOTS", {**SLOTS, "aggregation": less})
    assert missing() == ["anyfleet.parts.aggregate.ServerAdam"]


def test_the_page_has_the_parts_that_there_are() -> None:
    assert set(WRITTEN) == set(pairs()), "run `make mixing`"
    assert f"| **all** | {len(WRITTEN)} | {sum(WRITTEN.values())} |" in TEXT


def test_a_page_is_read_as_it_was_written() -> None:
    outcomes = [
        Outcome(pair, REFUSED, "no (docs/mixing.md)", "no")
        if number % 7 == 0
        else Outcome(pair, RUNS)
        for number, pair in enumerate(pairs())
    ]
    assert read(page(outcomes)) == {o.pair: o.result == RUNS for o in outcomes}


# --- what is wrong is seen --------------------------------------------------------------------


def test_faults_of_a_run_are_told() -> None:
    method = composed(PLAIN)
    one, two = rounds(method)
    assert list(faults(method, [one, two])) == []

    def told(step: Round) -> list[str]:
        return list(faults(method, [one, step]))

    assert "round 1: the model did not move" in told(replace(two, params=one.params))
    name, value = next(iter(two.params.items()))
    broken = {**two.params, name: value.clone().fill_(torch.nan)}
    assert told(replace(two, params=broken)) == [f"round 1: not finite: {name}"]
    nobody = replace(two.ledger, failure=("died",) * len(two.ledger))
    assert told(replace(two, ledger=nobody)) == ["round 1: no reply counted; the failures are died"]
    free = replace(two.ledger, bits_up=np.zeros(len(two.ledger)))
    assert any("bits_up of a reply" in fault for fault in told(replace(two, ledger=free)))
    wrong = replace(two.ledger, upload_seconds=np.full(len(two.ledger), np.nan))
    assert any("seconds are" in fault for fault in told(replace(two, ledger=wrong)))


def test_whatever_else_comes_of_a_mixture_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def raising(error: BaseException) -> Outcome:
        def broken(*_: object) -> list[Round]:
            raise error

        monkeypatch.setattr(mixing_trial, "rounds", broken)
        return trial(PLAIN)

    assert raising(KeyError("lost")).result == FAILED
    assert raising(CompositionError("no")).result == FAILED  # does not say by which rule
    assert raising(CompositionError("no (docs/mixing.md)")).result == REFUSED
    monkeypatch.setattr(mixing_trial, "SECONDS", 0.05)
    monkeypatch.setattr(mixing_trial, "rounds", lambda _: time.sleep(60))
    outcome = trial(PLAIN)
    assert (outcome.result, "TooSlow" in outcome.said) == (FAILED, True)
    assert signal.getsignal(signal.SIGALRM) is signal.SIG_DFL


# --- the command ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("results", "code"),
    [
        ((RUNS,), 0),
        ((RUNS,) * 9 + (REFUSED,), 0),
        ((RUNS, REFUSED), 1),
        ((RUNS,) * 9 + (FAILED,), 1),
    ],
    ids=["all run", "few are refused", "too many are refused", "one fails"],
)
def test_the_command_writes_what_is_good_enough(
    results: Sequence[str], code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def tried(some: Sequence[Pair], _: int) -> Iterator[Outcome]:
        for number, pair in reversed(list(enumerate(some))):  # in another order than asked
            result = results[number % len(results)]
            yield Outcome(pair, result, "said", "kind")

    target = tmp_path / "docs" / "mixing.md"
    target.parent.mkdir()
    monkeypatch.setattr(mixing, "PAGE", target)
    monkeypatch.setattr(mixing, "tried", tried)
    assert mixing.main(["--sample", "20"]) == code
    assert not target.exists()
    assert mixing.main([]) == code
    assert target.exists() == (code == 0)


def test_the_command_can_be_interrupted_and_refuses_to_forget_a_part(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> Iterator[Outcome]:
        raise KeyboardInterrupt

    monkeypatch.setattr(mixing, "tried", interrupted)
    assert mixing.main([]) == 130
    monkeypatch.setattr(mixing, "missing", lambda: ["anyfleet.parts.codec.New"])
    assert mixing.main([]) == 1
    assert "anyfleet.parts.codec.New" in capsys.readouterr().out
