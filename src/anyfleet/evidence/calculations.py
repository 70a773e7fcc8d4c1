"""Calculations: items whose numbers follow from formulas, without a run."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from anyfleet.errors import ConfigError, Problem
from anyfleet.evidence.items import Item
from anyfleet.evidence.operations import operations

Calculation = Callable[[str, Mapping[str, Any]], float | None]
_KNOWN: Mapping[str, Calculation] = MappingProxyType({"fedpmt operations": operations})


def calculated(item: Item) -> dict[tuple[str, str], float]:
    """Return the numbers of an item by case and method; raise ConfigError for no calculation."""
    if item.calculate not in _KNOWN:
        known = ", ".join(_KNOWN) or "none"
        told = f"there is no calculation {item.calculate!r}; there are {known}."
        raise ConfigError([Problem(f"{item.name}: calculate", told)])
    calculation = _KNOWN[item.calculate]
    found = {
        (case.name, method): calculation(method, case.calculate)
        for case in item.cases.values()
        for method in item.methods
    }
    return {key: value for key, value in found.items() if value is not None}
