"""Comparisons as files: `results.csv`, a row for every run, and `results.json` with the means.

docs/runs.md lists their columns and keys.
"""

import csv
import math
from dataclasses import asdict
from io import StringIO
from typing import Any

import msgspec

from anyfleet.analysis.comparison import Comparison
from anyfleet.analysis.intervals import Estimate
from anyfleet.analysis.summaries import summarise


def results_csv(found: Comparison) -> bytes:
    """Return a comparison as CSV, one row for every run and seed; what is not known is empty."""
    text = StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(("run", "seed", "metric", "target", *found.quantities))
    for name, group in found.runs.items():
        for seed, records in group.items():
            values = (each.values.get(name, {}).get(seed) for each in found.quantities.values())
            first = (name, seed, records[-1].metric, _plain(found.target))
            rows.writerow((*first, *map(_plain, values)))
    return text.getvalue().encode()


def _plain(value: float | None) -> str:
    """Return a number that reads as itself, and nothing for NaN."""
    if value is None or math.isnan(value):
        return ""
    return repr(int(value) if math.isfinite(value) and value == int(value) else float(value))


def results_json(found: Comparison, planned: int | None = None) -> bytes:
    """Return a comparison as JSON: every run, the means over seeds, and the differences."""
    finished = sum(map(len, found.runs.values()))
    data = {
        "finished": finished,
        "planned": finished if planned is None else planned,
        "goal": asdict(found.goal),
        "reference": found.reference,
        "target": found.target,
        "amounts": found.amounts,
        "runs": {name: [*_runs(found, name)] for name in found.runs},
        "means": {
            name: {number: _interval(found.mean(number, name)) for number in found.quantities}
            for name in found.runs
        },
        "differences": {
            name: {number: _interval(found.difference(number, name)) for number in found.quantities}
            for name in found.runs
            if name != found.reference
        },
    }
    return msgspec.json.format(msgspec.json.encode(data), indent=2) + b"\n"


def _runs(found: Comparison, name: str) -> list[dict[str, Any]]:
    return [
        {
            "seed": seed,
            **asdict(summarise(records)),
            "to_target": found.costs[name][seed],
            "within": {each: told[name][seed] for each, told in found.lessons.items()},
        }
        for seed, records in found.runs[name].items()
    ]


def _interval(over: Estimate) -> dict[str, Any]:
    return {
        "mean": over.mean,
        "low": over.low,
        "high": over.high,
        "deviation": over.deviation,
        "seeds": over.count,
        "of": over.of,
    }
