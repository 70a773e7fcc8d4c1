"""Names of code in plain data: "package.module:Name" to a class or function and back.

One rule holds for run files, overrides, run folders and orders on the wire. Of Anyfleet itself, a
name may mean only what a home package of its place exports (`HOMES`). Of other packages, it may
mean what is defined in one that the caller allows. So plain data cannot reach the rest of the
interpreter: `os:system` is refused, `anyfleet.experiment:load` too, and so is a name that an
allowed module merely imported from elsewhere. A name is checked before its module is imported.

A short name in a run file means what the home of its field exports. A field without a home of its
own keeps that of the part around it: `inner` of a codec is a codec. What no home exports cannot be
named at all; neither can anything of `cli`, `experiment`, `store` or `config`.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType, ModuleType
from typing import Any

from anyfleet.errors import BadName

__all__ = [
    "HOMES",
    "OWN",
    "STATES",
    "SYNONYMS",
    "Factory",
    "FrozenMapping",
    "find",
    "how_to_allow",
    "lies_within",
    "name_of",
    "near",
    "public_names",
]

OWN = "anyfleet"
PARTS = "anyfleet.parts"  # shows what all homes of parts export: a name may begin with it too

HOMES: Mapping[str, str] = MappingProxyType(
    {
        "task": "anyfleet.tasks",
        "model": "anyfleet.tasks.zoo",
        "method": "anyfleet.methods",
        "fleet": "anyfleet.world",
        "engine": "anyfleet.runtime",
        "limits": "anyfleet.runtime",
        "fisher": "anyfleet.measure",
        "measures": "anyfleet.measure",
        "uplink": "anyfleet.parts.codec",
        "downlink": "anyfleet.parts.codec",
    }
    | {
        name: f"anyfleet.parts.{name}"
        for name in (
            "select",
            "schedule",
            "plan",
            "choose",
            "extract",
            "train",
            "norm",
            "aggregate",
        )
    }
)

# Where the values live that a checkpoint consists of; the module and all below it.
STATES = (
    "anyfleet.analysis.breakdown",
    "anyfleet.arrays",
    "anyfleet.core.check_in",
    "anyfleet.core.device_state",
    "anyfleet.core.events",
    "anyfleet.core.layout",
    "anyfleet.core.ledger",
    "anyfleet.core.device_states",
    "anyfleet.core.device_tables",
    "anyfleet.core.messages",
    "anyfleet.core.method",
    "anyfleet.core.orders",
    "anyfleet.core.planning",
    "anyfleet.core.replies",
    "anyfleet.core.screening",
    "anyfleet.core.seam",
    "anyfleet.core.server",
    "anyfleet.core.slots",
    "anyfleet.core.stacks",
    "anyfleet.core.time_and_energy",
    "anyfleet.core.view",
    "anyfleet.core.updates",
    "anyfleet.elastic",
    "anyfleet.formulas",
    "anyfleet.formulas.reference",
    "anyfleet.measure",
    "anyfleet.parts",
    "anyfleet.runtime",
    "anyfleet.world",
)

_WORD = r"[A-Za-z]\w*"
_NAME = re.compile(rf"(?P<module>__main__|{_WORD}(?:\.{_WORD})*):(?P<attribute>{_WORD})")


def find(name: str, allow: Collection[str] = (), homes: Collection[str] = ()) -> Any:
    """Return the class or function called `name`.

    `homes` are the packages of Anyfleet whose exports may be named here. Other code must be
    defined in a package of `allow`; no other module is even imported.
    """
    module_name, _ = _parse(name)
    if lies_within(module_name, (OWN,)):
        return _exported(name, homes)
    if module_name.partition(".")[0] in sys.stdlib_module_names:
        raise BadName(f'"{name}" cannot be used: {how_to_allow(module_name)}')
    if not lies_within(module_name, allow):
        raise BadName(
            f'"{name}" is outside the allowed packages ({", ".join([OWN, *allow])}). '
            f"{how_to_allow(module_name)}"
        )
    found = _look_up(name)
    if lies_within(found.__module__, (OWN,)):  # an allowed module has imported it
        return _exported(f"{found.__module__}:{found.__name__}", homes)
    if not lies_within(found.__module__, allow):
        raise BadName(f'"{name}" comes from {found.__module__}, which is not an allowed package.')
    return found


def lies_within(module_name: str, packages: Collection[str]) -> bool:
    """Return whether a module is one of these packages or lies inside one of them."""
    return any(
        module_name == package or module_name.startswith(f"{package}.") for package in packages
    )


def how_to_allow(module_name: str) -> str:
    """Return the sentence that says how to let a module's code be named, if that is possible."""
    root = module_name.partition(".")[0]
    if root in sys.stdlib_module_names:
        return f"{root} belongs to Python itself and has no parts: leave it out."
    return (
        f"Its code would run with your rights: if you trust it, use --allow {root}, or "
        f'allow=["{root}"] in Python (an argument of load and of the engine Threads).'
    )


def name_of(thing: Callable[..., Any]) -> str:
    """Return the name under which `find` gives `thing`, in the highest package that exports it."""
    module_name, name = thing.__module__, thing.__qualname__
    if not name.isidentifier() or name.startswith("_"):
        raise BadName(
            f"{module_name}:{name} cannot be named in plain data. Define it at the top of a "
            "module, under a public name."
        )
    own = (home for home in HOMES.values() if lies_within(module_name, (home,)))
    pieces = module_name.split(".")
    packages = (".".join(pieces[:depth]) for depth in range(min(2, len(pieces)), len(pieces)))
    for package in (*own, *packages):
        if vars(sys.modules.get(package, ModuleType(package))).get(name) is thing:
            return f"{package}:{name}"
    return f"{module_name}:{name}"


def public_names(module_name: str) -> tuple[str, ...]:
    """Return the `__all__` of a module or package; empty when it cannot be imported."""
    try:
        return tuple(getattr(_module(module_name), "__all__", ()))
    except BadName:
        return ()


# Words of other libraries and papers for what options are called here, the likeliest first. Run
# files and calls from Python both look here.
SYNONYMS: Mapping[str, tuple[str, ...]] = {
    "algorithm": ("method",),
    "batch": ("batch_size",),
    "client_lr": ("lr",),
    "clients": ("devices", "count"),
    "clients_per_round": ("count",),
    "cohort": ("count",),
    "cohort_size": ("count",),
    "criterion": ("loss",),
    "dataset": ("train", "data"),
    "deadline": ("seconds",),
    "devices": ("count",),
    "devices_per_round": ("count",),
    "down": ("bit_rate_down",),
    "download": ("bit_rate_down",),
    "eta": ("lr",),
    "eval_every": ("evaluate_every",),
    "gamma": ("decay", "factor"),
    "global_rounds": ("rounds",),
    "iterations": ("local_steps",),
    "l2": ("weight_decay",),
    "learning_rate": ("lr",),
    "levels": ("quantisation_levels",),
    "local_lr": ("lr",),
    "loss_fn": ("loss",),
    "lr": ("start",),
    "lr_decay": ("decay", "factor"),
    "lr_local": ("lr",),
    "minibatch": ("batch_size",),
    "model": ("module",),
    "mu": ("proximal",),
    "network": ("module", "model"),
    "num_clients": ("devices", "count"),
    "num_devices": ("devices", "count"),
    "num_rounds": ("rounds",),
    "num_workers": ("workers",),
    "optim": ("optimiser",),
    "optimizer": ("optimiser",),
    "proximal": ("mu",),
    "random_seed": ("seed",),
    "random_state": ("seed",),
    "rate": ("lr", "keep"),
    "rates": ("widths", "nested_widths"),
    "ratio": ("keep", "width"),
    "ratios": ("widths", "nested_widths"),
    "sample_size": ("count",),
    "server_learning_rate": ("lr",),
    "server_lr": ("lr",),
    "share": ("width", "widths"),
    "shares": ("widths",),
    "step_size": ("lr",),
    "steps": ("local_steps",),
    "strategy": ("method",),
    "threads": ("workers",),
    "timeout": ("seconds", "patience"),
    "up": ("bit_rate_up",),
    "upload": ("bit_rate_up",),
    "width": ("widths",),
}


def near(word: str, words: Iterable[str]) -> str:
    """Return ', did you mean "count" or "counts"?' when there are such words, otherwise "".

    A word that other libraries use for one of these (`SYNONYMS`) leads to it, whatever its letters.
    """
    # A class rather than the module beside it that has its name in small letters.
    ordered = sorted(words, reverse=True)
    by_lower = {known.lower(): known for known in ordered if not known.startswith("_")}
    meant = [known for known in SYNONYMS.get(word.lower(), ()) if known in by_lower]
    close = meant[:1] or difflib.get_close_matches(word.lower(), by_lower, n=3)
    names = " or ".join(f'"{by_lower[lower]}"' for lower in close)
    return f", did you mean {names}?" if names else ""


class FrozenMapping(Mapping[str, Any]):
    """A mapping that cannot change and can be hashed; lists inside become tuples."""

    __slots__ = ("_items",)

    def __init__(self, items: Mapping[str, Any]) -> None:
        self._items = {key: _frozen(value) for key, value in items.items()}

    def __getitem__(self, key: str) -> Any:
        return self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __hash__(self) -> int:
        return hash(frozenset(self._items.items()))

    def __repr__(self) -> str:
        return repr(self._items)


@dataclass(frozen=True)
class Factory:
    """A call that is written down, not made yet: a class or function by name, and its options.

    Whoever makes a Factory answers for its name: `config.load` has found it by the rule of `find`,
    `Factory.of` gets the thing itself.
    """

    use: str
    options: Mapping[str, Any] = field(default_factory=lambda: FrozenMapping({}))

    def __post_init__(self) -> None:
        _parse(self.use)
        if "use" in self.options:
            raise ValueError('options must not contain "use": it names the factory itself.')
        object.__setattr__(self, "options", FrozenMapping(self.options))

    @classmethod
    def of(cls, function: Callable[..., Any], **options: Any) -> Factory:
        """Return the written form of `function(**options)`."""
        return cls(name_of(function), options)

    def make(self) -> Any:
        """Make the call and return a new object."""
        return _look_up(self.use)(**self.options)


def _parse(name: str) -> tuple[str, str]:
    match = _NAME.fullmatch(name)
    if match is None:
        raise BadName(f'"{name}" is not a name of the form "package.module:Name".')
    return match["module"], match["attribute"]


def _look_up(name: str) -> Any:
    module_name, attribute = _parse(name)
    module = _module(module_name)
    found = getattr(module, attribute, None)
    if found is None:
        hint = near(attribute, dir(module)) or "."
        raise BadName(f'There is no "{attribute}" in {module_name}{hint}')
    if not _is_code(found):
        raise BadName(f'"{name}" is neither a class nor a function.')
    return found


def _exported(name: str, homes: Collection[str]) -> Any:
    """Return what one of the homes exports under a name of Anyfleet.

    The name may begin with the home, with the module that defines the thing, or, for a part, with
    `anyfleet.parts`.
    """
    module_name, attribute = _parse(name)
    for home in homes:
        if lies_within(home, (OWN,)) and attribute in public_names(home):
            found = getattr(_module(home), attribute)
            own = [each for each in HOMES.values() if lies_within(found.__module__, (each,))]
            shown = [PARTS] if lies_within(home, (PARTS,)) else []
            if _is_code(found) and module_name in (home, found.__module__, *own, *shown):
                return found
    raise BadName(f'"{name}" is no part that may stand here{_like(attribute, homes)}')


def _like(attribute: str, homes: Collection[str]) -> str:
    names = [name for home in homes for name in public_names(home)]
    return near(attribute, names) or "."


def _is_code(found: Any) -> bool:
    return inspect.isclass(found) or inspect.isfunction(found)


def _module(module_name: str) -> ModuleType:
    try:
        return importlib.import_module(module_name)
    except Exception as error:  # a user's module can fail in any way at import
        raise BadName(f"{module_name} cannot be imported: {_brief(error)}.") from error


def _brief(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".rstrip(".")


def _frozen(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return tuple(_frozen(item) for item in value)
    return FrozenMapping(value) if isinstance(value, Mapping) else value
