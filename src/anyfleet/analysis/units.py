"""Units: amounts with SI prefixes, such that two significant digits are always left."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

_SIZES: Mapping[str, float] = MappingProxyType(
    {
        "E": 1e18,
        "P": 1e15,
        "T": 1e12,
        "G": 1e9,
        "M": 1e6,
        "k": 1e3,
        "": 1.0,
        "m": 1e-3,
        "µ": 1e-6,
        "n": 1e-9,
    }
)
# Nobody says kiloseconds, or millibytes.
_PREFIXES: Mapping[str, str] = MappingProxyType({"s": "mµn", "B": "EPTGMk", "FLOP": "EPTGMk"})
# Of a unit, the smallest amount of a column; 0.45 s is as readable as 450 ms, and shorter.
_LEAST: Mapping[str, float] = MappingProxyType({"s": 0.1})
_MOST = 1e7  # of a unit: beyond, a column has a larger one, and more decimals for small amounts


@dataclass(frozen=True)
class Unit:
    """A unit with its prefix, such as "ms", and its size in units without a prefix."""

    name: str
    size: float


def quantity(amount: float, symbol: str) -> str:
    """Return an amount with its unit, three digits or more: "12.3 s", "1.25 kJ", "3.4 ms"."""
    known = [amount] if amount and math.isfinite(amount) else []
    unit = next((unit for unit in _units(symbol) if known and abs(amount) >= unit.size), None)
    unit = unit or (_units(symbol)[-1] if known else Unit(symbol, 1.0))
    value = amount / unit.size
    return f"{value:,.0f} {unit.name}" if abs(value) >= 100 else f"{value:.3g} {unit.name}"


def common_unit(amounts: Iterable[float], symbol: str) -> Unit:
    """Return one unit for a column of amounts: the smallest that is not 0 keeps two digits.

    It is the largest unit of which that amount is one or more, a tenth for seconds. Where this
    would make others longer than seven digits, the unit is larger, and small amounts need more
    decimals.
    """
    known = [abs(each) for each in amounts if each and math.isfinite(each)]
    if not known:
        return Unit(symbol, 1.0)
    units = _units(symbol)
    least = _LEAST.get(symbol, 1.0)
    fine = next((unit for unit in units if min(known) >= least * unit.size), units[-1])
    short = [unit for unit in units if unit.size >= fine.size and max(known) < _MOST * unit.size]
    return short[-1] if short else units[0]


def _units(symbol: str) -> list[Unit]:
    """Return the units of a symbol, largest first."""
    prefixes = _PREFIXES.get(symbol, "".join(_SIZES))
    return [
        Unit(f"{prefix}{symbol}", size)
        for prefix, size in _SIZES.items()
        if not prefix or prefix in prefixes
    ]
