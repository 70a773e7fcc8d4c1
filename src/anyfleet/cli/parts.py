"""`anyfleet parts`: one table of all parts, on the screen and as a page of the documents."""

import importlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from types import MappingProxyType
from typing import Any

from rich.text import Text

from anyfleet.cli.methods import as_noun, known_methods
from anyfleet.cli.screen import PlainTable, console
from anyfleet.config.loading import names_for
from anyfleet.config.signatures import hints_of
from anyfleet.core.method import Method
from anyfleet.errors import ConfigError, Problem
from anyfleet.experiment import Experiment
from anyfleet.names import HOMES, near
from anyfleet.papers import BYZANTINE, CLIPPING, Paper
from anyfleet.runtime.simulated.engines import Engine

# The fields of a run file whose parts are listed, in the order of the table. Networks (`model`)
# are made by a call that is written down, so that nothing tells their type.
SLOTS = (
    *("select", "schedule", "plan", "choose", "extract", "train", "norm", "uplink", "aggregate"),
    *("task", "model", "fleet", "engine"),
)
_SHOWN: Mapping[str, str] = MappingProxyType({"uplink": "uplink, downlink"})
# The page of a part that belongs to no method page, by paper or by slot.
_PAGES: Mapping[Paper | str, str] = MappingProxyType(
    {
        BYZANTINE: "robustness.md",
        CLIPPING: "robustness.md",
        "uplink": "codecs.md",
        "fleet": "fleets.md",
        "engine": "performance.md",
    }
)
PAGE = """# All parts

What can stand in a slot of a method or in a run file; the name is what `use` takes. A slot in
brackets means that the part stands inside another one of that slot, such as an optimiser inside a
trainer. This page is generated: `anyfleet parts --markdown > docs/parts.md`.

"""


@dataclass(frozen=True)
class ListedPart:
    """A row of the table: a part under the name that run files use."""

    name: str
    slot: str  # the field of a run file
    inside: bool  # it stands inside another part of the slot, not in the slot itself
    made_by: Any  # the class or function

    @property
    def shown_slot(self) -> str:
        """The slot as the table has it."""
        slot = _SHOWN.get(self.slot, self.slot)
        return f"({slot})" if self.inside else slot

    @property
    def line(self) -> str:
        """The first line of its docstring, without a leading "Return"."""
        return as_noun(self.made_by.__doc__ or "").partition("\n")[0].rstrip(".")

    @property
    def papers(self) -> tuple[Paper, ...]:
        """The papers that it comes from; if they depend on its settings, those of the defaults."""
        found = getattr(self.made_by, "papers", ())
        return tuple(self.made_by().papers if isinstance(found, property) else found)

    @property
    def page(self) -> str:
        """Its page below docs/, or "": that of a method of its papers, at best one that uses it."""
        own = [name for name, method in known_methods().items() if method.paper in self.papers]
        using = [name for name in own if self.made_by in _classes(known_methods()[name].make())]
        if own:
            return f"methods/{(using or own)[0]}.md"
        keys: tuple[Paper | str, ...] = (*self.papers, self.slot)
        return next((_PAGES[key] for key in keys if key in _PAGES), "")


def _classes(value: Any) -> Iterator[type]:
    """Yield the classes of a part and of all parts inside it."""
    if is_dataclass(value):
        yield type(value)
        for each in fields(value):
            yield from _classes(getattr(value, each.name))


def listed_parts() -> Iterator[ListedPart]:
    """Yield all parts, slot by slot: those that fill it, then those that stand inside these."""
    kinds = hints_of(Method) | hints_of(Experiment) | {"model": object, "engine": Engine}
    for slot in SLOTS:
        home = HOMES[slot]
        filling = names_for(home, kinds[slot])
        package = importlib.import_module(home)
        yield from (ListedPart(name, slot, False, getattr(package, name)) for name in filling)
        if slot in Method.__dataclass_fields__:
            inner = (name for name in names_for(home) if name not in filling)
            yield from (ListedPart(name, slot, True, getattr(package, name)) for name in inner)


def list_parts(slot: str | None = None) -> None:
    """Print the table of all parts, or of those of one slot."""
    if slot is not None and slot not in (*SLOTS, "downlink"):
        message = f"is not a slot ({', '.join(SLOTS)})"
        raise ConfigError([Problem(slot, message + (near(slot, SLOTS) or "."))])
    wanted = "uplink" if slot == "downlink" else slot
    table = PlainTable()
    table.add_column("part", no_wrap=True)
    table.add_column("slot", no_wrap=True)
    table.add_column("what it does", ratio=3)
    table.add_column("paper", ratio=2)
    for part in listed_parts():
        if wanted in (None, part.slot):
            cells = (part.name, part.shown_slot, part.line, _cited(part) or "–")
            table.add_row(*map(Text, cells))
    screen = console()
    screen.print(table)
    screen.print("\nA slot in brackets: the part stands inside another one of that slot.")
    if slot is None:
        screen.print("One slot: anyfleet parts SLOT")


def parts_page() -> str:
    """Return the page docs/parts.md."""
    rows = "".join(
        f"| `{part.name}` | {part.shown_slot} | {part.line.replace('|', chr(92) + '|')} "
        f"| {_cited(part)} | {f'[{part.page}]({part.page})' if part.page else ''} |\n"
        for part in listed_parts()
    )
    return f"{PAGE}| part | slot | what it does | paper | page |\n|---|---|---|---|---|\n{rows}"


def _cited(part: ListedPart) -> str:
    return "; ".join(paper.cite() for paper in part.papers)
