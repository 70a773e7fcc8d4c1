"""Plain data as TOML, for the run folder; the standard library reads TOML but does not write it."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["to_toml"]

_BARE = re.compile(r"[A-Za-z0-9_-]+")
_ESCAPES = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\r": "\\r", "\t": "\\t"}


def to_toml(data: Mapping[str, Any]) -> str:
    """A TOML document that reads as `data`; None becomes the table `{ use = "none" }`."""
    return "\n".join(_lines(data, ())).lstrip("\n") + "\n"


def _lines(table: Mapping[str, Any], path: tuple[str, ...]) -> Iterator[str]:
    plain = {key: value for key, value in table.items() if not isinstance(value, Mapping)}
    if path and (plain or not table):
        yield f"\n[{'.'.join(map(_key, path))}]"
    for key, value in plain.items():
        yield f"{_key(key)} = {_value(value)}"
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _lines(value, (*path, key))


def _key(key: str) -> str:
    return key if _BARE.fullmatch(key) else _text(key)


def _value(value: Any) -> str:
    if value is None:
        return '{ use = "none" }'
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return _float(value)
    if isinstance(value, Mapping):
        pairs = ", ".join(f"{_key(key)} = {_value(item)}" for key, item in value.items())
        return f"{{ {pairs} }}" if pairs else "{}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(_value(item) for item in value)}]"
    raise TypeError(f"TOML has no {type(value).__name__}: call `dump` first.")


def _float(value: float) -> str:
    if math.isfinite(value):
        text = repr(float(value))
        return text if any(mark in text for mark in ".e") else f"{text}.0"
    return "nan" if math.isnan(value) else ("inf" if value > 0 else "-inf")


def _text(text: str) -> str:
    return '"' + "".join(_ESCAPES.get(letter) or _plain_letter(letter) for letter in text) + '"'


def _plain_letter(letter: str) -> str:
    printable = ord(letter) >= 0x20 and ord(letter) != 0x7F
    return letter if printable else f"\\u{ord(letter):04x}"
