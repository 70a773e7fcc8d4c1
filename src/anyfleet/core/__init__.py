"""What a round does, from selection to aggregation: no files, no clock, no bytes of its own.

Every module is one concept; `anyfleet.parts` shows what authors of parts need of them.
"""

from importlib import import_module as _import_module
from pkgutil import iter_modules as _iter_modules

__all__: list[str] = []

_MODULES = frozenset(module.name for module in _iter_modules(__path__))


def __getattr__(name: str) -> object:
    """Import a module when it is first used as an attribute, `anyfleet.core.view` say."""
    if name in _MODULES:
        return _import_module(f"anyfleet.core.{name}")
    raise AttributeError(f"module 'anyfleet.core' has no attribute {name!r}")


def __dir__() -> list[str]:
    """Return the names of all modules, also of those that nobody has imported yet."""
    return sorted({*_MODULES, *(name for name in globals() if name.startswith("__"))})
