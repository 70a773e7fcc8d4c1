"""`anyfleet methods`: all methods with their papers, one closely, and the formulas."""

import importlib
import inspect
import pkgutil
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import anyfleet
from anyfleet import arrays as columns
from anyfleet.cli.screen import PlainTable, console
from anyfleet.config.signatures import ABSENT, Entry, form_of
from anyfleet.core.method import Method
from anyfleet.errors import ConfigError, Problem
from anyfleet.names import name_of, near, public_names
from anyfleet.papers import Paper

HOME = "anyfleet.methods"
FORMULAS = "anyfleet.formulas"
PAGES = Path(anyfleet.__file__).parents[2]  # the repository, if the package lies in one
_LEARNING_RATE = {"lr": "start", "decay": "factor"}  # the names that its own part has
# Whose formulas are listed: what methods share, methods, operations, plans, theory.
_SECTION = re.compile(r"§((?:0|1|2|3|F)(?:\.\d+)*)(?!\w)")
_QUALIFIED = re.compile(r"\b(?:[a-z_]+\.)+(?=[A-Za-z])")  # typing. and its like, before a name


@dataclass(frozen=True)
class Known:
    """A method with a name: the function that makes it, and the module of its paper."""

    make: Callable[..., Method]
    module: ModuleType

    @property
    def paper(self) -> Paper | None:
        """The paper, or None for a reference such as `local`."""
        return getattr(self.module, "PAPER", None)

    @property
    def line(self) -> str:
        """One line that says what it is, from the docstring of its module or function."""
        own = self.module.__name__.rpartition(".")[2] == self.make.__name__
        text = inspect.cleandoc((self.module if own else self.make).__doc__ or "")
        line = text.partition("\n")[0]
        return _capital(line.partition(": ")[2]) if own else as_noun(line)


def as_noun(docstring: str) -> str:
    """Return the docstring of a function as one of what it returns: without a leading "Return"."""
    text = inspect.cleandoc(docstring)
    return _capital(text.removeprefix("Return ")) if text.startswith("Return ") else text


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def known_methods() -> dict[str, Known]:
    """Return all methods, by the names that run files use."""
    package = importlib.import_module(HOME)
    makers = {name: getattr(package, name) for name in public_names(HOME)}
    return {n: Known(make, importlib.import_module(make.__module__)) for n, make in makers.items()}


def list_methods() -> None:
    """Print one row for each method: its name, what it does, its paper."""
    table = PlainTable()
    table.add_column("method", no_wrap=True)
    table.add_column("what it does", ratio=3)
    table.add_column("paper", ratio=2)
    for name, known in known_methods().items():
        table.add_row(name, known.line, known.paper.cite() if known.paper else "–")
    screen = console()
    screen.print(table)
    screen.print("\nMore of one: anyfleet methods NAME. BibTeX: anyfleet cite NAME.", markup=False)


def show_method(name: str) -> None:
    """Print all about one method: what it does, its settings, its parts."""
    methods = known_methods()
    if name not in methods:
        message = f"is not one of the methods ({', '.join(methods)})"
        raise ConfigError([Problem(name, message + (near(name, methods) or "."))])
    for line in _told(name, methods[name]):
        console().print(line, markup=False, soft_wrap=True)


def _told(name: str, known: Known) -> Iterator[str]:
    method = known.make()
    yield inspect.cleandoc(known.module.__doc__ or "") + "\n"
    yield as_noun(known.make.__doc__ or "") + "\n"
    yield f'In a run file, [method] use = "{name}", with any of'
    entries = form_of(known.make).entries
    width = max(map(len, entries), default=0)
    for knob, entry in entries.items():
        kind = _brief(inspect.formatannotation(entry.kind))
        yield f"  {knob:<{width}}  {kind}{_default(knob, entry, method)}"
    yield f"\n{method}"
    page = Path("docs", "methods", f"{name}.md")
    if (PAGES / page).is_file():
        yield f"\nMore about it: {page.as_posix()}"


def _default(knob: str, entry: Entry, method: Method) -> str:
    """Return the default of a setting; of one that is only passed on, that of the trainer."""
    name = _LEARNING_RATE.get(knob, knob)
    value = _field(name, method.train) if entry.default is ABSENT else entry.default
    return "" if value is ABSENT else f" = {value!r}"


def _field(name: str, part: Any) -> Any:
    """Return the first field of that name in a part or in the parts inside it, or ABSENT."""
    if not is_dataclass(part) or isinstance(part, type):
        return ABSENT
    values = {each.name: getattr(part, each.name) for each in fields(part)}
    inner = (_field(name, value) for value in values.values())
    return values.get(name, next((value for value in inner if value is not ABSENT), ABSENT))


# --- formulas -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Formula:
    """A public function whose docstring cites sections of the specification."""

    function: FunctionType
    sections: tuple[str, ...]

    @property
    def order(self) -> tuple[Any, ...]:
        """The sorting key: section by section, then name."""
        first, *rest = self.sections[0].split(".")
        return first, [int(number) for number in rest], self.function.__name__

    @property
    def signature(self) -> str:
        """The signature, with short names of arrays and without names of modules."""
        text = str(inspect.signature(self.function))
        for name in ("Floats", "Ints", "Flags"):
            text = text.replace(inspect.formatannotation(getattr(columns, name)), name)
        return _brief(text)


def list_formulas() -> None:
    """Print two lines for each formula: section, name and signature; how to import it."""
    screen = console()
    for formula in sorted(formulas(), key=lambda each: each.order):
        told = ", ".join(f"§{section}" for section in formula.sections)
        home, name = name_of(formula.function).split(":")
        screen.print(f"{told:<7} {name}{formula.signature}", markup=False, soft_wrap=True)
        screen.print(f"{'':<7} from {home} import {name}", markup=False, soft_wrap=True)


def formulas() -> Iterator[Formula]:
    """Yield every public function that says which formula of the specification it is."""
    for module in _modules():
        for name, function in vars(module).items():
            own = inspect.isfunction(function) and function.__module__ == module.__name__
            text = (own and function.__doc__) or ""
            sections = tuple(dict.fromkeys(_SECTION.findall(text)))
            if "specification" in text and sections and not name.startswith("_"):
                yield Formula(function, sections)


def _modules() -> Iterator[ModuleType]:
    package = importlib.import_module(FORMULAS)
    for found in pkgutil.walk_packages(package.__path__, f"{FORMULAS}."):
        yield importlib.import_module(found.name)


def _brief(annotation: str) -> str:
    return _QUALIFIED.sub("", annotation)
