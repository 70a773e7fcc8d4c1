"""Metrics for Prometheus: what stands under one name has one unit."""

from dataclasses import dataclass
from pathlib import Path

from anyfleet.deployment.metrics import _Collected
from anyfleet.deployment.status import Status, status_of
from tests.deployment.test_status import STATUS


@dataclass(frozen=True)
class Source:
    """A fleet whose gate has counted."""

    def status(self) -> Status:
        gate = {"forwarded": 7, "too_large": 1, "bytes_up": 500, "bytes_down": 900}
        return status_of(STATUS, run=Path(), doing="", rounds=5, gate=gate, restarts=0)


def test_bytes_at_the_gate_are_not_counted_among_requests() -> None:
    found = {
        (sample.name, *sample.labels.values()): sample.value
        for metric in _Collected(Source()).collect()
        for sample in metric.samples
    }
    gate = {name: value for name, value in found.items() if "gate" in name[0]}
    assert gate == {
        ("anyfleet_gate_total", "forwarded"): 7,
        ("anyfleet_gate_total", "too_large"): 1,
        ("anyfleet_gate_bytes_total", "up"): 500,
        ("anyfleet_gate_bytes_total", "down"): 900,
    }
    assert found["anyfleet_failures_total", "went offline"] == 2
