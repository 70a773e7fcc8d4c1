"""Amounts with units, of which two significant digits are left."""

import math

import pytest

from anyfleet.analysis.units import Unit, common_unit, quantity


@pytest.mark.parametrize(
    ("amount", "symbol", "told"),
    [
        (12345.6, "s", "12,346 s"),
        (0.0582, "s", "58.2 ms"),
        (0.0034, "s", "3.4 ms"),
        (4.16e-4, "s", "416 µs"),
        (1250.0, "J", "1.25 kJ"),
        (0.0025, "J", "2.5 mJ"),
        (2e-12, "J", "0.002 nJ"),
        (0.0, "J", "0 J"),
        (-1250.0, "J", "-1.25 kJ"),
        (2.48e8, "FLOP", "248 MFLOP"),
        (12e12, "FLOP", "12 TFLOP"),
        (1e15, "FLOP", "1 PFLOP"),
        (2e6, "B", "2 MB"),
        (20_000.0, "B", "20 kB"),
        (0.5, "B", "0.5 B"),
        (math.nan, "s", "nan s"),
    ],
)
def test_amounts_have_units(amount: float, symbol: str, told: str) -> None:
    assert quantity(amount, symbol) == told


@pytest.mark.parametrize(
    ("amounts", "symbol", "unit"),
    [
        ([8.2, 0.45], "s", Unit("s", 1.0)),
        ([8.2, 0.0034], "s", Unit("ms", 1e-3)),
        ([90_000.0, 12.0], "s", Unit("s", 1.0)),
        ([20e3, 30e6], "B", Unit("kB", 1e3)),
        ([0.2e6, 30e6], "B", Unit("kB", 1e3)),
        ([163.0, 1228.0], "J", Unit("J", 1.0)),
        ([1700.0, 2.4], "J", Unit("J", 1.0)),
        ([1700.0, 2400.0], "J", Unit("kJ", 1e3)),
        ([0.0, 0.0034, math.nan, -8.0], "s", Unit("ms", 1e-3)),
        ([0.0], "s", Unit("s", 1.0)),
        ([], "B", Unit("B", 1.0)),
        # A millionth beside a million: the column is not seventeen digits wide.
        ([1e-6, 1e6], "J", Unit("J", 1.0)),
        ([1e-30, 1e30], "J", Unit("EJ", 1e18)),
    ],
)
def test_a_column_has_one_unit(amounts: list[float], symbol: str, unit: Unit) -> None:
    assert common_unit(amounts, symbol) == unit
